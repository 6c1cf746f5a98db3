"""A problem: one set of inputs and the outputs that must not occur on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightrope.answer import Answer, undecided, verified
from tightrope.box import Box
from tightrope.certification.names import CUTS, SPLITS
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.refutation import Fails, Refuter
from tightrope.certification.search.branching import RULES
from tightrope.certification.subjects import Subject
from tightrope.domains.linear.crown import Effort
from tightrope.errors import UserError, shorten, unknown_name

if TYPE_CHECKING:
    from tightrope.certification.search.branch_and_bound import BranchAndBound
    from tightrope.certification.search.inputs import InputSearch
    from tightrope.certification.search.nested import NestedSearch
    from tightrope.certification.search.on_graph import GraphSearch
    from tightrope.certification.search.on_pieces import PieceSearch


@dataclass(frozen=True)
class Problem:
    """One box and the outputs that must not occur on it.

    `outer` contains the exact input set (float64), `inner` lies in it (the network's dtype); both
    have batch size 1. `fails` says of one point whether it is a counterexample. `label` is the
    class that has to win everywhere, if that is what is asked: such problems are bounded and
    attacked many at a time. `ball` is then where the box comes from, if it is one of a ball.
    """

    outer: Box
    inner: Box
    unsafe: Unsafe
    fails: Fails
    label: int | None = None
    ball: Ball | None = None

    def refuter(self, subject: Subject) -> Refuter:
        """Return what turns points into counterexamples."""
        return Refuter(subject, self.inner, self.unsafe, self.fails)


@dataclass(frozen=True)
class Choices:
    """What users may choose about a search: what it takes apart, by which rule, with what help."""

    split: str = "auto"  # or input, or relu
    branching: str = "intercept"  # or another row of `search.branching.RULES`
    cuts: str = "auto"  # or off, or on


CHOICES = Choices()


def check_choices(split: str, branching: str, cuts: str) -> Choices:
    """Return what was chosen about a search, or say what there is to choose from."""
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if branching not in RULES:
        raise unknown_name("branching rule", branching, RULES)
    if cuts not in CUTS:
        raise unknown_name("choice of cuts", cuts, CUTS)
    return Choices(split, branching, cuts)


@dataclass
class OpenProblem:
    """A problem on its way through the stages, and what they have found out about it so far.

    `limit` is how many seconds all stages together may take, of which `times` are spent, stage by
    stage; `nodes` are proved bounds of nodes by position, found with that `effort`; `settled` are
    those found on the way, which stay when a stage runs out of time; `bound` is
    the best proved lower bound on the worst row; `search` is what stands at the root of a search.
    `rows` is how many rows or subproblems of it the last batch had, by which its time is shared out
    (0: as many as of the others).
    """

    problem: Problem
    limit: float = math.inf
    times: dict[str, float] = field(default_factory=dict)
    nodes: Mapping[int, Box] | None = None
    settled: dict[int, Box] = field(default_factory=dict)
    bound: float | None = None
    effort: Effort | None = None
    search: BranchAndBound | InputSearch | NestedSearch | GraphSearch | PieceSearch | None = None
    last: Answer = field(default_factory=Answer)
    rows: int = 0

    @property
    def left(self) -> float:
        """The seconds left."""
        return self.limit - sum(self.times.values())

    def note(self, found: Answer) -> None:
        """Remember what a stage found that did not decide; the best bound so far stands."""
        bounds = [b for b in (self.bound, found.bound) if b is not None and math.isfinite(b)]
        self.bound = max(bounds, default=None)
        if found.cause is not None or found.subproblems:
            self.last = found


def robustness(subject: Subject, ball: Ball, labels: Tensor) -> list[Problem]:
    """Return the problem of each sample of a batch: no other class may win."""
    classes = subject.exact.output_shape[0]
    outer, inner = ball.outer(), ball.inner()

    def problem(i: int, label: int) -> Problem:
        def fails(point: Tensor) -> bool:
            return int(subject.predict(point[None])[0]) != label

        unsafe = Unsafe.misclassification(label, classes, labels.device)
        own = ball[i : i + 1]
        return Problem(outer[i : i + 1], inner[i : i + 1], unsafe, fails, label, own)

    return [problem(i, label) for i, label in enumerate(labels.tolist())]


def worst_row(unsafe: Unsafe, bounds: Tensor) -> float:
    """Return a lower bound on the worst group, from strict bounds on `matrix @ output`.

    A group is safe where one of its rows is positive. Where bounds are not finite, something went
    wrong on the way to them, and they say nothing.
    """
    if not torch.isfinite(bounds).all():
        return -math.inf
    if unsafe.offset.any():
        # The sums are rounded, though never across zero.
        bounds = torch.nextafter(bounds + unsafe.offset, torch.full_like(bounds, -torch.inf))
    best = bounds.new_full((int(unsafe.group.max()) + 1,), -torch.inf)
    return float(best.scatter_reduce(0, unsafe.group, bounds, "amax")[unsafe.group].min())


def proof(bound: float) -> Answer:
    """Return what a strict bound on the worst row says."""
    return verified(bound) if bound > 0 else undecided(bound=bound)


def check_timeout(timeout: float) -> None:
    """Refuse a time that is none."""
    try:
        fits = math.isfinite(timeout) and timeout > 0
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise UserError(f"timeout must be a positive number of seconds, got {shorten(timeout)}")
