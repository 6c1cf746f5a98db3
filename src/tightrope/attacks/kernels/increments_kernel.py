"""The inner loop of `increments`, compiled: one estimator at a time, by what changes.

The state of an estimator is small enough for the processor's cache: its point, the hidden
pre-activations, and the gradient of its margin with respect to the values of every level. A step
moves some coordinates, and what follows from that is worked out from the changes alone
(`changes_kernel`).
"""

from __future__ import annotations

from typing import NamedTuple

from tightrope.attacks.kernels.chains import Array
from tightrope.attacks.kernels.changes_kernel import (
    Changes,
    Layer,
    State,
    backwards,
    copy,
    forwards,
)
from tightrope.attacks.kernels.compiling import compiled

BLOCK = 16  # coordinates that are looked at together


class Readout(NamedTuple):
    """The last linear layer, and the margins wanted of it."""

    rows: Array  # [classes, values]
    offsets: Array  # [classes]
    labels: Array  # [samples]
    targets: Array  # [samples, estimators]


@compiled
def step(
    points: Array,
    lower: Array,
    upper: Array,
    best: Array,
    scores: Array,
    last: Array,
    slopes: Array,
    readout: Readout,
    size: float,
) -> None:
    """Move `points` [samples, estimators, inputs] by one step, keeping the best points visited.

    `last` are the pre-activations behind the last hidden layer, `slopes` the gradients of the
    margins at the points; the step is relative to the radius.
    """
    for b in range(points.shape[0]):
        for e in range(points.shape[1]):
            point = points[b, e]
            _keep(point, last[b, e], best, scores, readout, b, e)
            half = point.dtype.type(size / 2)
            for j in range(len(point)):
                point[j] = _moved(point[j], slopes[b, e, j], half, lower[b, j], upper[b, j])


@compiled
def climb(
    points: Array,
    lower: Array,
    upper: Array,
    best: Array,
    scores: Array,
    hidden: tuple[Array, ...],
    slopes: tuple[Array, ...],
    layers: tuple[Layer, ...],
    readout: Readout,
    sizes: Array,
    state: State,
    changes: Changes,
) -> None:
    """Take steps from `points` as `step` does, following what changes.

    `hidden` are the pre-activations behind each layer at the points, `slopes` the gradients of
    the margins before each layer.
    """
    for b in range(points.shape[0]):
        for e in range(points.shape[1]):
            outer = readout.rows[readout.targets[b, e]] - readout.rows[readout.labels[b]]
            _begin(state, points[b, e], hidden, slopes, outer, b, e)
            for i in range(len(sizes)):
                _keep(state.point, state.hidden[-1], best, scores, readout, b, e)
                if not _look(state, lower[b], upper[b], sizes[i], changes.moved):
                    break
                count = _differences(state.point, changes)
                count = forwards(state, layers, outer, count, changes)
                # The last point needs no gradient.
                if i < len(sizes) - 1:
                    backwards(state, layers, count, changes)
            _keep(state.point, state.hidden[-1], best, scores, readout, b, e)


@compiled
def _begin(
    state: State,
    point: Array,
    hidden: tuple[Array, ...],
    slopes: tuple[Array, ...],
    outer: Array,
    b: int,
    e: int,
) -> None:
    """Derive the state of an estimator from its hidden values and slopes."""
    copy(point, state.point)
    for k in range(len(hidden)):
        copy(slopes[k][b, e], state.slopes[k])
    for k in range(len(hidden)):
        known = hidden[k][b, e]
        values, active, passed, alive = (
            state.hidden[k],
            state.active[k],
            state.passed[k],
            state.alive[k],
        )
        slope = state.slopes[k + 1] if k + 1 < len(hidden) else outer
        zero = values.dtype.type(0)
        channels = len(values) // len(alive)
        for j in range(len(values)):
            values[j] = known[j]
            active[j] = max(known[j], zero)
            passed[j] = slope[j] if known[j] > 0 else zero
        for p in range(len(alive)):
            part = passed[p * channels : (p + 1) * channels]
            living = 0
            for j in range(len(part)):
                living += part[j] != 0
            alive[p] = living


@compiled
def _keep(
    point: Array, last: Array, best: Array, scores: Array, readout: Readout, b: int, e: int
) -> None:
    """Keep the point if its margin is the largest so far."""
    target, label = readout.targets[b, e], readout.labels[b]
    wanted, other = readout.rows[target], readout.rows[label]
    zero = last.dtype.type(0)
    score = zero
    for j in range(len(last)):
        score += (wanted[j] - other[j]) * max(last[j], zero)
    score += readout.offsets[target] - readout.offsets[label]
    if score > scores[b, e]:
        scores[b, e] = score
        copy(point, best[b, e])


@compiled
def _moved(value: float, slope: float, half: float, lower: float, upper: float) -> float:
    """Return where a sign step inside the box leads."""
    length = half * (upper - lower)
    # Nowhere, if there is no slope.
    length = length if slope > 0 else (-length if slope < 0 else length - length)
    return min(max(value + length, lower), upper)


@compiled
def _look(state: State, lower: Array, upper: Array, size: float, moved: Array) -> bool:
    """Find out where a step leads, and whether that is elsewhere."""
    half, one = moved.dtype.type(size / 2), moved.dtype.type(1)
    point, slope = state.point, state.slopes[0]
    count = one - one  # numbers of the same size as the coordinates are counted fastest
    for j in range(len(point)):
        value = _moved(point[j], slope[j], half, lower[j], upper[j])
        count += one if value != point[j] else one - one
        moved[j] = value
    return count > 0


@compiled
def _differences(point: Array, changes: Changes) -> int:
    """Move the point to where the step leads; list and count the coordinates that differ."""
    moved, places, amounts = changes.moved, changes.places[0], changes.amounts[0]
    count = 0
    for start in range(0, len(point), BLOCK):
        before, now = point[start : start + BLOCK], moved[start : start + BLOCK]
        differs = False
        if len(before) == BLOCK:  # a constant, which the compiler makes use of
            for j in range(BLOCK):
                differs |= now[j] != before[j]
        else:
            for j in range(len(before)):
                differs |= now[j] != before[j]
        if differs:
            for j in range(len(before)):
                places[count], amounts[count] = start + j, now[j] - before[j]
                count += now[j] != before[j]
                before[j] = now[j]
    return count
