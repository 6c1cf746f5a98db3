"""Networks in exact arithmetic.

`exact_values` evaluates a graph at one point in rational numbers. Roots and exponentials are
not rational, and quotients grow long; they are taken to 60 digits, far finer than anything
float64 can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import smoothly
import steps_exactly
import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES

Exact = np.ndarray  # of Fraction
_DIGITS = Context(prec=60, Emax=10**8, Emin=-(10**8))


def fractions(tensor: Tensor) -> Exact:
    """Return the numbers in a tensor as they are, without rounding."""
    flat = [_fraction(value) for value in tensor.detach().to(torch.float64).flatten().tolist()]
    exact = np.empty(len(flat), dtype=object)
    exact[:] = flat
    return exact.reshape(tuple(tensor.shape))


def _fraction(value: float) -> Fraction:
    """Return a number as it is; what is infinite is beyond all others."""
    return (
        Fraction(value)
        if math.isfinite(value)
        else Fraction(round(math.copysign(1, value)) * 10**5000)
    )


def exact_values(graph: Graph, point: Tensor) -> dict[int, Exact]:
    """Return the exact value of every node at one point (without a batch dimension).

    Numbers that are Python floats in the module (a slope, a padding, an offset) count as what
    torch makes of them: they are rounded once, to the dtype of the point.
    """
    everything = range(len(graph.nodes))
    return graph.propagate(_EXACT, fractions(point), keep=everything, dtype=point.dtype)


def inside(box: Box, exact: Exact) -> bool:
    """Return whether one box (batch of one) contains exact values, without any tolerance."""
    lower, upper = fractions(box.lower[0]), fractions(box.upper[0])
    ends = ((box.lower, -np.inf), (box.upper, np.inf))
    # What is not a number says nothing.
    endless = [((t[0] == end) | t[0].isnan()).numpy() for t, end in ends]
    above, below = lower <= exact, exact <= upper
    return bool(np.all(above | endless[0]) and np.all(below | endless[1]))


# --- exact rules ------------------------------------------------------------------------------


def _rounded(value: float | Tensor, dtype: torch.dtype) -> Any:
    tensor = torch.as_tensor(value, dtype=torch.float64).to(dtype)
    return fractions(tensor) if tensor.dim() else Fraction(tensor.item())


def _per_channel(vector: Exact, like: Exact) -> Exact:
    return vector.reshape(-1, *[1] * (like.ndim - 1))


def _linear(op: ops.Linear, x: Exact, *, dtype: torch.dtype) -> Exact:
    out = x @ fractions(op.weight).T
    return out if op.bias is None else out + fractions(op.bias)


def _pad_image(x: Exact, padding: ops.Pair, value: Any) -> Exact:
    (ph, pw), (c, h, w) = padding, x.shape
    padded = np.empty((c, h + 2 * ph, w + 2 * pw), dtype=object)
    padded[:] = value
    padded[:, ph : ph + h, pw : pw + w] = x
    return padded


def _conv(op: ops.Conv2d, x: Exact, *, dtype: torch.dtype) -> Exact:
    weight, x = fractions(op.weight), _pad_image(x, op.padding, Fraction(0))
    outputs, inputs, kh, kw = weight.shape
    (sh, sw), (dh, dw) = op.stride, op.dilation
    height = (x.shape[1] - dh * (kh - 1) - 1) // sh + 1
    width = (x.shape[2] - dw * (kw - 1) - 1) // sw + 1
    out = np.empty((outputs, height, width), dtype=object)
    for o in range(outputs):
        group = o // (outputs // op.groups)
        channels = x[group * inputs : (group + 1) * inputs]
        for i in range(height):
            for j in range(width):
                rows = slice(i * sh, i * sh + dh * (kh - 1) + 1, dh)
                columns = slice(j * sw, j * sw + dw * (kw - 1) + 1, dw)
                out[o, i, j] = (weight[o] * channels[:, rows, columns]).sum()
    return out if op.bias is None else out + _per_channel(fractions(op.bias), out)


@np.vectorize(otypes=[object])
def _short(value: Fraction) -> Fraction:
    """Round to 200 significant bits, which leaves a power of two as the denominator."""
    shift = 200 - value.numerator.bit_length() + value.denominator.bit_length()
    return Fraction(round(value * Fraction(2) ** shift)) / Fraction(2) ** shift


@np.vectorize(otypes=[object])
def _root(value: Fraction) -> Fraction:
    scaled = (value.numerator << 800) // value.denominator
    return Fraction(math.isqrt(scaled), 1 << 400)


def _batch_norm(op: ops.BatchNorm, x: Exact, *, dtype: torch.dtype) -> Exact:
    epsilon = _rounded(op.epsilon, dtype)
    factor = _short(1 / _root(fractions(op.variance) + epsilon))
    out = (x - _per_channel(fractions(op.mean), x)) * _per_channel(factor, x)
    if op.weight is not None:
        out = out * _per_channel(fractions(op.weight), x)
    return out if op.bias is None else out + _per_channel(fractions(op.bias), x)


def _constant(constant: Tensor, x: Exact, dtype: torch.dtype) -> Any:
    """Return a constant of an operation; it may have a batch dimension of one."""
    exact = _rounded(constant, dtype)
    return exact[0] if constant.dim() > x.ndim else exact


def _shift(op: ops.Shift, x: Exact, *, dtype: torch.dtype) -> Exact:
    offset = _constant(op.offset, x, dtype)
    return x - offset if op.subtract else x + offset


def _scale(op: ops.Scale, x: Exact, *, dtype: torch.dtype) -> Exact:
    factor = _constant(op.factor, x, dtype)
    return _short(x / factor) if op.divide else x * factor


def _windows(
    size: int, kernel: int, stride: int, padding: int, dilation: int, count: int
) -> list[list[int]]:
    """Return, for each output along one side, the input positions in its window."""
    starts = [i * stride - padding for i in range(count)]
    return [
        [p for p in range(s, s + dilation * (kernel - 1) + 1, dilation) if 0 <= p < size]
        for s in starts
    ]


def _pool(op: Any, x: Exact, dilation: ops.Pair, reduce: Callable[..., Fraction]) -> Exact:
    c, h, w = x.shape
    # The number of windows follows torch's rules for ceil_mode: let torch say it.
    shape = POINT_RULES[type(op)](op, torch.zeros(1, c, h, w)).shape
    sides = zip((h, w), op.kernel, op.stride, op.padding, dilation, shape[2:], strict=True)
    rows, columns = (_windows(*side) for side in sides)
    out = np.empty(tuple(shape[1:]), dtype=object)
    for channel in range(c):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                window = [x[channel, p, q] for p in row for q in column]
                out[channel, i, j] = reduce(window, i, j)
    return out


def _avg_pool(op: ops.AvgPool, x: Exact, *, dtype: torch.dtype) -> Exact:
    # What torch divides by: the window, cut off at the far edge of the padding.
    def extent(index: int, side: int) -> int:
        start = index * op.stride[side] - op.padding[side]
        stop = min(start + op.kernel[side], x.shape[side + 1] + op.padding[side])
        return stop - start

    def mean(window: list[Fraction], i: int, j: int) -> Fraction:
        count = extent(i, 0) * extent(j, 1) if op.count_include_pad else len(window)
        return sum(window, Fraction(0)) / count

    return _short(_pool(op, x, (1, 1), mean))


def _max_pool(op: ops.MaxPool, x: Exact, *, dtype: torch.dtype) -> Exact:
    return _pool(op, x, op.dilation, lambda window, i, j: max(window))


def _pad(op: ops.Pad, x: Exact, *, dtype: torch.dtype) -> Exact:
    pairs = list(zip(op.pads[::2], op.pads[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    crop = tuple(
        slice(max(0, -a), size - max(0, -b)) for (a, b), size in zip(pairs, x.shape, strict=True)
    )
    grow = [(max(0, a), max(0, b)) for a, b in pairs]
    return np.pad(x[crop], grow, constant_values=_rounded(op.value, dtype))


def _leaky_relu(op: ops.LeakyRelu, x: Exact, *, dtype: torch.dtype) -> Exact:
    slope = _rounded(op.slope, dtype)
    return np.where(x > 0, x, x * slope)


def _exponential(x: Fraction) -> Fraction:
    # Beyond 2000 nothing changes: even float64 ends at exp(745).
    x = max(min(x, Fraction(2000)), Fraction(-2000))
    return Fraction(_DIGITS.exp(_DIGITS.divide(Decimal(x.numerator), Decimal(x.denominator))))


@np.vectorize(otypes=[object])
def _sigmoid(x: Fraction) -> Fraction:
    return 1 / (1 + _exponential(-x))


@np.vectorize(otypes=[object])
def _tanh(x: Fraction) -> Fraction:
    if abs(x) < Fraction(1, 10**12):  # exp - 1 would lose digits
        return x - x**3 / 3 + 2 * x**5 / 15
    power = _exponential(2 * x)
    return (power - 1) / (power + 1)


def _conv_transpose(op: ops.ConvTranspose2d, x: Exact, *, dtype: torch.dtype) -> Exact:
    bias = None if op.bias is None else fractions(op.bias)
    return steps_exactly.conv_transpose(op, x, fractions(op.weight), bias)


def _distance(op: ops.Distance, x: Exact, *, dtype: torch.dtype) -> Exact:
    shares = fractions(op.shares)
    terms = -np.sort(-abs(x - fractions(op.weight)), axis=1)[:, : len(shares)]
    return terms @ shares[: terms.shape[1]]


_EXACT: dict[type[ops.Op], Callable[..., Exact]] = {
    ops.Linear: _linear,
    ops.Conv2d: _conv,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: _avg_pool,
    ops.MaxPool: _max_pool,
    ops.Reshape: lambda op, x, dtype: steps_exactly.array(x).reshape(op.shape),
    ops.Permute: lambda op, x, dtype: x.transpose([d - 1 for d in op.dims[1:]]),
    ops.Pad: _pad,
    ops.Slice: lambda op, x, dtype: x[op.index],
    ops.Concat: lambda op, *xs, dtype: np.concatenate(xs, op.dim - 1),
    ops.Add: lambda op, a, b, dtype: a + b,
    ops.Sub: lambda op, a, b, dtype: a - b,
    ops.Relu: lambda op, x, dtype: np.maximum(x, Fraction(0)),
    ops.LeakyRelu: _leaky_relu,
    ops.Sigmoid: lambda op, x, dtype: _short(_sigmoid(x)),
    ops.Tanh: lambda op, x, dtype: _short(_tanh(x)),
    **smoothly.EXACT,
    **steps_exactly.EXACT,
    ops.ConvTranspose2d: _conv_transpose,
    ops.Distance: _distance,
}
