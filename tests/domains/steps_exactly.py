"""Exact rules of copies, transposed convolutions and jumps: `exact.py` has the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tightrope.graph import ops

Exact = np.ndarray  # of Fraction

STEPS: dict[str, Callable[[Fraction], int]] = {
    "positive": lambda v: int(v > 0),
    "nonnegative": lambda v: int(v >= 0),
    "zero": lambda v: int(v == 0),
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,  # halves to even numbers
    "trunc": math.trunc,
}


def array(x: Any) -> Exact:
    """Return numbers as an array; arithmetic makes single numbers of arrays without dimensions."""
    return np.asarray(x, dtype=object)


def _take(op: ops.Take, x: Exact, *, dtype: Any) -> Exact:
    return array(array(x).reshape(-1)[op.index.numpy()])


def conv_transpose(op: ops.ConvTranspose2d, x: Exact, weight: Exact, bias: Exact | None) -> Exact:
    """Scatter each number of the input to where the kernel's taps lead."""
    (inputs, each, kh, kw), groups = weight.shape, op.groups
    sizes = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(
            x.shape[1:], op.stride, op.dilation, (kh, kw), op.extra, strict=True
        )
    ]
    whole = np.full((each * groups, *sizes), Fraction(0), dtype=object)
    for c in range(inputs):
        first = c // (inputs // groups) * each
        for i, j, a, b in np.ndindex(x.shape[1], x.shape[2], kh, kw):
            row, column = (
                i * op.stride[0] + a * op.dilation[0],
                j * op.stride[1] + b * op.dilation[1],
            )
            whole[first : first + each, row, column] += weight[c, :, a, b] * x[c, i, j]
    (ph, pw), (height, width) = op.padding, sizes
    cut = whole[:, ph : height - ph, pw : width - pw]
    return cut if bias is None else cut + bias.reshape(-1, 1, 1)


def _step(op: ops.Step, x: Exact, *, dtype: Any) -> Exact:
    values = [Fraction(STEPS[op.kind](v)) for v in array(x).ravel()]
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found.reshape(array(x).shape)


def _where(op: ops.Where, condition: Exact, a: Exact, b: Exact, *, dtype: Any) -> Exact:
    return array(np.where(array(condition) != 0, a, b))


def _arg_max(op: ops.ArgMax, x: Exact, *, dtype: Any) -> Exact:
    size = x.shape[-1]
    places = size - 1 - np.flip(x, -1).argmax(-1) if op.last else x.argmax(-1)
    flat = [Fraction(int(v)) for v in np.asarray(places).ravel()]
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(x.shape[:-1])


EXACT: dict[type[ops.Op], Callable[..., Exact]] = {
    ops.Take: _take,
    ops.Step: _step,
    ops.Where: _where,
    ops.ArgMax: _arg_max,
}
