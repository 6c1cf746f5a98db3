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
from numba import njit

Array = np.ndarray[Any, Any]


def compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)


@compiled
def find_lines(low: Array, high: Array, left: float, lines: Array) -> None:
    """Write lower slopes, upper slopes and upper intercepts, [3, neurons]."""
    for j in range(len(low)):
        l, u = low[j], high[j]  # noqa: E741
        if l >= 0 or u <= 0:
            slope = 1.0 if l >= 0 else left
            lines[0, j], lines[1, j], lines[2, j] = slope, slope, 0.0
        else:
            above = (1 - left) * (u / (u - l))
            lines[0, j], lines[1, j] = (1.0 if u > -l else left), left + above
            lines[2, j] = -above * l


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
    zero = lines.dtype.type(0)
    for b in range(len(a)):
        find_lines(low[b], high[b], left, lines)
        below, above, intercept = lines[0], lines[1], lines[2]
        for r in range(a.shape[1]):
            row, out, total = a[b, r], into[b, r], zero
            for j in range(len(row)):
                negative = min(row[j], zero)
                out[j] = (row[j] - negative) * below[j] + negative * above[j]
                total += negative * intercept[j] + out[j] * bias[j]
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
    """Write gradients of rows, bounds and biases (by sample), given those of what `pull` writes."""
    lines, sums = np.empty((3, a.shape[2]), a.dtype), np.empty((2, a.shape[2]), a.dtype)
    zero = lines.dtype.type(0)
    below, above, intercept = lines[0], lines[1], lines[2]
    slope, rise = sums[0], sums[1]  # gradients of upper slopes and intercepts
    for b in range(len(a)):
        find_lines(low[b], high[b], left, lines)
        sums[:] = zero
        offset = found[3][b]
        offset[:] = zero
        for r in range(a.shape[1]):
            row, out, after, g = a[b, r], found[0][b, r], grads[0][b, r], grads[1][b, r]
            for j in range(len(row)):
                negative = min(row[j], zero)
                whole = after[j] + g * bias[j]
                out[j] = above[j] * whole + intercept[j] * g if row[j] < 0 else below[j] * whole
                slope[j] += negative * whole
                rise[j] += negative * g
                offset[j] += g * ((row[j] - negative) * below[j] + negative * above[j])
        for j in range(a.shape[2]):
            l, u = low[b, j], high[b, j]  # noqa: E741
            if l >= 0 or u <= 0:
                found[1][b, j], found[2][b, j] = zero, zero
            else:
                share = 1 / (u - l)
                x, y = u * share, -l * share
                found[1][b, j] = (1 - left) * (slope[j] * x * share - rise[j] * x * x)
                found[2][b, j] = (1 - left) * (slope[j] * y * share + rise[j] * y * y)
