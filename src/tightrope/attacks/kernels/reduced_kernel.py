"""The latent attack on reduced classifiers, compiled: 16 estimators of a sample at a time.

Forwards, a variable that moves acts on the neurons of its column; backwards, its slope is the sum
over the same column. Each variable acts on later ones only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tightrope.attacks.kernels.chains import Array
from tightrope.attacks.kernels.compiling import compiled
from tightrope.attacks.kernels.lanes_kernel import (
    LANES,
    add_products,
    choose,
    gather,
    is_zero,
    scatter,
)
from tightrope.attacks.kernels.reduction_kernel import Reduced, Sample, pull_back, reduce
from tightrope.attacks.kernels.windows import Layer


class Readout(NamedTuple):
    """The last linear layer."""

    rows: Array  # [classes, values]
    offsets: Array  # [classes]


class Search(NamedTuple):
    """16 estimators: flat arrays of rows, one per variable or neuron."""

    lower: Array  # of coordinates
    upper: Array
    best: Array
    point: Array  # of variables
    moves: Array  # how far they moved last
    outer: Array  # slopes of the margins
    slopes: Array  # the same with all that they act on
    hidden: Array  # of neurons: pre-activations
    passed: Array  # slopes that pass the ReLUs
    gain: Array  # a row: how much the margins grew last
    better: Array  # a row: whether they are the largest so far


@compiled
def attack(
    points: Array,
    lower: Array,
    upper: Array,
    best: Array,
    scores: Array,
    labels: Array,
    targets: Array,
    middle: Array,
    kinds: Array,
    layers: tuple[Layer, ...],
    readout: Readout,
    sizes: Array,
    reduced: Reduced,
    search: Search,
) -> None:
    """Take all steps from `points` [samples, estimators, inputs]; keep the best points visited.

    `middle` and `kinds` are those of `Sample`; steps are relative to the radius.
    """
    for b in range(len(points)):
        sample = Sample(lower[b], upper[b], middle[b], kinds[b])
        reduce(layers, sample, reduced)
        for first in range(0, points.shape[1], LANES):
            last = min(first + LANES, points.shape[1])
            _read_out(labels[b], targets[b, first:last], readout, layers, sample, reduced, search)
            _begin(points[b, first:last], sample, reduced, search)
            highest = _climb(sizes, reduced, search)
            _hand_over(best[b, first:last], scores[b, first:last], highest, reduced, search)


@compiled
def _read_out(
    label: int,
    targets: Array,
    readout: Readout,
    layers: tuple[Layer, ...],
    sample: Sample,
    reduced: Reduced,
    search: Search,
) -> None:
    """Express the margins by variables; lanes without an estimator stay zero."""
    slopes, depth = reduced.slopes, len(layers)
    row = reduced.levels[depth] + depth
    for e in range(LANES):
        reduced.offsets[e] = 0
    for e in range(len(targets)):
        target = targets[e]
        reduced.offsets[e] = readout.offsets[target] - readout.offsets[label]
        wanted, other = readout.rows[target], readout.rows[label]
        for j in range(len(wanted)):
            slopes[(row + j) * LANES + e] = wanted[j] - other[j]
    pull_back(layers, depth, sample, reduced)
    level = 0
    for v in range(reduced.ends[-1]):
        while v >= reduced.ends[level]:
            level += 1
        source, goal = (reduced.values[v] + level) * LANES, v * LANES
        for e in range(LANES):
            search.outer[goal + e] = slopes[source + e]
    for i in range(len(slopes)):
        slopes[i] = 0


@compiled
def _begin(points: Array, sample: Sample, reduced: Reduced, search: Search) -> None:
    """Place the estimators; other lanes stay at the centre. Moves are seen from there."""
    for v in range(reduced.ends[0]):
        i, row = reduced.values[v], v * LANES
        lower, upper = sample.lower[i], sample.upper[i]
        center = (lower + upper) / 2
        for e in range(LANES):
            search.lower[row + e] = lower
            search.upper[row + e] = upper
            search.point[row + e] = center
        for e in range(len(points)):
            search.point[row + e] = points[e, i]
        for e in range(LANES):
            search.moves[row + e] = search.point[row + e] - center
    free, count = reduced.ends[0], reduced.ends[-1]
    for i in range(free * LANES, count * LANES):
        search.point[i] = 0
    for i in range((count - free) * LANES):
        search.hidden[i] = reduced.constants[i // LANES]
        search.passed[i] = 0


@compiled
def _climb(sizes: Array, reduced: Reduced, search: Search) -> Array:
    """Take all steps; return the largest margins, whose points are kept."""
    gain, better = search.gain, search.better
    margins = np.empty(LANES)
    highest = np.full(LANES, -np.inf)
    for e in range(LANES):
        margins[e] = reduced.offsets[e]
    _forwards(reduced, search)
    for i in range(len(sizes) + 1):
        found = 0
        for e in range(LANES):
            margins[e] += gain[e]
            better[e] = margins[e] > highest[e]
            found += margins[e] > highest[e]
            highest[e] = max(highest[e], margins[e])
        if found:
            for v in range(reduced.ends[0]):
                choose(search.best, v, search.point, better)
        if i == len(sizes):
            break
        _backwards(reduced, search, i == 0)
        if not _move(reduced.ends[0], sizes[i], search):
            break
        _forwards(reduced, search)
    return highest


@compiled
def _forwards(reduced: Reduced, search: Search) -> None:
    """Carry the moves of the coordinates to all neurons, and to the margins."""
    ends, starts = reduced.ends, reduced.starts
    hidden, moves, point, gain = search.hidden, search.moves, search.point, search.gain
    zero = hidden.dtype.type(0)
    for e in range(LANES):
        gain[e] = 0
    begin = 0
    for level in range(len(ends)):
        if level:
            behind = hidden[(begin - ends[0]) * LANES : (ends[level] - ends[0]) * LANES]
            known, moved = point[begin * LANES :], moves[begin * LANES :]
            for i in range(len(behind)):
                value = max(behind[i], zero)
                moved[i] = value - known[i]
                known[i] = value
        for v in range(begin, ends[level]):
            if not is_zero(moves, v):
                add_products(gain, v, search.outer, moves)
                neurons, weights = reduced.neurons, reduced.weights
                scatter(hidden, 0, moves, v, neurons, weights, starts[v], starts[v + 1])
        begin = ends[level]


@compiled
def _backwards(reduced: Reduced, search: Search, first: bool) -> None:
    """Compute the slopes of all variables from those behind them."""
    ends, starts, slopes, passed = reduced.ends, reduced.starts, search.slopes, search.passed
    zero, one = slopes.dtype.type(0), slopes.dtype.type(1)
    changes = one if first else zero  # counted fastest in numbers of the same size
    for level in range(len(ends) - 1, -1, -1):
        begin = ends[level - 1] if level else 0
        if level == 0 and changes == 0:
            break
        for v in range(begin, ends[level]):
            neurons, weights = reduced.neurons, reduced.weights
            gather(slopes, v, search.outer, passed, neurons, weights, starts[v], starts[v + 1])
        if level:
            neuron = (begin - ends[0]) * LANES
            arriving, hidden, known = (
                slopes[begin * LANES :],
                search.hidden[neuron:],
                passed[neuron:],
            )
            for i in range((ends[level] - begin) * LANES):
                passes = arriving[i] if hidden[i] > 0 else zero
                changes += one if passes != known[i] else zero
                known[i] = passes


@compiled
def _move(free: int, size: float, search: Search) -> bool:
    """Move the coordinates by one step inside the box; return whether any of them moved."""
    lower, upper, point = search.lower, search.upper, search.point
    moves, slopes = search.moves, search.slopes
    half, zero, one = point.dtype.type(size / 2), point.dtype.type(0), point.dtype.type(1)
    moved = zero
    for i in range(free * LANES):
        length = half * (upper[i] - lower[i])
        length = length if slopes[i] > 0 else (-length if slopes[i] < 0 else zero)
        value = min(max(point[i] + length, lower[i]), upper[i])
        moves[i] = value - point[i]
        moved += one if value != point[i] else zero
        point[i] = value
    return moved > 0


@compiled
def _hand_over(
    best: Array, scores: Array, highest: Array, reduced: Reduced, search: Search
) -> None:
    """Hand over points that are better than those of earlier restarts."""
    for e in range(len(best)):
        if highest[e] > scores[e]:
            scores[e] = highest[e]
            for v in range(reduced.ends[0]):
                best[e, reduced.values[v]] = search.best[v * LANES + e]
