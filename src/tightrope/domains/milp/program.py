"""Exact optimisation over a network on a box with HiGHS, and bounds tightened by it.

What to trust. Bounds from a *linear* program (a relaxed encoding, or one without unstable
neurons) need no trust in the solver: whatever dual values it returns, they are multiplied
out into a lower bound here (Neumaier and Shcherbina) with an allowance for rounding. Bounds
from a *mixed-integer* program rest on HiGHS' search and hold up to its tolerances: a binary
may be off by `TOLERANCE`, and so may each row. `safety` says how much that can move the
optimum, to first order; subtract it before calling anything verified. `upper` is always the
value that the network, evaluated in float64, takes at `point`.

HiGHS looks at its clock now and then: on large models it overruns a time limit by seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.milp.encoding import Encoding, corners
from tightrope.domains.milp.expressions import Array, numbers
from tightrope.domains.milp.highs import GAP, TOLERANCE, Objective, Solver
from tightrope.graph import Graph, ops


@dataclass(frozen=True)
class Optimum:
    """What is known of a minimum: it lies between `lower` and `upper`.

    `upper` is attained at `point` (in the shape of one input); it is infinite if the search
    found none. `finished` says whether the question was answered: the minimum is known up to
    the gap, or the search stopped at the value it was told to stop at.
    """

    lower: float
    upper: float
    point: Tensor | None
    finished: bool


def minimize(
    encoding: Encoding,
    row: Tensor,
    offset: float = 0.0,
    *,
    seconds: float | None = None,
    stop_above: float | None = None,
    stop_below: float | None = None,
    threads: int = 1,
) -> Optimum:
    """Minimise `row . output + offset` over the box.

    The search ends early once the lower bound exceeds `stop_above` or once a point with a
    value below `stop_below` is found. A time limit leaves a valid lower bound.
    """
    stops = _Stops(seconds, stop_above, stop_below)
    return _minimize(Solver(encoding, threads), numbers(row), offset, stops)


def minimize_margin(
    encoding: Encoding,
    label: int,
    *,
    seconds: float | None = None,
    stop_above: float | None = None,
    stop_below: float | None = None,
    threads: int = 1,
) -> Optimum:
    """Minimise `o_label - o_i` over the box and over all other classes i.

    One model per class, the most promising first; each stops as soon as it cannot beat the
    best point so far. `seconds` is for all of them together.
    """
    stops = _Stops(seconds, stop_above, stop_below)
    solver = Solver(encoding, threads)
    classes = len(encoding.output.constant)
    rows = [np.eye(classes)[label] - np.eye(classes)[i] for i in range(classes) if i != label]
    known = [Objective.of(encoding, row, 0.0).interval_bound(encoding) for row in rows]
    best = Optimum(math.inf, math.inf, None, True)
    finished = True
    for i in sorted(range(len(rows)), key=lambda i: known[i]):
        limit = min(best.upper, stops.above)
        if known[i] > limit:
            continue
        left = stops.left()
        found = _minimize(solver, rows[i], 0.0, _Stops(left, limit, stop_below))
        known[i] = found.lower
        finished = finished and found.finished
        best = min(best, found, key=lambda optimum: optimum.upper)
        if best.upper < stops.below:
            finished = True
            break
    return Optimum(min([best.upper, *known]), best.upper, best.point, finished)


def safety(encoding: Encoding, row: Tensor) -> float:
    """Return by how much tolerances and rounding may move the minimum of `row . output`.

    Each unstable neuron may be off by the leak of its binary (its big-M times the
    tolerance), by the tolerances of its rows and by the rounding of its coefficients; its
    influence on the objective is at most the sum of absolute weights over all paths to it.
    Reduced costs may be off by a tolerance, too. Zero for linear programs, whose bounds allow
    for everything by themselves.
    """
    if encoding.is_linear:
        return 0.0
    influence = np.abs(encoding.output.matrix.T @ numbers(row))
    total = GAP + TOLERANCE * (1 + float((encoding.upper - encoding.lower).sum()))
    for block in reversed(encoding.blocks):
        of_outputs = influence[block.outputs]
        total += float(of_outputs @ (TOLERANCE * (block.steps + 3)))
        influence[block.named] += block.links.T @ of_outputs
        of_inputs = influence[block.named]
        total += float(of_inputs @ (TOLERANCE + block.slack))
        matrix = abs(block.inputs.matrix)
        influence[: matrix.shape[1]] += matrix.T @ of_inputs
    return total


def tighten(
    graph: Graph,
    box: Box,
    bounds: Mapping[int, Box],
    *,
    seconds_per_neuron: float | None = None,
    integer: bool = False,
    threads: int = 1,
) -> dict[int, Box]:
    """Return tighter bounds of the nodes that feed activations, front to back.

    Each unstable neuron is bounded by linear programs over the tightened bounds of the nodes
    before it, and with `integer` by mixed-integer programs after that. Only lower bounds of
    the solver count, less what `safety` asks for, and no bound gets worse.
    """
    result = dict(bounds)
    for position, undecided in _feeding(graph):
        prefix = Graph(graph.nodes[: position + 1])
        lower, upper = corners(result[position], prefix.output_shape, f"node {position}")
        for relaxed in (True, False) if integer else (True,):
            encoding = Encoding(prefix, box, result, relaxed=relaxed)
            if not relaxed and encoding.is_linear:
                continue
            solver = Solver(encoding, threads)
            for k in np.flatnonzero(undecided(lower, upper)).tolist():
                low = _bound_neuron(solver, k, 1.0, seconds_per_neuron)
                high = -_bound_neuron(solver, k, -1.0, seconds_per_neuron)
                if max(low, lower[k]) <= min(high, upper[k]):  # else rounding, on a point
                    lower[k], upper[k] = max(low, lower[k]), min(high, upper[k])
        like = result[position].lower
        result[position] = Box(
            *(torch.from_numpy(t).view(like.shape).to(like.device) for t in (lower, upper))
        )
    return result


def _feeding(graph: Graph) -> Iterator[tuple[int, Any]]:
    """Yield each node that feeds activations, and which of its neurons are worth bounding."""

    def unstable(lower: Array, upper: Array) -> Array:
        return (lower < 0) & (upper > 0)

    def wide(lower: Array, upper: Array) -> Array:
        return lower < upper

    for position, readers in enumerate(graph.consumers()):
        kinds = {type(graph.nodes[i].op) for i in readers}
        if ops.MaxPool in kinds:
            yield position, wide
        elif kinds & {ops.Relu, ops.LeakyRelu}:
            yield position, unstable


# --- one objective --------------------------------------------------------------------------


class _Stops:
    """When to stop: a point in time, a lower bound, the value of a point."""

    def __init__(
        self, seconds: float | None, above: float | None = None, below: float | None = None
    ) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.above = math.inf if above is None else above
        self.below = -math.inf if below is None else below

    def left(self) -> float | None:
        """Return how many seconds are left; None without a limit."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def out_of_time(self) -> bool:
        """Return whether the time is up."""
        left = self.left()
        return left is not None and left <= 0

    def reached(self, found: Optimum) -> bool:
        """Return whether a bound or a point answers the question."""
        return found.lower > self.above or found.upper < self.below


