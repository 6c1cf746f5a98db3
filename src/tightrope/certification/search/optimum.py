"""The exact worst margin of a sample, up to a tolerance, by branch and bound.

A point with margin v bounds the worst margin from above. Branch and bound then tries to prove
that no point has a margin below v - tolerance; if it finds one instead, that is the next v. The
lower end is proved in exact arithmetic, the upper one attained by the original network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.attacks import Rows as RowsGoal
from tightrope.attacks import attack_goal
from tightrope.certification.complete import bound_nodes
from tightrope.certification.problem import OpenProblem, Problem
from tightrope.certification.refutation import Refuter
from tightrope.certification.search.branch_and_bound import BranchAndBound
from tightrope.certification.subjects import Subject, proving
from tightrope.domains.linear.crown import reduction_fits
from tightrope.domains.reduced.reduction import Reduced, Rows, reduce, reducible
from tightrope.errors import UserError


@dataclass(frozen=True)
class Bracket:
    """The worst margin lies in [lower, upper]; `upper` is attained at `point`.

    A search that was not `finished` in time proved no lower end: it is minus infinity.
    """

    lower: float
    upper: float
    point: Tensor
    domains: int
    finished: bool


def enclose(
    subject: Subject,
    problem: Problem,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-4,
    timeout: float = 60.0,
    seed: int = 0,
) -> Bracket:
    """Enclose the smallest row of a problem's outputs over its box.

    `start` is a bad point that an attack has found already; without one, all rows are attacked.
    """
    deadline = time.monotonic() + timeout
    with proving(subject):
        torch.manual_seed(seed)
        relaxation = bound_nodes(subject, OpenProblem(problem))
        if not reducible(subject.exact) or not reduction_fits(relaxation):
            raise UserError("the exact margin needs a ReLU network that branch and bound can split")
        point = _attack(subject, problem) if start is None else problem.inner.project(start)[0]
        network = reduce(relaxation, problem.unsafe.matrix, problem.unsafe.offset)
        return _descend(subject, problem, network, point, tolerance, deadline)


def _descend(
    subject: Subject,
    problem: Problem,
    network: Reduced,
    point: Tensor,
    tolerance: float,
    deadline: float,
) -> Bracket:
    unsafe, domains = problem.unsafe, 0
    groups = torch.arange(len(unsafe.group), device=unsafe.group.device)  # each row by itself
    while True:
        upper = _value(subject, problem, point)
        goal = upper - tolerance
        rows = _shifted(network, goal)
        sought = replace(unsafe, offset=unsafe.offset - goal, group=groups)
        refuter = Refuter(subject, problem.inner, sought, _below(subject, problem, goal))
        search = BranchAndBound(replace(network, rows=rows), groups, refuter)
        found = search.run(deadline)
        domains += found.subproblems
        if found.counterexample is None:
            lower = goal if found else -math.inf
            return Bracket(lower, upper, point, domains, bool(found))
        point = found.counterexample


def _shifted(network: Reduced, goal: float) -> Rows:
    """Return the rows less a number; the subtraction rounds."""
    rows = network.rows
    loose = 2 * network.rounding * (rows.constant.abs() + abs(goal))
    return replace(rows, constant=rows.constant - goal, slack=rows.slack + loose)


def _attack(subject: Subject, problem: Problem) -> Tensor:
    """Return the worst point that a short attack on each row finds."""
    unsafe, dtype = problem.unsafe, problem.inner.lower.dtype
    goal = RowsGoal(unsafe.matrix[:, None].to(dtype), unsafe.offset[:, None].to(dtype) + 1e6)
    box = problem.inner.repeat(len(unsafe.matrix))
    points = attack_goal(subject.attacked, box, goal, steps=50)
    with torch.no_grad():
        return points[goal(subject.attacked(points)).argmax()]


def _value(subject: Subject, problem: Problem, point: Tensor) -> float:
    """Return the smallest row at a point of the original network, seen alone."""
    outputs = subject.outputs(point[None])[0].double()
    return float((problem.unsafe.matrix @ outputs + problem.unsafe.offset).min())


def _below(subject: Subject, problem: Problem, goal: float) -> Callable[[Tensor], bool]:
    return lambda point: _value(subject, problem, point) < goal
