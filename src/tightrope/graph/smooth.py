"""Values of functions, products and what is composed of them, and what rounding does to them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.functions import curve, image
from tightrope.graph.rounding import ELEMENTARY, Rounded, growth, outwards


def _known(rounded: Rounded) -> Rounded:
    """Errors that are not numbers come from an overflow: they say nothing."""
    return Rounded(rounded.value, rounded.error.nan_to_num(nan=torch.inf, posinf=torch.inf))


# --- functions --------------------------------------------------------------------------------


def function(op: ops.Function, x: Tensor) -> Tensor:
    """Return a function of each number."""
    return curve(op).value(x)


def rounded_function(rule: Any, op: ops.Function, x: Rounded) -> Rounded:
    """Values that lie in the image of what the argument may be, with `ELEMENTARY` units of error.

    Units are those of what `Curve.size` says: mostly of the result.
    """
    value = rule(op, x.value)
    eps = torch.finfo(value.dtype).eps
    shape = curve(op)
    lower, upper = x.value - x.error, x.value + x.error
    low, high = image(shape, lower, upper, units=ELEMENTARY, rounding=eps)
    return _known(outwards(value, torch.maximum(high - value, value - low)))


# --- products ---------------------------------------------------------------------------------


def product(op: ops.Mul, a: Tensor, b: Tensor) -> Tensor:
    """Return products of numbers."""
    return a * b


def matrix_product(op: ops.MatMul, a: Tensor, b: Tensor) -> Tensor:
    """Return products of matrices."""
    return a @ b


def rounded_product(rule: Any, op: ops.Op, a: Rounded, b: Rounded) -> Rounded:
    """Products, or sums of so many of them, of values that are known up to rounding."""
    terms = a.value.shape[-1] if isinstance(op, ops.MatMul) else 1
    value, sizes = rule(op, a.value, b.value), (a.value.abs(), b.value.abs())
    carried = rule(op, sizes[0], b.error) + rule(op, a.error, sizes[1] + b.error)
    own = growth(terms + 2, value.dtype) * (rule(op, *sizes) + carried)
    relative = growth(terms + 4, value.dtype)
    return _known(outwards(value, (own + carried) * (1 + relative), absolute=terms))


# --- compositions -----------------------------------------------------------------------------


def differences(op: ops.Differences, x: Tensor) -> Tensor:
    """Return `x_j - x_i` at place i, j."""
    return x.unsqueeze(-2) - x.unsqueeze(-1)


def rounded_differences(rule: Any, op: ops.Differences, x: Rounded) -> Rounded:
    """One difference each."""
    magnitude = x.value.abs().unsqueeze(-2) + x.value.abs().unsqueeze(-1)
    carried = x.error.unsqueeze(-2) + x.error.unsqueeze(-1)
    value = rule(op, x.value)
    return outwards(value, growth(1, value.dtype) * magnitude + carried)


def softmax(op: ops.Softmax, x: Tensor) -> Tensor:
    """Return the softmax over the last dimension, or its logarithm."""
    return torch.log_softmax(x, -1) if op.logarithm else torch.softmax(x, -1)


def rounded_softmax(rule: Any, op: ops.Softmax, x: Rounded) -> Rounded:
    """By any of the usual forms: less the largest number, exponentials, their sum, a quotient.

    The difference d to the largest number is rounded by d u, and that is how much its exponential
    is off; of all of them, d exp(-d) is at most 1.
    """
    value = rule(op, x.value)
    size, eps = x.value.shape[-1], torch.finfo(value.dtype).eps
    distance = x.value.amax(-1, keepdim=True) - x.value
    relative = growth(2 * size + 4 * ELEMENTARY, value.dtype) + 4 * eps * distance
    change = 2 * x.error.amax(-1, keepdim=True)
    if op.logarithm:
        return _known(outwards(value, relative * (1 + distance) + change))
    error = value * (relative * (1 + relative) + torch.expm1(change) * (1 + 2 * relative))
    # Far from the largest number some take values for zero long before they are too small.
    floor = math.sqrt(torch.finfo(value.dtype).tiny)
    error = error.nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
    return outwards(value, error + floor)


def standardize(op: ops.Standardize, x: Tensor) -> Tensor:
    """Return deviations from the mean in units of their spread, over the last dimension."""
    centered = x - x.mean(-1, keepdim=True) if op.center else x
    variance = (centered * centered).mean(-1, keepdim=True)
    return centered * torch.rsqrt(variance + op.epsilon)


def rounded_standardize(rule: Any, op: ops.Standardize, x: Rounded) -> Rounded:
    """By any of the usual forms, the mean of squares less the square of the mean among them."""
    value, dtype = rule(op, x.value), x.value.dtype
    size = x.value.shape[-1]
    share = growth(2 * size + 16, dtype)

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    middle = mean(x.value) if op.center else torch.zeros_like(mean(x.value))
    centered = x.value - middle
    reach = x.value.abs() + x.error
    off = x.error + share * reach
    if op.center:
        off = off + mean(x.error) + share * mean(reach)
    variance = mean(centered * centered)
    loose = mean(2 * centered.abs() * off + off * off) + share * mean(reach * reach)
    loose = loose * (1 + share) + torch.finfo(dtype).tiny
    most = torch.rsqrt((variance - loose).clamp(min=0) + op.epsilon) * (1 + share)
    least = torch.rsqrt(variance + loose + op.epsilon) * (1 - share)
    error = centered.abs() * (most - least) + off * most + share * value.abs()
    return _known(outwards(value, error * (1 + share), absolute=most))
