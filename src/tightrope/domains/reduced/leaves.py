"""Subproblems in which every unstable neuron is split: linear programs.

There the network is linear in its input, `h = E x + e`, and so is the property. The minimum over
the box and the splits' half-spaces is found by an LP; its dual solution is nothing but the
multipliers `beta`, with which the bound is proved like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.reduced.reduction import Reduced
from tightrope.domains.reduced.splits import Subproblems


@dataclass(frozen=True)
class Leaf:
    """The solution of one leaf.

    `weights` combine the property's rows into the one to be proved; `problem` holds the
    multipliers; `point` is where the minimum is, None if the leaf is empty.
    """

    value: float
    point: Tensor | None
    weights: Tensor
    problem: Subproblems


def solve_leaf(network: Reduced, problem: Subproblems, rows: Tensor) -> Leaf:
    """Minimise the largest of some rows over one fully split subproblem (float64)."""
    sign = problem.sign[0].to(network.neurons.constant)
    active = (sign > 0).to(sign)
    slope, constant = _linear_neurons(network, active)
    goal = network.rows.outer[rows] + (network.rows.inner[rows] * active) @ slope
    level = network.rows.constant[rows] + (network.rows.inner[rows] * active) @ constant
    lower, upper = (t[0] for t in network.box.corners)
    result = _smallest_maximum(
        torch.cat((goal, -sign[:, None] * slope)),
        torch.cat((-level, sign * constant)),
        torch.arange(len(rows) + len(sign)) < len(rows),
        network.box,
    )
    if result.status != 0:
        # An empty leaf has no optimum; a ray of its dual would prove it.
        return _empty_leaf(network, problem, rows, slope, constant, sign)
    dual = -torch.from_numpy(result.ineqlin.marginals)
    weights = dual[: len(rows)].clamp(min=0)
    total = weights.sum()
    beta = dual[len(rows) :].clamp(min=0)
    if total > 0:
        weights, beta = weights / total, beta / total
    else:
        weights = torch.full_like(weights, 1 / len(rows))
    return Leaf(
        float(result.fun),
        torch.clamp(torch.from_numpy(result.x[:-1]).to(goal), lower, upper),
        weights.to(goal),
        _with_multipliers(problem, beta),
    )


def _smallest_maximum(matrix: Tensor, limit: Tensor, lifted: Tensor, box: Box) -> Any:
    """Minimise t over x in the box and t, with `matrix x - limit <= t` in the lifted rows.

    In the other rows, `matrix x <= limit`.
    """
    from scipy.optimize import linprog

    lower, upper = (t[0].tolist() for t in box.corners)
    level = torch.where(lifted, -1.0, 0.0).to(matrix)[:, None]
    return linprog(
        [0.0] * len(lower) + [1.0],
        A_ub=torch.cat((matrix, level), 1).cpu().numpy(),
        b_ub=limit.cpu().numpy(),
        bounds=[*zip(lower, upper, strict=True), (None, None)],
        method="highs",
    )


def _linear_neurons(network: Reduced, active: Tensor) -> tuple[Tensor, Tensor]:
    """Return E and e of `h = E x + e` when the active neurons are known."""
    slope, constant = network.neurons.outer.clone(), network.neurons.constant.clone()
    for layer in network.layers:
        span = layer.span
        weights = network.neurons.inner[span, : span.start] * active[: span.start]
        slope[span] += weights @ slope[: span.start]
        constant[span] += weights @ constant[: span.start]
    return slope, constant


def _empty_leaf(
    network: Reduced,
    problem: Subproblems,
    rows: Tensor,
    slope: Tensor,
    constant: Tensor,
    sign: Tensor,
) -> Leaf:
    """Prove a leaf empty: minimise the largest violation of its splits, which is positive.

    The dual of that LP combines the splits' constraints into one that no input satisfies; a large
    multiple of it lifts any row above zero.
    """
    lower, upper = (t[0] for t in network.box.corners)
    everywhere = torch.ones(len(sign), dtype=torch.bool)
    result = _smallest_maximum(-sign[:, None] * slope, sign * constant, everywhere, network.box)
    weights = torch.zeros(len(rows), dtype=slope.dtype)
    weights[0] = 1.0
    if result.status != 0 or result.fun <= 0:
        return Leaf(float("nan"), None, weights, problem)
    beta = -torch.from_numpy(result.ineqlin.marginals).clamp(max=0)
    span = (network.rows.outer[rows[0]].abs() @ torch.maximum(lower.abs(), upper.abs())).item()
    size = span + float(network.rows.constant[rows[0]].abs()) + 1.0
    size += float(network.rows.inner[rows[0]].abs() @ torch.maximum(network.upper, -network.lower))
    multiple = 4.0 * size / float(result.fun)
    return Leaf(float("inf"), None, weights, _with_multipliers(problem, beta * multiple))


def _with_multipliers(problem: Subproblems, beta: Tensor) -> Subproblems:
    """Return the leaf with the LP's multipliers, which know nothing of other constraints."""
    return replace(
        problem, beta=beta[None].to(problem.alpha.device), gamma=torch.zeros_like(problem.gamma)
    )
