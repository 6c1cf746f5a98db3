"""Classifiers reduced to what can change inside one box, compiled.

Inside its latent box, most ReLUs of a classifier cannot change sign: dead neurons drop out, active
ones are linear and are replaced by what they are made of. What remains are variables: the
coordinates that have a width, then the activations of the unstable neurons, level by level. Each
unstable neuron is a constant plus a sparse sum of variables before it, each margin one of all
variables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tightrope.attacks.kernels.chains import Array
from tightrope.attacks.kernels.compiling import compiled
from tightrope.attacks.kernels.lanes_kernel import LANES, is_zero, scatter
from tightrope.attacks.kernels.stability import ACTIVE, UNSTABLE
from tightrope.attacks.kernels.windows import Layer

TILE = 256  # taps of a large window whose columns are filled together: they fit the cache


class Sample(NamedTuple):
    """What bounds say about one sample."""

    lower: Array  # [coordinates]
    upper: Array
    middle: Array  # [values behind the first layer]: pre-activations at the centre of the box
    kinds: Array  # [values behind any layer]: dead, active or unstable


class Reduced(NamedTuple):
    """The reduced classifier of one sample, and rows to make it with.

    Column v lists the unstable neurons that variable v acts on. Level 0 are the coordinates,
    level k the values behind layer k; neuron n is variable `ends[0] + n`.
    """

    levels: Array  # [levels + 1]: the first value of each level
    ends: Array  # [levels]: one past the last variable of each level
    places: Array  # [values]: the number of their variable, or -1
    values: Array  # [variables]: the other way round
    starts: Array  # [variables + 1]: where the columns begin
    neurons: Array  # [entries]
    weights: Array  # [entries]
    constants: Array  # [neurons]
    # Rows of all values, and of one for padding per level. In between they are zero, but for
    # coordinates without a width, which nobody looks at.
    slopes: Array
    offsets: Array  # a row
    composed: Array  # [entries behind deeper layers, 2]: neuron and variable
    amounts: Array  # [entries behind deeper layers]


@compiled
def reduce(layers: tuple[Layer, ...], sample: Sample, reduced: Reduced) -> None:
    """Number the variables of a sample, and fill in the columns of its unstable neurons."""
    _number(sample, reduced)
    starts, count = reduced.starts, reduced.ends[-1]
    for v in range(count + 1):
        starts[v] = 0
    _count(layers[0], sample, reduced)
    entries = 0
    for k in range(1, len(layers)):
        entries = _compose(layers, k, sample, reduced, entries)
    variables = reduced.composed[:, 1]
    for i in range(entries):
        starts[variables[i] + 1] += 1
    for v in range(count):
        starts[v + 1] += starts[v]
    # A column's end is at its beginning until it is filled.
    for v in range(count, 0, -1):
        starts[v] = starts[v - 1]
    _fill(layers[0], sample, reduced)
    for i in range(entries):
        at = starts[variables[i] + 1]
        reduced.neurons[at], reduced.weights[at] = reduced.composed[i, 0], reduced.amounts[i]
        starts[variables[i] + 1] = at + 1


@compiled
def _number(sample: Sample, reduced: Reduced) -> None:
    """List the variables."""
    levels, places, values = reduced.levels, reduced.places, reduced.values
    lower, upper, kinds = sample.lower, sample.upper, sample.kinds
    count = 0
    for i in range(len(lower)):
        places[i] = count if upper[i] > lower[i] else -1
        values[count] = i
        count += upper[i] > lower[i]
    reduced.ends[0] = count
    for k in range(1, len(levels) - 1):
        for i in range(levels[k], levels[k + 1]):
            unstable = kinds[i - len(lower)] == UNSTABLE
            places[i] = count if unstable else -1
            values[count] = i
            count += unstable
        reduced.ends[k] = count


@compiled
def _count(layer: Layer, sample: Sample, reduced: Reduced) -> None:
    """Count the entries of each column that the first layer makes."""
    taps, places, starts = layer.taps, reduced.places, reduced.starts
    channels, inputs = len(layer.weights), len(sample.lower)
    for p in range(len(taps)):
        unstable = 0
        for o in range(channels):
            unstable += sample.kinds[p * channels + o] == UNSTABLE
        if unstable:
            for t in range(taps.shape[1]):
                if taps[p, t] < inputs and places[taps[p, t]] >= 0:
                    starts[places[taps[p, t]] + 1] += unstable


@compiled
def _fill(layer: Layer, sample: Sample, reduced: Reduced) -> None:
    """Enter the weights of the first layer's unstable neurons."""
    taps, starts, free = layer.taps, reduced.starts, reduced.ends[0]
    channels, inputs = len(layer.weights), len(sample.lower)
    variables, sources = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    for p in range(len(taps)):
        for begin in range(0, taps.shape[1], TILE):
            count = 0
            for t in range(begin, min(begin + TILE, taps.shape[1])):
                if taps[p, t] < inputs and reduced.places[taps[p, t]] >= 0:
                    variables[count], sources[count] = reduced.places[taps[p, t]], t
                    count += 1
            for o in range(channels):
                place = p * channels + o
                if sample.kinds[place] != UNSTABLE:
                    continue
                neuron, weights = reduced.places[inputs + place] - free, layer.weights[o]
                reduced.constants[neuron] = sample.middle[place]
                for i in range(count):
                    at = starts[variables[i] + 1]
                    reduced.neurons[at], reduced.weights[at] = neuron, weights[sources[i]]
                    starts[variables[i] + 1] = at + 1


