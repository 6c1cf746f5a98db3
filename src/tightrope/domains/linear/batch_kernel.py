"""Rows of a batch pulled through the lines of ReLUs and back again, compiled.

`a` is [batch, rows, neurons], `low` and `high` are the neurons' bounds, [batch, neurons], `left` is
the slope below zero (of a leaky ReLU). On an unstable neuron the line above has slope
`s = left + (1 - left) u / (u - l)` and intercept `t = (s - left) (-l)`; the line below goes through
zero with the slope of the wider side, which has no gradient. `bias` is that of the layer before, of
which the constants are made, too: [neurons].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tightrope.compiling import compiled

Array = np.ndarray[Any, Any]

TINY = 1e-30  # a width that no unstable neuron has


@compiled
def find_lines(low: Array, high: Array, left: Any, lines: Array) -> None:
    """Write lower slopes, upper slopes and upper intercepts, [3, neurons].

    Loops without branches that write to one array each: those the compiler can vectorise.
    """
    one, zero, tiny = low.dtype.type(1), low.dtype.type(0), low.dtype.type(TINY)
    below, above, intercept = lines[0], lines[1], lines[2]
    for j in range(len(low)):  # of a stable neuron, its own slope
        below[j] = one if (high[j] > -low[j]) | (low[j] >= zero) else left
    for j in range(len(low)):
        above[j] = (one - left) * (high[j] / max(high[j] - low[j], tiny))
    for j in range(len(low)):
        bends = (low[j] < zero) & (high[j] > zero)
        intercept[j] = -above[j] * low[j] if bends else zero
    for j in range(len(low)):
        bends = (low[j] < zero) & (high[j] > zero)
        stable = one if low[j] >= zero else left
        above[j] = left + above[j] if bends else stable


@compiled
def pull(
    a: Array,
    low: Array,
    high: Array,
    bias: Array,
    left: float,
    found: tuple[Array, Array],
) -> None:
    """Write the rows before the ReLUs, and what intercepts and biases add to the bound."""
    into, constant = found
    lines = np.empty((3, a.shape[2]), a.dtype)
    zero, side = lines.dtype.type(0), lines.dtype.type(left)
    below, above, intercept = lines[0], lines[1], lines[2]
    for b in range(len(a)):
        find_lines(low[b], high[b], side, lines)
        for r in range(a.shape[1]):
            row, out, total = a[b, r], into[b, r], zero
            for j in range(len(row)):
                negative = min(row[j], zero)
                value = (row[j] - negative) * below[j] + negative * above[j]
                out[j] = value
                total += negative * intercept[j] + value * bias[j]
            constant[b, r] = total


@compiled
def pull_gradient(
    a: Array,
    low: Array,
    high: Array,
    bias: Array,
    left: float,
    grads: tuple[Array, Array],
    found: tuple[Array, Array, Array, Array],
) -> None:
    """Write gradients of rows, bounds and biases (by sample), given those of what `pull` writes.

    One loop for each result: the compiler gives up on loops that write to several arrays, since
    these might overlap.
    """
    lines, sums = np.empty((3, a.shape[2]), a.dtype), np.empty((2, a.shape[2]), a.dtype)
    zero, side = lines.dtype.type(0), lines.dtype.type(left)
    below, above, intercept = lines[0], lines[1], lines[2]
    slope, rise = sums[0], sums[1]  # gradients of upper slopes and intercepts
    for b in range(len(a)):
        find_lines(low[b], high[b], side, lines)
        sums[:] = zero
        offset = found[3][b]
        offset[:] = zero
        for r in range(a.shape[1]):
            row, out, after, g = a[b, r], found[0][b, r], grads[0][b, r], grads[1][b, r]
            for j in range(len(row)):
                whole = after[j] + g * bias[j]
                out[j] = above[j] * whole + intercept[j] * g if row[j] < zero else below[j] * whole
            for j in range(len(row)):
                slope[j] += min(row[j], zero) * (after[j] + g * bias[j])
            for j in range(len(row)):
                rise[j] += min(row[j], zero) * g
            for j in range(len(row)):
                negative = min(row[j], zero)
                offset[j] += g * ((row[j] - negative) * below[j] + negative * above[j])
        slope_gradients(low[b], high[b], side, sums, (found[1][b], found[2][b]))


@compiled
def slope_gradients(
    low: Array, high: Array, left: Any, sums: Array, found: tuple[Array, Array]
) -> None:
    """Write the gradients of bounds, given those of the line above: of its slope and intercept."""
    one, zero, tiny = low.dtype.type(1), low.dtype.type(0), low.dtype.type(TINY)
    slope, rise, lower, upper = sums[0], sums[1], found[0], found[1]
    for j in range(len(low)):
        share = (one - left) / max(high[j] - low[j], tiny)
        x = high[j] / max(high[j] - low[j], tiny)
        bends = (low[j] < zero) & (high[j] > zero)
        lower[j] = x * (slope[j] * share - rise[j] * x * (one - left)) if bends else zero
    for j in range(len(low)):
        share = (one - left) / max(high[j] - low[j], tiny)
        y = -low[j] / max(high[j] - low[j], tiny)
        bends = (low[j] < zero) & (high[j] > zero)
        upper[j] = y * (slope[j] * share + rise[j] * y * (one - left)) if bends else zero


@compiled
def least(a: Array, center: Array, radius: Array, found: Array) -> None:
    """Write the smallest value of each row, [batch, rows], over a box of inputs."""
    for b in range(len(a)):
        middle, reach = center[b], radius[b]
        for r in range(a.shape[1]):
            row, total = a[b, r], a.dtype.type(0)
            for j in range(len(row)):
                total += row[j] * middle[j] - abs(row[j]) * reach[j]
            found[b, r] = total


@compiled
def least_gradient(a: Array, center: Array, radius: Array, grads: Array, found: Array) -> None:
    """Write the gradients of rows, given those of what `least` writes."""
    zero = a.dtype.type(0)
    for b in range(len(a)):
        middle, reach = center[b], radius[b]
        for r in range(a.shape[1]):
            row, out, g = a[b, r], found[b, r], grads[b, r]
            for j in range(len(row)):
                tilt = reach[j] if row[j] > zero else -reach[j]
                out[j] = g * (middle[j] - (tilt if row[j] != zero else zero))
