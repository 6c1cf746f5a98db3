"""One problem from beginning to end: attack, linear bounds, branch and bound."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.certification.complete import Problem, bound_nodes, branch_and_bound
from tightrope.certification.properties import Verdict
from tightrope.certification.refutation import Refuter
from tightrope.certification.subjects import Subject
from tightrope.domains.bounded import Relaxation
from tightrope.domains.crown import best_bounds
from tightrope.domains.reduced import reducible
from tightrope.precision import full_precision

ATTACK_STEPS = 50


@dataclass(frozen=True)
class Verification:
    """The answer to one problem.

    `counterexample` is an input in the exact set at which the original network fails; `bound` a
    proved lower bound on the worst margin (None: no proof came about); `stage` is what decided;
    `reason` says why nothing did.
    """

    verdict: Verdict
    stage: str
    seconds: float
    bound: float | None = None
    counterexample: Tensor | None = None
    domains: int = 0
    reason: str = ""

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

    refuter = Refuter(subject, problem.inner, problem.unsafe, problem.fails)
    point = refuter.search(steps=ATTACK_STEPS, restarts=1)
    if point is not None:
        return answer(Verdict.FALSIFIED, "attack", counterexample=point)
    relaxation = bound_nodes(subject, problem, None)
    if not reducible(subject.exact):
        return _incomplete(problem, refuter, relaxation, answer, started + timeout)
    left = timeout - (time.monotonic() - started)
    found = branch_and_bound(subject, problem, relaxation.boxes, timeout=left)
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
    deadline: float,
) -> Verification:
    """Decide what linear bounds and attacks can of a network that has other bends than ReLUs."""
    assert callable(answer)
    unsafe = problem.unsafe
    bounds = best_bounds(relaxation, unsafe.matrix) + unsafe.offset
    groups = unsafe.group.unique().tolist()
    worst = min(float(bounds[unsafe.group == g].max()) for g in groups)
    if torch.isfinite(bounds).all() and worst > 0:
        return answer(Verdict.VERIFIED, "alpha", bound=worst)
    end = "no branching"
    for _ in range(20):
        if time.monotonic() > deadline:
            end = "time"
            break
        point = refuter.search(steps=4 * ATTACK_STEPS, restarts=1)
        if point is not None:
            return answer(Verdict.FALSIFIED, "attack", counterexample=point)
    reason = f"{end}: not a ReLU network, lowest bound {worst:.4g}"
    return answer(Verdict.UNKNOWN, "alpha", bound=worst, reason=reason)
