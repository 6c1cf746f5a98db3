"""Branch and bound over the inputs: a box cut into smaller and smaller ones.

Each round takes the boxes with the lowest bounds, bounds the rows of the property on all of them at
once (strictly: these bounds are proofs), closes the groups that have a positive row, clips off what
no counterexample can be in, and halves what is left. Points where bounds are attained are tried as
counterexamples. It needs linear bounds only, so that any activation will do, and is the better
search where few inputs vary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, falsified, undecided, verified
from tightrope.box import BallBox, Box
from tightrope.budget import fitting
from tightrope.certification.problem import Problem
from tightrope.certification.raids import Raids, seconds_of_raids
from tightrope.certification.refutation import Refute
from tightrope.certification.search.box_pool import BoxPool
from tightrope.certification.search.clipping import (
    KEPT,
    MOST_GROUPS,
    Boxes,
    clip,
    divisible,
    halve,
    join_boxes,
    shrinkage,
)
from tightrope.certification.search.combining import combine
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.devices import launches
from tightrope.domains.boxes.bounding import (
    BoxBounder,
    GraphBounder,
    RowBounds,
    box_bounder,
    loop_is_ready,
)
from tightrope.domains.boxes.choosing import ChoosingBounder
from tightrope.domains.boxes.condensed import varying_inputs
from tightrope.domains.linear.rules import ACTIVATIONS

SMALL_ROUND = 2048  # boxes
PATIENT = 8  # times the seconds of a round that a small one may take before it is not doubled
EAGER = 4  # rounds in which points are tried whatever it costs
FEW_INPUTS = 20
SOME_INPUTS = 128  # with which cutting the box may be the better search, too
ALIKE = 1e-3  # of its looseness that the bound of a row may be below the best one of its group
SHRUNK = 0.25  # of its volume: a box that clipping left less of is bounded again before it is cut
MOST_NEURONS = 24000  # with more, bounds of a single box take too long


@dataclass(frozen=True)
class InputSettings:
    """How the search goes about it."""

    seconds: float = 0.25  # that a round should take
    least: int = 64  # boxes in a round, if several cuts at once can make so many
    most: int = 16384
    tried: int = 64  # points of the lowest bounds, and as many middles
    share: float = 0.1  # of the time for trying points
    memory: int = 1 << 30  # bytes of open boxes, from which on the search goes into depth
    limit: int | None = None  # boxes, after which it gives up


DEFAULTS = InputSettings()


class InputSearch:
    """The search on one box of inputs; `group` says which group each row belongs to, [rows].

    Where rows are in several groups, the bounder has them once: `rows` says which one each is.
    """

    def __init__(
        self,
        bounder: BoxBounder,
        box: Box,
        group: Tensor,
        refute: Refute,
        *,
        settings: InputSettings = DEFAULTS,
        rows: Tensor | None = None,
    ) -> None:
        self.bounder, self.refute, self.settings = bounder, refute, settings
        self.whole = box.map(lambda t: t.reshape(1, -1))
        self.groups, self.group = group.unique(return_inverse=True)
        self.members = _members(self.group)
        self.rows = len(group)
        if rows is not None:
            self.members, self.rows = rows[self.members], int(rows.max()) + 1
        self.uses = torch.zeros(len(self.groups), self.rows, device=group.device)
        self.uses.scatter_(1, self.members, 1.0)
        # With one more row for each group, a combination of its others.
        sums = torch.arange(len(self.groups), device=group.device)[:, None] + self.rows
        self.wider = torch.cat((self.members, sums), 1)
        self.count, self.stuck, self.lowest = 0, 0, math.inf
        self.spent, self.rate, self.last = 0.0, 0.0, 0
        lower, upper = (t[:, bounder.varying] for t in self.whole.corners)
        everything = torch.ones(1, len(self.groups), dtype=torch.bool, device=lower.device)
        self.pool = BoxPool(Boxes(lower, upper, everything), lower.new_full((1,), -torch.inf))

    def begin(self) -> Answer:
        """Bound the whole box, and cut it."""
        taken = self.pool.take(1, deep=False)
        try:
            batch, bounds, best = self._look(taken)
            parts = self._divide(batch, bounds, best) if len(batch) else None
        except OutOfTimeError:  # what was not bounded stays open
            self.pool.add(taken, self.whole.lower.new_full((len(taken),), -torch.inf))
            raise
        if parts is None:
            return verified(self.lowest, self.count)
        lowest = float(torch.where(batch.open, best, torch.inf).min())
        self.pool.add(*parts)
        return undecided(bound=lowest, subproblems=self.count)

    def run(self, deadline: float) -> Answer:
        """Search until everything is decided or `time.monotonic()` passes the deadline."""
        started, rounds, pool = time.monotonic(), 0, self.pool
        while len(pool):
            cause = self._out_of_budget(deadline)
            if cause is not None:
                return self._unfinished(cause)
            most = fitting(self.settings.memory, self.whole.lower.device)
            taken = pool.take(self._batch(), deep=pool.bytes > most)
            try:
                with until(Deadline(deadline)):
                    batch, bounds, best = self._look(taken)
            except OutOfTimeError:
                pool.add(taken, self.whole.lower.new_full((len(taken),), -torch.inf))
                return self._unfinished(Cause.TIME)
            allowed = self.settings.share * (time.monotonic() - started)
            allowed += seconds_of_raids(self.refute)
            point = None
            if len(batch) and (rounds < EAGER or self.spent < allowed):
                with until(Deadline(deadline)), suppress(OutOfTimeError):
                    point = self._try(batch, bounds, best)
            if point is not None:
                return falsified(point, self.count)
            pool.add(*self._divide(batch, bounds, best))
            rounds += 1
        return (
            self._unfinished(Cause.TOO_CLOSE) if self.stuck else verified(self.lowest, self.count)
        )

    def _look(self, taken: Boxes) -> tuple[Boxes, RowBounds, Tensor]:
        """Bound boxes; return those that are open with their bounds, and those of their groups."""
        batch, bounds, best = self._close(taken, self._bound(taken))
        if self.members.shape[1] > 1 and len(batch):
            some = batch.open & (batch.open.sum(1, keepdim=True) <= MOST_GROUPS)
            bounds = combine(bounds, batch.lower, batch.upper, some, self.members)
            batch, bounds, best = self._close(batch, bounds)
        return batch, bounds, best

    def _unfinished(self, cause: Cause) -> Answer:
        """Say how far the search came."""
        lowest = min(self.lowest, self.pool.lowest) if len(self.pool) else self.lowest
        left = f"{len(self.pool) + self.stuck} boxes open of {self.count}"
        details = f"lowest bound {lowest:.4g}, {left}"
        return undecided(cause, details, bound=lowest, subproblems=self.count)

    def _out_of_budget(self, deadline: float) -> Cause | None:
        if time.monotonic() > deadline:
            return Cause.TIME
        limit = self.settings.limit
        return Cause.MEMORY if limit is not None and self.count >= limit else None

    def _members(self, bounds: RowBounds) -> Tensor:
        """Return the rows of each group, combinations among them where there are any."""
        return self.members if bounds.slope.shape[1] == self.rows else self.wider

    def _batch(self) -> int:
        """Return how many boxes a round can take in its time.

        One box may take as long as many: small rounds are doubled until that shows.
        """
        size = max(1, min(int(self.rate * self.settings.seconds), self.settings.most))
        if self.last < PATIENT * self.settings.seconds * self.rate:
            size = max(size, min(2 * self.last, SMALL_ROUND))
        return size

    def _bound(self, batch: Boxes) -> RowBounds:
        started = time.monotonic()
        wanted = batch.open.float() @ self.uses > 0
        bounds = self.bounder(batch.lower, batch.upper, wanted)
        self.rate, self.last = len(batch) / max(time.monotonic() - started, 1e-6), len(batch)
        self.count += len(batch)
        return bounds

    def _close(self, batch: Boxes, bounds: RowBounds) -> tuple[Boxes, RowBounds, Tensor]:
        """Drop what is proved; also return the best bound of each group on what is left."""
        lower = torch.where(torch.isfinite(bounds.lower), bounds.lower, -torch.inf)
        best = lower[:, self._members(bounds)].amax(2)  # [boxes, groups]
        proved = batch.open & (best > 0)
        if proved.any():
            # The weights of combinations add up to 1 but for rounding.
            self.lowest = min(self.lowest, float(best[proved].min()) * (1 - 1e-12))
        still = batch.open & ~proved
        rest = still.any(1).nonzero()[:, 0]
        left = RowBounds(*(t[rest] for t in vars(bounds).values()))
        return Boxes(batch.lower[rest], batch.upper[rest], still[rest]), left, best[rest]

    def _divide(self, batch: Boxes, bounds: RowBounds, best: Tensor) -> tuple[Boxes, Tensor]:
        """Clip and halve boxes; return the parts with the bounds that they inherit."""
        clipped = clip(batch, bounds, self._members(bounds))
        if not torch.equal(clipped.open, batch.open) or not (
            torch.equal(clipped.lower, batch.lower) and torch.equal(clipped.upper, batch.upper)
        ):
            self.lowest = min(self.lowest, KEPT)
        left = clipped.open.any(1)
        worst = torch.where(clipped.open, best, torch.inf).amin(1)
        # What clipping left little of may be closed, or clipped further, as it is.
        again = left & (shrinkage(batch, clipped) < SHRUNK)
        rest = (left & ~again).nonzero()[:, 0]
        halves = self._halve(
            clipped[rest], RowBounds(*(t[rest] for t in vars(bounds).values())), worst[rest]
        )
        return join_boxes([clipped[again], halves[0]]), torch.cat((worst[again], halves[1]))

    def _halve(self, boxes: Boxes, bounds: RowBounds, worst: Tensor) -> tuple[Boxes, Tensor]:
        """Halve boxes, several times while there are few; return the parts with their bounds."""
        score = self._scores(boxes, bounds)
        possible = divisible(boxes)
        dead = ~possible.any(1)
        if dead.any():
            self.stuck += int(dead.sum())
            self.lowest = min(self.lowest, float(worst[dead].min()))
            boxes, score, worst, possible = (
                boxes[~dead],
                score[~dead],
                worst[~dead],
                possible[~dead],
            )
        levels = 1
        while len(boxes) << (levels + 1) <= self.settings.least and levels < boxes.lower.shape[1]:
            levels += 1
        for _ in range(levels if len(boxes) else 0):
            chosen = torch.where(possible, score, -torch.inf).argmax(1)
            # A coordinate that has been halved counts half; where none can be, nothing is done.
            boxes, worst = halve(boxes, chosen), worst.repeat(2)
            score = score.scatter(1, chosen[:, None], score.gather(1, chosen[:, None]) / 2)
            score, possible = score.repeat(2, 1), divisible(boxes)
        return boxes, worst

    def _scores(self, boxes: Boxes, bounds: RowBounds) -> Tensor:
        """Return how much cutting each coordinate promises, [boxes, inputs]."""
        width = boxes.upper - boxes.lower
        blame = torch.where(torch.isfinite(bounds.blame), bounds.blame, 0.0)
        blame = torch.where(self._leading(boxes, bounds)[:, :, None], blame, 0.0).sum(1)
        relative = width / (self.whole.upper - self.whole.lower)[:, self.bounder.varying]
        relative = relative.nan_to_num(0.0)
        total = blame.sum(1, keepdim=True)
        return torch.where(total > 0, blame / total, 0.0) + 1e-3 * relative

    def _leading(self, boxes: Boxes, bounds: RowBounds) -> Tensor:
        """Return which rows come closest to a proof of an open group, [boxes, rows].

        Rows whose bounds differ by little, compared with how loose they are, are equally close.
        """
        members = self._members(bounds)
        lower, loose = bounds.lower[:, members], bounds.blame.sum(2)[:, members]
        best = lower.argmax(2, keepdim=True)
        near = lower >= lower.gather(2, best) - ALIKE * torch.minimum(loose, loose.gather(2, best))
        near = near.scatter(2, best, True) & boxes.open[:, :, None]
        place = members.flatten().expand(len(boxes), -1)
        count = torch.zeros_like(bounds.lower, dtype=torch.int8)
        return count.scatter_reduce(1, place, near.flatten(1).to(torch.int8), "amax") > 0

    def _try(self, batch: Boxes, bounds: RowBounds, best: Tensor) -> Tensor | None:
        """Try where the lowest bounds are attained, and middles of boxes, as counterexamples."""
        started = time.monotonic()
        worst = torch.where(batch.open, best, torch.inf)
        chosen = worst.amin(1).topk(min(self.settings.tried, len(batch)), largest=False).indices
        group = worst[chosen].argmin(1)
        row = self._members(bounds)[group]
        row = row.gather(1, bounds.lower[chosen[:, None], row].argmax(1, keepdim=True))[:, 0]
        slope = bounds.slope[chosen, row]
        lower, upper = batch.lower[chosen], batch.upper[chosen]
        points = torch.cat((torch.where(slope > 0, lower, upper), lower / 2 + upper / 2))
        full = self.whole.center.repeat(len(points), 1)
        full[:, self.bounder.varying] = points
        found = self.refute(full, self.groups[group].repeat(2))
        self.spent += time.monotonic() - started
        return found


def _members(group: Tensor) -> Tensor:
    """Return the rows of each group, [groups, most]; smaller groups repeat theirs."""
    order = group.argsort(stable=True)
    sizes = group.bincount()
    first = sizes.cumsum(0) - sizes
    place = torch.arange(int(sizes.max()), device=group.device) % sizes[:, None]
    return order[first[:, None] + place]


def input_search(
    subject: Subject, problem: Problem, known: Mapping[int, Box] | None = None
) -> InputSearch:
    """Return the search of a problem; `known` are proved bounds of nodes, if there are any."""
    unsafe = problem.unsafe
    nodes = None if known is None else dict(known)
    both = torch.cat((unsafe.matrix, unsafe.offset[:, None]), 1)
    both, rows = both.unique(dim=0, return_inverse=True)
    bounder = box_bounder(subject.exact, problem.outer, both[:, :-1], both[:, -1], nodes)
    if isinstance(bounder, GraphBounder):
        bounder = ChoosingBounder(bounder)
    refute = Raids(problem.refuter(subject))
    return InputSearch(bounder, problem.outer, unsafe.group, refute, rows=rows)


def splits_inputs(subject: Subject, problem: Problem, choice: str = "auto") -> bool:
    """Return whether the box is to be cut rather than the signs of neurons."""
    if choice == "relu" or not subject.finite:
        return False
    # Parts of the box of a ball forget the ball.
    if choice == "auto" and isinstance(problem.outer, BallBox):
        return False
    return choice == "input" or suits_input_splits(subject, problem)


def suits_input_splits(subject: Subject, problem: Problem) -> bool:
    """Return whether so few inputs vary that cutting their box is the better search."""
    return _small(subject, problem, FEW_INPUTS)


def suits_nesting(subject: Subject, problem: Problem, choice: str = "auto") -> bool:
    """Return whether few inputs of a network vary for whose size parts inherit bounds."""
    if choice == "relu" or not subject.finite or isinstance(problem.outer, BallBox):
        return False
    return few_vary(problem, FEW_INPUTS) and _activations(subject) > MOST_NEURONS


def suits_turns(subject: Subject, problem: Problem) -> bool:
    """Return whether cutting the box is worth trying where splitting ReLUs takes long."""
    if launches(problem.outer.lower) or not subject.finite or isinstance(problem.outer, BallBox):
        return False
    return _small(subject, problem, SOME_INPUTS) and loop_is_ready()


def _small(subject: Subject, problem: Problem, inputs: int) -> bool:
    """Return whether at most so many inputs vary, and bounds of a box do not take long."""
    return few_vary(problem, inputs) and _activations(subject) <= MOST_NEURONS


def few_vary(problem: Problem, inputs: int) -> bool:
    """Return whether at most so many inputs vary."""
    return int(varying_inputs(problem.outer.map(lambda t: t.cpu())).sum()) <= inputs


def _activations(subject: Subject) -> int:
    """Count the neurons of all activations."""
    nodes = subject.exact.nodes
    return sum(math.prod(n.shape) for n in nodes if isinstance(n.op, ACTIVATIONS))
