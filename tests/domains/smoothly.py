"""Exact rules of smooth functions and products: `exact.py` has the others.

Functions are taken by mpmath to 60 digits, far finer than anything float64 can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath as mp
import numpy as np
from function_values import DIGITS, VALUES

from tightrope.graph import ops

Exact = np.ndarray  # of Fraction


def number(x: Fraction) -> Any:
    """Return a fraction as mpmath has it."""
    return mp.mpf(x.numerator) / mp.mpf(x.denominator)


def fraction(value: Any) -> Fraction:
    """Return a number of mpmath as a fraction; what is next to nothing is not spelled out."""
    sign, digits, exponent, _ = value._mpf_
    whole = Fraction(int(digits)) * Fraction(2) ** max(int(exponent), -10000)
    return -whole if sign else whole


def each(function: Callable[[Any], Any], x: Exact) -> Exact:
    """Apply a function of mpmath's numbers to each fraction."""
    with mp.workdps(DIGITS):
        flat = [fraction(mp.mpf(function(number(v)))) for v in x.ravel()]
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(x.shape)


def _function(op: ops.Function, x: Exact, *, dtype: Any) -> Exact:
    return each(lambda v: VALUES[op.name](v, *(mp.mpf(p) for p in op.parameters)), x)


def _softmax(op: ops.Softmax, x: Exact, *, dtype: Any) -> Exact:
    powers = each(mp.exp, x - x.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True)
    if not op.logarithm:
        return each(lambda v: v, shares)
    total = each(mp.log, powers.sum(-1, keepdims=True))
    return x - x.max(-1, keepdims=True) - total


def _standardize(op: ops.Standardize, x: Exact, *, dtype: Any) -> Exact:
    size = x.shape[-1]
    centered = x - x.sum(-1, keepdims=True) / size if op.center else x
    variance = (centered * centered).sum(-1, keepdims=True) / size + Fraction(op.epsilon)
    return each(lambda v: v, centered / each(mp.sqrt, variance))


def _differences(op: ops.Differences, x: Exact, *, dtype: Any) -> Exact:
    return np.expand_dims(x, -2) - np.expand_dims(x, -1)


EXACT: dict[type[ops.Op], Callable[..., Exact]] = {
    ops.Function: _function,
    ops.Mul: lambda op, a, b, dtype: a * b,
    ops.MatMul: lambda op, a, b, dtype: a @ b,
    ops.Differences: _differences,
    ops.Softmax: _softmax,
    ops.Standardize: _standardize,
}
