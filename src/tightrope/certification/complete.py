"""Complete methods for one problem: branch and bound, and mixed-integer programming.

A problem is one box of inputs and one set of unsafe outputs. It is `verified` by strict bounds
(a mixed-integer program: by its dual bound, less an allowance for the solver's tolerances),
falsified by a point that the original network fails at, and open otherwise, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.certification.properties import Samples, Unsafe
from tightrope.certification.refutation import Fails, Refuter
from tightrope.certification.search.branch_and_bound import BranchAndBound, Outcome
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.linear.bounded import Relaxation, relaxed
from tightrope.domains.linear.crown import ALPHA, Effort, reduction_fits, relax, unstable_neurons
from tightrope.domains.linear.relaxations import unstable
from tightrope.domains.milp import program as milp
from tightrope.domains.reduced.reduction import reduce, reducible
from tightrope.errors import UserError
from tightrope.precision import ROUNDING

NOT_BOUNDED = "time: the network was not bounded to its end"


@dataclass(frozen=True)
class Problem:
    """One box and the outputs that must not occur on it.

    `outer` contains the exact input set (float64), `inner` lies in it (the network's dtype); both
    have batch size 1. `fails` says of one point whether it is a counterexample.
    """

    outer: Box
    inner: Box
    unsafe: Unsafe
    fails: Fails


@dataclass(frozen=True)
class Answer:
    """The answer to a problem; `bound` is a proved lower bound on the worst row, NaN if none is."""

    verified: bool
    point: Tensor | None
    bound: float
    domains: int = 0
    reason: str = ""


class Method(Protocol):
    """A complete method."""

    def __call__(
        self,
        subject: Subject,
        problem: Problem,
        known: Mapping[int, Box] | None,
        *,
        timeout: float,
    ) -> Answer:
        """Decide a problem; `known` are proved bounds of nodes, if there are any."""


def robustness(subject: Subject, samples: Samples) -> Problem:
    """Return the problem of one sample: no other class may win."""
    label = int(samples.labels[0])
    device = samples.labels.device
    classes = subject.exact.output_shape[0]

    def fails(point: Tensor) -> bool:
        return int(subject.predict(point[None])[0]) != label

    return Problem(
        samples.ball.outer(),
        samples.ball.inner(),
        Unsafe.misclassification(label, classes, device),
        fails,
    )


def bound_nodes(
    subject: Subject,
    problem: Problem,
    known: Mapping[int, Box] | None,
    effort: Effort = ALPHA,
) -> Relaxation:
    """Return a strict relaxation of the network, from known bounds where there are any."""
    if known is not None:
        return relaxed(subject.exact, dict(known), rounding=ROUNDING)
    return relax(subject.exact, problem.outer, effort=effort, rounding=ROUNDING)


def branch_and_bound(
    subject: Subject,
    problem: Problem,
    known: Mapping[int, Box] | None,
    *,
    timeout: float,
) -> Answer:
    """Decide a problem by splitting ReLUs."""
    deadline = Deadline.after(timeout)
    unsafe = problem.unsafe
    try:
        with until(deadline):
            relaxation = bound_nodes(subject, problem, known)
            if not reducible(relaxation.graph):
                return Answer(False, None, float("nan"), reason="no branching: not a ReLU network")
            if not reduction_fits(relaxation):
                reason = f"memory: {unstable_neurons(relaxation)} unstable neurons"
                return Answer(False, None, float("nan"), reason=reason)
            network = reduce(relaxation, unsafe.matrix, unsafe.offset)
    except OutOfTimeError:
        return Answer(False, None, float("nan"), reason=NOT_BOUNDED)
    refuter = Refuter(subject, problem.inner, unsafe, problem.fails)
    outcome = BranchAndBound(network, unsafe.group, refuter).run(deadline.end)
    reason = f"{outcome.reason}: {_state(relaxation, outcome)}" if outcome.reason else ""
    # Of what is open, only float32 knows a bound.
    bound = outcome.bound if outcome.proved else float("nan")
    return Answer(outcome.proved, outcome.point, bound, outcome.subproblems, reason)


def _state(relaxation: Relaxation, outcome: Outcome) -> str:
    """Say how far the search came."""
    nodes = relaxation.graph.nodes
    counts = {
        nodes[i].name: int(unstable(relaxation.boxes[nodes[i].inputs[0]]).sum())
        for i in relaxation.lines
    }
    widest = max(counts, key=lambda name: counts[name], default="")
    return (
        f"lowest bound {outcome.bound:.4g}, {outcome.open} subproblems open of "
        f"{outcome.subproblems}, widest layer {widest!r} with {counts.get(widest, 0)} "
        "unstable neurons"
    )


def mixed_integer_program(
    subject: Subject,
    problem: Problem,
    known: Mapping[int, Box] | None,
    *,
    timeout: float,
) -> Answer:
    """Decide a problem by one mixed-integer program per row."""
    deadline = time.monotonic() + timeout
    try:
        with until(Deadline(deadline)):
            relaxation = bound_nodes(subject, problem, known)
    except OutOfTimeError:
        return Answer(False, None, float("nan"), reason=NOT_BOUNDED)
    try:
        encoding = milp.Encoding(subject.exact, problem.outer, relaxation.boxes)
    except UserError as error:  # other activations than ReLU, numbers that are not finite
        return Answer(False, None, float("nan"), reason=f"no encoding: {error}")
    refuter = Refuter(subject, problem.inner, problem.unsafe, problem.fails)
    lowest = float("inf")
    for group in problem.unsafe.group.unique().tolist():
        best = float("-inf")
        for row in (problem.unsafe.group == group).nonzero()[:, 0].tolist():
            allowance = milp.safety(encoding, problem.unsafe.matrix[row])
            found = milp.minimize(
                encoding,
                problem.unsafe.matrix[row],
                float(problem.unsafe.offset[row]),
                seconds=deadline - time.monotonic(),
                stop_above=allowance,
                stop_below=0.0,
            )
            best = max(best, found.lower - allowance)
            if best > 0:
                break
            if found.point is not None:
                about = torch.tensor([group], device=problem.unsafe.group.device)
                point = refuter(found.point.view(1, -1).to(problem.inner.lower), about)
                if point is not None:
                    return Answer(False, point, found.upper)
        lowest = min(lowest, best)
        if not best > 0:
            over = time.monotonic() > deadline
            reason = "time" if over else "within the solver's tolerances"
            return Answer(False, None, lowest, reason=f"{reason}: lowest bound {lowest:.4g}")
    return Answer(True, None, lowest)