def _minimize(solver: Solver, row: Array, offset: float, stops: _Stops) -> Optimum:
    """Bound by intervals, then by the relaxation (both are proofs), then search."""
    encoding = solver.encoding
    objective = Objective.of(encoding, row, offset)
    if not (np.isfinite(objective.cost).all() and math.isfinite(objective.constant)):
        return Optimum(-math.inf, math.inf, None, False)
    interval = objective.interval_bound(encoding)
    if not encoding.blocks:  # affine: the best corner is known
        corner = np.where(objective.cost > 0, encoding.lower, encoding.upper)
        return _replayed(encoding, row, offset, interval, corner, finished=True)
    found = Optimum(
        interval, math.inf, None, stops.reached(Optimum(interval, math.inf, None, True))
    )
    for solve in (solver.relax,) if encoding.is_linear else (solver.relax, solver.search):
        if found.finished or stops.out_of_time():
            break
        lower, values, finished = solve(objective, stops.left(), stops.above, stops.below)
        latest = _replayed(encoding, row, offset, max(lower, found.lower), values, finished)
        found = _best(found, latest)
        done = finished and (solve == solver.search or encoding.is_linear)
        known = found.upper - found.lower <= GAP
        found = replace(found, finished=done or known or stops.reached(found))
    return found


def _best(a: Optimum, b: Optimum) -> Optimum:
    """Combine two answers to the same question."""
    nearer = min(a, b, key=lambda optimum: optimum.upper)
    lower = min(max(a.lower, b.lower), nearer.upper)
    return Optimum(lower, nearer.upper, nearer.point, False)


def _replayed(
    encoding: Encoding,
    row: Array,
    offset: float,
    lower: float,
    values: Array | None,
    finished: bool,
) -> Optimum:
    """Evaluate the network at the solver's input: its word for the value does not count."""
    if values is None or not np.isfinite(values).all():
        return Optimum(lower, math.inf, None, finished)
    graph = encoding.graph
    count = math.prod(graph.input_shape)
    inside = np.clip(values[:count], encoding.lower[:count], encoding.upper[:count])
    point = torch.from_numpy(inside).view(graph.input_shape)
    upper = float(row @ numbers(graph(point[None]))) + offset
    if not math.isfinite(upper):
        return Optimum(lower, math.inf, None, False)
    return Optimum(min(lower, upper), upper, point, finished)


def _bound_neuron(solver: Solver, index: int, sign: float, seconds: float | None) -> float:
    """Return a lower bound on `sign` times one output."""
    row = np.zeros(len(solver.encoding.output.constant))
    row[index] = sign
    found = _minimize(solver, row, 0.0, _Stops(seconds))
    return found.lower - safety(solver.encoding, torch.from_numpy(row))