@compiled
def _compose(
    layers: tuple[Layer, ...], k: int, sample: Sample, reduced: Reduced, entries: int
) -> int:
    """Express the unstable neurons behind layer k by variables, up to 16 of a window at a time."""
    taps, weights, biases = layers[k]
    levels, slopes, constants = reduced.levels, reduced.slopes, reduced.offsets
    channels, below = len(weights), levels[k] + k
    found = np.empty(LANES, np.int64)
    for p in range(len(taps)):
        first = levels[k + 1] + p * channels
        o = 0
        while o < channels:
            lanes = 0
            while o < channels and lanes < LANES:
                if reduced.places[first + o] >= 0:
                    found[lanes] = reduced.places[first + o] - reduced.ends[0]
                    constants[lanes] = biases[o]
                    for t in range(taps.shape[1]):
                        slopes[(below + taps[p, t]) * LANES + lanes] = weights[o, t]
                    lanes += 1
                o += 1
            if lanes:
                pull_back(layers, k, sample, reduced)
                for lane in range(lanes):
                    reduced.constants[found[lane]] = constants[lane]
                entries = _harvest(found[:lanes], reduced.ends[k], reduced, entries)
    return entries


@compiled
def _harvest(found: Array, count: int, reduced: Reduced, entries: int) -> int:
    """Move the entries of some neurons out of the slopes of the first variables."""
    slopes, composed = reduced.slopes, reduced.composed
    level = 0
    for v in range(count):
        while v >= reduced.ends[level]:
            level += 1
        row = reduced.values[v] + level  # every level has a row for padding
        if is_zero(slopes, row):
            continue
        for lane in range(len(found)):
            composed[entries, 0], composed[entries, 1] = found[lane], v
            reduced.amounts[entries] = slopes[row * LANES + lane]
            entries += slopes[row * LANES + lane] != 0
        for e in range(LANES):
            slopes[row * LANES + e] = 0
    return entries


@compiled
def pull_back(layers: tuple[Layer, ...], k: int, sample: Sample, reduced: Reduced) -> None:
    """Replace slopes at level k by slopes at variables of level k and below.

    Active neurons pass them on to what they are made of, and add to the offsets.
    """
    levels, slopes, offsets = reduced.levels, reduced.slopes, reduced.offsets
    inputs = len(sample.lower)
    for level in range(k, 0, -1):
        taps, weights, biases = layers[level - 1]
        below, channels = levels[level - 1] + level - 1, len(weights)
        place = levels[level]
        for p in range(len(taps)):
            window = taps[p]
            for o in range(channels):
                row, kind = place + level, sample.kinds[place - inputs]
                place += 1
                if kind == UNSTABLE or is_zero(slopes, row):
                    continue
                if kind == ACTIVE:
                    scatter(slopes, below, slopes, row, window, weights[o], 0, len(window))
                    constant = sample.middle[row - level - inputs] if level == 1 else biases[o]
                    for e in range(LANES):
                        offsets[e] += slopes[row * LANES + e] * constant
                for e in range(LANES):
                    slopes[row * LANES + e] = 0
        for e in range(LANES):
            slopes[(levels[level] + level - 1) * LANES + e] = 0  # the padding below
