"""One problem from beginning to end: attack, linear bounds, branch and bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.certification.complete import (
    NOT_BOUNDED,
    Problem,
    bound_nodes,
    branch_and_bound,
)
from tightrope.certification.refutation import Refuter
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import best_bounds
from tightrope.domains.reduced.reduction import reducible
from tightrope.errors import UserError
from tightrope.precision import full_precision
from tightrope.verdict import Verdict

ATTACK_STEPS = 50
NO_TIME = "time: the attack had not ended"


def check_timeout(timeout: float) -> None:
    """Refuse a time that is none."""
    if not (math.isfinite(timeout) and timeout > 0):
        raise UserError(f"timeout must be a positive number of seconds, got {timeout}")


@dataclass(frozen=True)
class Verification:
    """The answer to one problem.

    `counterexample` is an input in the exact set at which the original network fails; `bound` a
    proved lower bound on the worst margin (None: no proof came about); `stage` is what decided;
    `reason` says why nothing did; `outputs` are those of an ONNX file at the counterexample.
    """

    verdict: Verdict
    stage: str
    seconds: float
    bound: float | None = None
    counterexample: Tensor | None = None
    domains: int = 0
    reason: str = ""
    outputs: Tensor | None = None

    def __bool__(self) -> bool:
        return self.verdict is Verdict.VERIFIED


def solve(
    subject: Subject, problem: Problem, *, timeout: float = 60.0, seed: int = 0
) -> Verification:
    """Decide one problem within a number of seconds."""
    started = time.monotonic()
    with torch.random.fork_rng(), full_precision():
        torch.manual_seed(seed)
        return _solve(subject, problem, started, timeout)


def _solve(subject: Subject, problem: Problem, started: float, timeout: float) -> Verification:
    def answer(verdict: Verdict, stage: str, **found: object) -> Verification:
        return Verification(verdict, stage, time.monotonic() - started, **found)  # type: ignore[arg-type]

    deadline = Deadline(started + timeout)
    refuter = Refuter(subject, problem.inner, problem.unsafe, problem.fails)
    point = refuter.search(steps=ATTACK_STEPS, restarts=1, deadline=deadline)
    if point is not None:
        return answer(Verdict.FALSIFIED, "attack", counterexample=point)
    if deadline.left <= 0:
        return answer(Verdict.UNKNOWN, "attack", reason=NO_TIME)
    try:
        with until(deadline):
            relaxation = bound_nodes(subject, problem, None)
            if not reducible(subject.exact):
                return _incomplete(problem, refuter, relaxation, answer, deadline)
    except OutOfTimeError:
        return answer(Verdict.UNKNOWN, "alpha", reason=NOT_BOUNDED)
    found = branch_and_bound(subject, problem, relaxation.boxes, timeout=deadline.left)
    stage = "alpha" if found.domains <= len(problem.unsafe.matrix) else "bab"
    if found.point is not None:
        return answer(Verdict.FALSIFIED, stage, counterexample=found.point, domains=found.domains)
    verdict = Verdict.VERIFIED if found.verified else Verdict.UNKNOWN
    bound = found.bound if found.verified else None
    return answer(verdict, stage, bound=bound, domains=found.domains, reason=found.reason)


def _incomplete(
    problem: Problem,
    refuter: Refuter,
    relaxation: Relaxation,
    answer: object,
    deadline: Deadline,
) -> Verification:
    """Decide what linear bounds and attacks can of a network that has other bends than ReLUs."""
    assert callable(answer)
    unsafe = problem.unsafe
    bounds = best_bounds(relaxation, unsafe.matrix) + unsafe.offset
    best = bounds.new_full((int(unsafe.group.max()) + 1,), -torch.inf)
    best = best.scatter_reduce(0, unsafe.group, bounds, "amax")[unsafe.group]
    worst = float(best.min())
    if torch.isfinite(bounds).all() and worst > 0:
        # The sums with the offsets are rounded, though never across zero.
        return answer(Verdict.VERIFIED, "alpha", bound=math.nextafter(worst, -math.inf))
    end = "no branching"
    for _ in range(20):
        if deadline.left <= 0:
            end = "time"
            break
        point = refuter.search(steps=4 * ATTACK_STEPS, restarts=1, deadline=deadline)
        if point is not None:
            return answer(Verdict.FALSIFIED, "attack", counterexample=point)
    reason = f"{end}: not a ReLU network, lowest bound {worst:.4g}"
    return answer(Verdict.UNKNOWN, "alpha", bound=worst, reason=reason)
