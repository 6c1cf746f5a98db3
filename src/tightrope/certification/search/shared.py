"""Small searches of many samples, in batches that they share.

A few splits decide most of what linear bounds of all layers leave open. One after the other, such
searches spend their time on starting operations; here the subproblems of all samples are bounded at
once, on the network itself (`tightrope.domains.branches`). No bound depends on what else is in the
batch, and each sample splits all that is open of it in each round, so that its search is the same
whoever its neighbours are. Samples that need more splits leave, for a search of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.answer import Answer, Cause, falsified, undecided, verified
from tightrope.attacks import attack_goal
from tightrope.attacks.goals import Rows
from tightrope.box import Box, joined
from tightrope.budget import LARGEST_PART, fitting
from tightrope.certification.problem import Choices, OpenProblem, proof
from tightrope.certification.refutation import confirmed
from tightrope.certification.search.inputs import FEW_INPUTS
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.devices import launches_on
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.subproblems import Branches, join
from tightrope.domains.linear.bounded import relaxed
from tightrope.domains.linear.rules import ACTIVATIONS
from tightrope.domains.reduced.reduction import reducible
from tightrope.precision import ROUNDING

MEMORY = 1 << 30  # bytes of the subproblems of all samples that share batches
COPIES = 8  # of a subproblem's numbers that it needs while it is bounded
NEURONS = 1 << 14  # of a network; a subproblem of a larger one is no small batch itself
SHARE = 0.25  # of the time that a sample has left


@dataclass(frozen=True)
class SharedSettings:
    """How hard to try: a sample leaves when `most` subproblems of it have been bounded."""

    root_iterations: int = 20
    iterations: int = 8
    alpha_rate: float = 0.1
    beta_rate: float = 0.1
    most: int = 48
    steps: int = 10  # of the attack that begins where bounds are attained


DEFAULTS = SharedSettings()


def suits(subject: Subject, problems: Sequence[OpenProblem], choices: Choices) -> bool:
    """Return whether searches of these problems may share batches.

    They are about labels, on a network of ReLUs with many inputs, a small one where launching many
    operations costs nothing; another rule or constraints of several neurons are what only a search
    of its own knows.
    """
    if any(opened.problem.label is None for opened in problems) or not subject.finite:
        return False
    if choices.branching != Choices.branching or choices.cuts == "on" or choices.split == "input":
        return False
    few = math.prod(subject.input_shape) <= FEW_INPUTS
    fits = _bending(subject) > 0 and (_bending(subject) <= NEURONS or launches_on(subject.device))
    return not few and fits and reducible(subject.exact)


def _bending(subject: Subject) -> int:
    nodes = subject.exact.nodes
    return sum(math.prod(n.shape) for n in nodes if isinstance(n.op, ACTIVATIONS))


def parts(
    subject: Subject, problems: Sequence[OpenProblem], settings: SharedSettings = DEFAULTS
) -> Iterator[Sequence[OpenProblem]]:
    """Split samples so that the subproblems of those that share batches fit into memory."""
    rows = max((len(opened.problem.unsafe.matrix) for opened in problems), default=0)
    size = together(subject, max(rows, settings.most))
    for first in range(0, len(problems), size):
        yield problems[first : first + size]


def together(subject: Subject, subproblems: int) -> int:
    """Return how many samples of so many subproblems there is room for: on a GPU, all of it."""
    room = fitting(LARGEST_PART if launches_on(subject.device) else MEMORY, subject.device)
    return max(1, room // (4 * COPIES * subproblems * max(_bending(subject), 1)))


def joined_nodes(problems: Sequence[OpenProblem]) -> dict[int, Box] | None:
    """Return the bounds of nodes that are known of all problems, as one batch."""
    known = [opened.nodes for opened in problems if opened.nodes is not None]
    if len(known) < len(problems):
        return None
    common = set(known[0]).intersection(*known)
    return {i: joined([nodes[i] for nodes in known]) for i in sorted(common)}


@dataclass(frozen=True)
class _Open:
    """Subproblems that are open, with their bounds and the neuron to split each at."""

    problems: Branches
    bound: Tensor
    neuron: Tensor

    def __getitem__(self, index: Tensor) -> _Open:
        return _Open(self.problems[index], self.bound[index], self.neuron[index])


class SharedSearch:
    """The searches of some samples, of whose neurons linear bounds are known."""

    def __init__(
        self,
        subject: Subject,
        problems: Sequence[OpenProblem],
        settings: SharedSettings = DEFAULTS,
    ) -> None:
        self.subject, self.problems, self.settings = subject, problems, settings
        nodes = joined_nodes(problems)
        assert nodes is not None
        relaxation = relaxed(subject.exact, nodes, rounding=ROUNDING)
        unsafe = [opened.problem.unsafe for opened in problems]
        device = relaxation.box.lower.device
        counts = torch.tensor([len(u.matrix) for u in unsafe], device=device)
        self.owner = torch.arange(len(unsafe), device=device).repeat_interleave(counts)
        self.matrix = torch.cat([u.matrix for u in unsafe])
        self.offset = torch.cat([u.offset for u in unsafe])
        self.bounder = GraphBounder(relaxation, self.matrix, self.offset, owner=self.owner)
        self.inner = joined([opened.problem.inner for opened in problems])
        self.labels = torch.tensor([opened.problem.label for opened in problems], device=device)
        self.lowest = self.matrix.new_full((len(problems),), torch.inf)
        self.worst = torch.full_like(self.lowest, -torch.inf)  # without splits
        self.count = torch.zeros_like(counts)
        self.searched = torch.ones_like(counts, dtype=torch.bool)
        self.late = torch.zeros_like(self.searched)
        self.points: list[Tensor | None] = [None] * len(problems)

    def root(self) -> list[Answer]:
        """Bound the rows of all samples, with slopes that are optimised for each."""
        self._root()
        self._note_rows()
        return [proof(bound) for bound in self.worst.tolist()]

    def run(self, deadline: Deadline) -> list[Answer]:
        """Search until each sample is decided, has had its subproblems, or its time is up."""
        started = time.perf_counter()
        left: _Open | None = None
        try:
            with until(deadline):
                left, rounds = self._root(), 0
                while len(left.bound):
                    if rounds % 2 == 0:
                        left = self._refuted(left)
                    left = self._round(self._in_time(left, time.perf_counter() - started))
                    rounds += 1
        except OutOfTimeError:
            pass  # what was decided before stands
        self._note_rows()
        open_ones = torch.full_like(self.searched, left is None)
        if left is not None:
            open_ones[self.owner[left.problems.row]] = True
        self.late |= self.searched & open_ones
        decided = (self.searched & ~open_ones).tolist()
        return [self._answer(i, proved) for i, proved in enumerate(decided)]

    def _answer(self, i: int, proved: bool) -> Answer:
        point, count = self.points[i], int(self.count[i])
        if point is not None:
            return falsified(point, count)
        if proved:
            return verified(float(self.lowest[i]), count)
        bound = float(self.worst[i])
        if self.late[i]:
            return undecided(Cause.TIME, "it shared batches", bound=bound, subproblems=count)
        return undecided(bound=bound)

    def _note_rows(self) -> None:
        """Let samples be charged by what was computed for each."""
        for opened, rows in zip(self.problems, self.count.tolist(), strict=True):
            opened.rows = rows

    def _root(self) -> _Open:
        """Bound all rows without splits; return those that are open."""
        rows = torch.arange(len(self.owner), device=self.owner.device)
        bound, problems, costs = self.bounder.improve(
            self.bounder.root(rows),
            iterations=self.settings.root_iterations,
            alpha_rate=self.settings.alpha_rate,
        )
        strict = self._strict(problems)
        self.worst.fill_(torch.inf).scatter_reduce_(0, self.owner, strict, "amin")
        return self._still(problems, bound, strict, costs)

    def _round(self, left: _Open) -> _Open:
        """Split all that is open, and bound both sides; return what stays open."""
        left = self._split_further(left)
        if not len(left.bound):
            return left
        sides = [left.problems.split(left.neuron, sign) for sign in (1, -1)]
        bound, children, costs = self.bounder.improve(
            join(sides),
            iterations=self.settings.iterations,
            alpha_rate=self.settings.alpha_rate,
            beta_rate=self.settings.beta_rate,
        )
        promising = (bound > 0).nonzero()[:, 0]
        strict = self.matrix.new_full((len(bound),), -torch.inf)
        strict[promising] = self._strict(children[promising])
        # What held for the parent holds for its children.
        bound = torch.maximum(bound, left.bound.repeat(2))
        return self._alive(self._still(children, bound, strict, costs))

    def _strict(self, problems: Branches) -> Tensor:
        bounds = self.bounder.strict(problems)
        return torch.where(torch.isfinite(bounds), bounds, -torch.inf)

    def _still(self, problems: Branches, bound: Tensor, strict: Tensor, costs: Tensor) -> _Open:
        """Count subproblems, take note of those that are proved, and return the others."""
        owner = self.owner[problems.row]
        self.count += owner.bincount(minlength=len(self.count))
        proved = strict > 0
        self.lowest.scatter_reduce_(0, owner[proved], strict[proved], "amin")
        # A last column is for those that have no unstable neurons.
        cost, neuron = F.pad(costs, (0, 1), value=-1.0).max(1)
        neuron = torch.where(cost >= 0, neuron, -1)
        bound = bound.nan_to_num(-torch.inf).clamp(max=0.0)
        return _Open(problems, bound, neuron)[~proved]

    def _split_further(self, left: _Open) -> _Open:
        """Leave out samples some of whose subproblems have nothing left to be split."""
        owner = self.owner[left.problems.row]
        self.searched[owner[left.neuron < 0]] = False
        return left[self.searched[owner]]

    def _alive(self, left: _Open) -> _Open:
        """Leave out samples that have had their share."""
        owner = self.owner[left.problems.row]
        going = torch.zeros_like(self.searched).index_fill(0, owner, True)
        self.searched &= ~(going & (self.count >= self.settings.most))
        return left[self.searched[owner]]

    def _in_time(self, left: _Open, seconds: float) -> _Open:
        """Leave out samples whose share of the seconds, by rows, is more than they may take."""
        total = int(self.count.sum())
        limits = [SHARE * opened.left for opened in self.problems]
        spent = self.count.double() * (seconds / total)
        over = spent.cpu() > torch.tensor(limits, dtype=torch.float64)
        over = over.to(self.searched.device) & self.searched
        self.late |= over
        self.searched &= ~over
        return left[self.searched[self.owner[left.problems.row]]]

    def _refuted(self, left: _Open) -> _Open:
        """Attack each sample from where its lowest bound is attained; return what is open still."""
        order = left.bound.argsort(stable=True)
        owner = self.owner[left.problems.row[order]]
        order = order[owner.argsort(stable=True)]
        owner = self.owner[left.problems.row[order]]
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = owner[1:] != owner[:-1]
        chosen, samples = order[first], owner[first]
        box, row = self.inner[samples], left.problems.row[chosen]
        dtype = box.lower.dtype
        starts = box.project(self.bounder.look(left.problems[chosen]).point.to(dtype))
        goal = Rows(self.matrix[row, None].to(dtype), self.offset[row, None].to(dtype))
        network = self.subject.attacked
        points = attack_goal(network, box, goal, steps=self.settings.steps, start=starts)
        found = confirmed(self.subject, box, self.labels[samples], points)
        for sample, point in zip(samples.tolist(), found, strict=True):
            if point is not None:
                self.points[sample], self.searched[sample] = point, False
        return left[self.searched[self.owner[left.problems.row]]]
