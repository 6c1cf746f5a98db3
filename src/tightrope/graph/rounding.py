"""A value and how far rounding can lead from it: one rule per operation.

What is assumed of whoever computes the value, in a precision with unit roundoff u:

- Sums are taken in any order, with or without fused multiply-add, and each operation on the way is
  rounded once. A sum of n products is then off by at most n u / (1 - n u) times the sum of the
  products' absolute values. (This does not cover convolutions by Winograd's or Fourier's
  transformation.)
- BatchNorm is any of its usual forms: at most 16 roundings relative to |x - mean| and |bias|.
- Sigmoid and tanh are off by at most `ELEMENTARY` units in the last place of 1 (sigmoid), or of
  the result (tanh).
- Results below the smallest normal number may be replaced by zero.

The rules evaluate in the tensors' own precision, so that they count twice: for the value of the
one who is checked, and for ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.errors import UserError
from tightrope.graph import evaluate, ops

# Units in the last place that an elementary function may be off.
ELEMENTARY = 16
_BATCH_NORM = 16


@dataclass(frozen=True, eq=False)
class Rounded:
    """A computed value and a bound on its distance from anybody else's, elementwise."""

    value: Tensor
    error: Tensor

    @classmethod
    def known(cls, value: Tensor) -> Rounded:
        """Return a value that everybody agrees on."""
        return cls(value, torch.zeros_like(value))

    def map(self, rearrange: Callable[[Tensor], Tensor]) -> Rounded:
        """Return the value and its error in another order or shape."""
        return Rounded(rearrange(self.value), rearrange(self.error))


def growth(terms: int, dtype: torch.dtype) -> float:
    """Return how far two sums of so many products can be apart, relative to their magnitude."""
    unit = terms * torch.finfo(dtype).eps  # twice the unit roundoff, once for each of the two
    if unit >= 0.5:
        raise UserError(
            f"rounding in {dtype} could change sums of {terms} terms beyond recognition, so that "
            "the network cannot be checked; use a wider type"
        )
    return unit / (1 - unit)


def _summed(op: Any, x: Rounded, terms: int, rule: Callable[[Any, Tensor], Tensor]) -> Rounded:
    """Sums of `terms` products of the inputs with the numbers that `op` holds."""
    dtype = x.value.dtype
    relative = growth(terms + 4, dtype)
    # One product for both: what is rounded here, and the inputs' errors.
    magnitude = rule(op.map_tensors(torch.abs), x.value.abs() + x.error / relative)
    tiny = terms * torch.finfo(dtype).tiny
    # What is added here is rounded, too, and so is what is carried; the second `relative` is more.
    return Rounded(rule(op, x.value), relative * magnitude * (1 + relative) + tiny)


def _linear(op: ops.Linear, x: Rounded) -> Rounded:
    return _summed(op, x, op.weight.shape[1] + 1, lambda o, v: F.linear(v, o.weight, o.bias))


def _conv(op: ops.Conv2d, x: Rounded) -> Rounded:
    def convolve(o: ops.Conv2d, v: Tensor) -> Tensor:
        return F.conv2d(v, o.weight, o.bias, o.stride, o.padding, o.dilation, o.groups)

    return _summed(op, x, op.weight[0].numel() + 1, convolve)


def _avg_pool(op: ops.AvgPool, x: Rounded) -> Rounded:
    return _summed(op, x, math.prod(op.kernel) + 1, evaluate.RULES[ops.AvgPool])


def _batch_norm(op: ops.BatchNorm, x: Rounded) -> Rounded:
    shape = (-1,) + (1,) * (x.value.dim() - 2)
    factor, _ = evaluate.batchnorm_map(op)
    scale, mean = factor.abs().view(shape), op.mean.abs().view(shape)
    bias = 0.0 if op.bias is None else op.bias.abs().view(shape)
    magnitude = (x.value.abs() + mean) * scale + bias
    error = growth(_BATCH_NORM, magnitude.dtype) * magnitude + x.error * scale
    value = evaluate.RULES[ops.BatchNorm](op, x.value)
    return _outwards(value, error, absolute=scale + 1)


def _outwards(value: Tensor, error: Tensor, absolute: Tensor | float = 1.0) -> Rounded:
    """Allow for underflow, and for the rounding of the error itself."""
    info = torch.finfo(value.dtype)
    return Rounded(value, error * (1 + 8 * info.eps) + 4 * info.tiny * absolute)


def _once(op: Any, *xs: Rounded) -> Rounded:
    """One sum of two: `Shift`, `Add`, `Sub`."""
    values = [x.value for x in xs]
    magnitude = sum((v.abs() for v in values), torch.zeros_like(values[0]))
    if isinstance(op, ops.Shift):
        magnitude = magnitude + op.offset.abs()
    carried = sum((x.error for x in xs), torch.zeros_like(values[0]))
    value = evaluate.RULES[type(op)](op, *values)
    return _outwards(value, growth(1, value.dtype) * magnitude + carried)


def _scale(op: ops.Scale, x: Rounded) -> Rounded:
    value = evaluate.RULES[ops.Scale](op, x.value)
    absolute = ops.Scale(op.factor.abs(), op.divide)
    carried = evaluate.RULES[ops.Scale](absolute, x.error)
    return _outwards(value, growth(3, value.dtype) * value.abs() + carried)


def _pad(op: ops.Pad, x: Rounded) -> Rounded:
    return Rounded(F.pad(x.value, op.pads, value=op.value), F.pad(x.error, op.pads))


def _max_pool(op: ops.MaxPool, x: Rounded) -> Rounded:
    return x.map(lambda v: evaluate.RULES[ops.MaxPool](op, v))


def _rearranged(op: Any, *xs: Rounded) -> Rounded:
    rule = evaluate.RULES[type(op)]
    return Rounded(rule(op, *(x.value for x in xs)), rule(op, *(x.error for x in xs)))


def _leaky(op: ops.LeakyRelu, x: Rounded) -> Rounded:
    value = F.leaky_relu(x.value, op.slope)
    return _outwards(value, growth(2, value.dtype) * value.abs() + x.error * max(1.0, op.slope))


def _sigmoid(op: ops.Sigmoid, x: Rounded) -> Rounded:
    value = torch.sigmoid(x.value)
    return _outwards(value, ELEMENTARY * torch.finfo(value.dtype).eps + x.error)


def _tanh(op: ops.Tanh, x: Rounded) -> Rounded:
    value = torch.tanh(x.value)
    return _outwards(value, ELEMENTARY * torch.finfo(value.dtype).eps * value.abs() + x.error)


RULES: dict[type[ops.Op], Callable[..., Rounded]] = {
    ops.Linear: _linear,
    ops.Conv2d: _conv,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _once,
    ops.Scale: _scale,
    ops.AvgPool: _avg_pool,
    ops.MaxPool: _max_pool,
    ops.Reshape: _rearranged,
    ops.Permute: _rearranged,
    ops.Pad: _pad,
    ops.Slice: _rearranged,
    ops.Concat: _rearranged,
    ops.Add: _once,
    ops.Sub: _once,
    ops.Relu: lambda op, x: Rounded(F.relu(x.value), x.error),
    ops.LeakyRelu: _leaky,
    ops.Sigmoid: _sigmoid,
    ops.Tanh: _tanh,
}
