"""Counterexamples: points of the exact input set at which the original network fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.attacks import attack_goal
from tightrope.box import Box, flat
from tightrope.certification.probing import search_pattern, spread_points
from tightrope.certification.properties import Unsafe
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError

# How much is attacked together; between its steps there is time to look at the clock.
MOST_GROUPS = 4096
NEURONS = 1 << 26  # rows times points

# Points that a probe goes on from, in all groups together, and how far it goes.
FIRST_POINTS = 64
PROBED = 256
PROBE_STEPS = 40
PROBE_MOVES = 24

# Where outputs are no numbers the network may fail, too, but what is promising goes first.
NO_SCORE = -1e-30

# Says of one point, alone, whether the original network fails there.
Fails = Callable[[Tensor], bool]

# Gets points (flat) and the group each is about; returns a counterexample or None.
Refute = Callable[[Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class Refuter:
    """Tries to turn points that a bound suggests into counterexamples.

    `inner` holds only points of the exact input set (batch size 1). A point counts when `fails`
    says so of the original network.
    """

    subject: Subject
    inner: Box
    unsafe: Unsafe
    fails: Fails
    climbers: int = 8
    steps: int = 10

    def __call__(self, points: Tensor, groups: Tensor) -> Tensor | None:
        """Return a counterexample near some points (flat), each about one group of rows."""
        dtype = self.inner.lower.dtype
        points = self.inner.project(points.to(dtype).view(-1, *self.subject.input_shape))
        goal = self.unsafe.goal(groups, dtype)
        with torch.no_grad():
            score = goal(self.subject.attacked(points))
        found = self.confirm_best(points, score)
        if found is not None:
            return found
        best = score.nan_to_num(-torch.inf).topk(min(self.climbers, len(score))).indices
        box = self.inner.repeat(len(best))
        climbed = attack_goal(
            self.subject.attacked, box, goal.select(best), steps=self.steps, start=points[best]
        )
        with torch.no_grad():
            score = goal.select(best)(self.subject.attacked(climbed))
        return self.confirm_best(climbed, score)

    def search(
        self, *, steps: int, restarts: int, deadline: Deadline | None = None
    ) -> Tensor | None:
        """Attack all groups, from scratch, as long as there is time."""
        groups = self.unsafe.group.unique()
        together = min(MOST_GROUPS, self.subject.points_at_once)
        try:
            for _ in range(restarts):
                for part in self.unsafe.parts(groups, together):
                    found = self._attack(part, steps, deadline or Deadline())
                    if found is not None:
                        return found
        except OutOfTimeError:
            pass
        return None

    def probe(self, count: int, *, deadline: Deadline | None = None) -> Tensor | None:
        """Look at many points of a box of few inputs, and go on from the best of each group."""
        deadline = deadline or Deadline()
        try:
            found = self._probe(count, deadline)
        except OutOfTimeError:
            return None
        return found

    def _probe(self, count: int, deadline: Deadline) -> Tensor | None:
        dtype = self.inner.lower.dtype
        groups = self.unsafe.group.unique()
        each = max(1, PROBED // len(groups))
        points = spread_points(self.inner, count)
        kept, score = self._best_of(points, groups, each, deadline)
        place = torch.arange(len(groups), device=groups.device).repeat_interleave(kept.shape[1])
        starts, score = points[kept.flatten()], score.flatten()
        goal = self.unsafe.goal(groups[place], dtype)
        found = self.confirm_best(starts, score)
        if found is not None:
            return found

        size = self.subject.points_at_once

        def network(x: Tensor) -> Tensor:
            deadline.check()
            return self.subject.attacked(x)

        def many(x: Tensor) -> Tensor:
            return torch.cat([network(part) for part in x.split(size)])

        climbed = torch.cat(
            [
                attack_goal(
                    network,
                    self.inner.repeat(len(part)),
                    goal.select(part),
                    steps=PROBE_STEPS,
                    start=starts[part],
                )
                for part in torch.arange(len(starts), device=starts.device).split(size)
            ]
        )
        with torch.no_grad():
            found = self.confirm_best(climbed, goal(many(climbed)))
            if found is not None:
                return found
            moved, score = search_pattern(many, self.inner, goal, climbed, moves=PROBE_MOVES)
        return self.confirm_best(moved, score)

    def _best_of(
        self, points: Tensor, groups: Tensor, each: int, deadline: Deadline
    ) -> tuple[Tensor, Tensor]:
        """Return the points that come nearest to each group, and how near, [groups, each]."""
        size = min(self.subject.points_at_once, max(1, NEURONS // len(self.unsafe.group)))
        matrix, offset = (t.to(points.dtype) for t in (self.unsafe.matrix, self.unsafe.offset))
        scores: list[Tensor] = []
        place = torch.searchsorted(groups, self.unsafe.group)
        first, chunk, started = 0, min(FIRST_POINTS, size), deadline.left
        with torch.no_grad():
            # Whatever the network costs, time is left to go on from the best.
            while first < len(points) and (not scores or deadline.left > started / 2):
                part = points[first : first + chunk]
                first, chunk = first + chunk, min(2 * chunk, size)
                rows = flat(self.subject.attacked(part)) @ matrix.T + offset
                worst = rows.new_full((len(part), len(groups)), -torch.inf)
                index = place.expand(len(part), -1)
                scores.append(-worst.scatter_reduce(1, index, rows, "amax"))
                if bool((scores[-1] >= 0).any()):
                    break
        best = torch.cat(scores).nan_to_num(-torch.inf).topk(min(each, first, len(points)), dim=0)
        return best.indices.T, best.values.T

    def confirm_best(self, points: Tensor, score: Tensor) -> Tensor | None:
        """Return the first of the points with the best scores that is a counterexample."""
        score = torch.where(score.isnan(), NO_SCORE, score)
        order = score.argsort(descending=True)
        return self._confirm(points[order], int((score >= NO_SCORE).sum()))

    def _attack(self, groups: Tensor, steps: int, deadline: Deadline) -> Tensor | None:
        def network(x: Tensor) -> Tensor:
            deadline.check()
            return self.subject.attacked(x)

        goal = self.unsafe.goal(groups, self.inner.lower.dtype)
        points = attack_goal(network, self.inner.repeat(len(groups)), goal, steps=steps)
        with torch.no_grad():
            score = goal(network(points))
        return self.confirm_best(points, score)

    def _confirm(self, points: Tensor, count: int) -> Tensor | None:
        """Return the first of the most promising points that is a counterexample."""
        for point in points[: min(count, 16)]:
            if bool(self.inner.contains(point[None])[0]) and self.fails(point):
                return point
        return None


def confirmed(subject: Subject, box: Box, labels: Tensor, points: Tensor) -> list[Tensor | None]:
    """Return which points, one of each box, are counterexamples: inside, and wrong on their own."""
    candidates = subject.predict(points) != labels
    candidates[candidates.clone()] = box[candidates].contains(points[candidates])
    broken = subject.fooled(points, labels, candidates).tolist()
    return [point if found else None for point, found in zip(points, broken, strict=True)]
