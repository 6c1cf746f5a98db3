"""Evaluation on points: a row per operation, with its rule and with what rounding does to it.

BatchNorm uses the statistics the op holds, as in inference; training statistics are the
business of `tightrope.training.batchnorm`. What is assumed of rounding is said in `rounding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import distance, ops, smooth, steps
from tightrope.graph.dense import convolve
from tightrope.graph.rounding import ELEMENTARY, Rounded, growth, once, outwards, rearranged, summed

# Roundings of any of BatchNorm's usual forms.
_BATCH_NORM = 16


class Row(NamedTuple):
    """How an operation is evaluated: `value(op, *points)`.

    `rounded(value, op, *points)` does the same with points that are known up to rounding.
    """

    value: Callable[..., Any]
    rounded: Callable[..., Rounded]


def _batch_norm(op: ops.BatchNorm, x: Tensor) -> Tensor:
    factor, offset = batchnorm_map(op)
    shape = (-1,) + (1,) * (x.dim() - 2)
    return x * factor.view(shape) + offset.view(shape)


def batchnorm_map(op: ops.BatchNorm) -> tuple[Tensor, Tensor]:
    """Return the per-channel `factor` and `offset` that BatchNorm amounts to."""
    factor = torch.rsqrt(op.variance + op.epsilon)
    if op.weight is not None:
        factor = factor * op.weight
    offset = -op.mean * factor
    if op.bias is not None:
        offset = offset + op.bias
    return factor, offset


def _rounded_batch_norm(rule: Any, op: ops.BatchNorm, x: Rounded) -> Rounded:
    shape = (-1,) + (1,) * (x.value.dim() - 2)
    factor, _ = batchnorm_map(op)
    scale, mean = factor.abs().view(shape), op.mean.abs().view(shape)
    bias = 0.0 if op.bias is None else op.bias.abs().view(shape)
    magnitude = (x.value.abs() + mean) * scale + bias
    error = growth(_BATCH_NORM, magnitude.dtype) * magnitude + x.error * scale
    return outwards(rule(op, x.value), error, absolute=scale + 1)


def _rounded_conv(rule: Any, op: ops.Conv2d, x: Rounded) -> Rounded:
    """Without the matrix of small convolutions, whose zeros make NaN of what has overflowed."""

    def directly(o: ops.Conv2d, v: Tensor) -> Tensor:
        return F.conv2d(v, o.weight, o.bias, o.stride, o.padding, o.dilation, o.groups)

    return summed(directly, op, x, op.weight[0].numel() + 1)


def _take(op: ops.Take, x: Tensor) -> Tensor:
    flat = x.reshape(len(x), -1).index_select(1, op.index.flatten().to(x.device))
    return flat.view(len(x), *op.index.shape)


def _conv_transpose(op: ops.ConvTranspose2d, x: Tensor) -> Tensor:
    return F.conv_transpose2d(
        x, op.weight, op.bias, op.stride, op.padding, op.extra, op.groups, op.dilation
    )


def transposed_terms(op: ops.ConvTranspose2d) -> int:
    """Return of how many products an output of a transposed convolution is at most the sum."""
    return op.weight.shape[0] // op.groups * math.prod(op.weight.shape[2:])


def _rounded_scale(rule: Any, op: ops.Scale, x: Rounded) -> Rounded:
    value = rule(op, x.value)
    carried = rule(ops.Scale(op.factor.abs(), op.divide), x.error)
    return outwards(value, growth(3, value.dtype) * value.abs() + carried)


def _rounded_pad(rule: Any, op: ops.Pad, x: Rounded) -> Rounded:
    return Rounded(rule(op, x.value), F.pad(x.error, op.pads))


def _rounded_leaky(rule: Any, op: ops.LeakyRelu, x: Rounded) -> Rounded:
    value = rule(op, x.value)
    return outwards(value, growth(2, value.dtype) * value.abs() + x.error * max(1.0, op.slope))


def _rounded_sigmoid(rule: Any, op: ops.Sigmoid, x: Rounded) -> Rounded:
    value = rule(op, x.value)
    return outwards(value, ELEMENTARY * torch.finfo(value.dtype).eps + x.error)


def _rounded_tanh(rule: Any, op: ops.Tanh, x: Rounded) -> Rounded:
    value = rule(op, x.value)
    return outwards(value, ELEMENTARY * torch.finfo(value.dtype).eps * value.abs() + x.error)


TABLE: dict[type[ops.Op], Row] = {
    ops.Linear: Row(
        lambda op, x: F.linear(x, op.weight, op.bias),
        lambda rule, op, x: summed(rule, op, x, op.weight.shape[1] + 1),
    ),
    ops.Conv2d: Row(convolve, _rounded_conv),
    ops.ConvTranspose2d: Row(
        _conv_transpose, lambda rule, op, x: summed(rule, op, x, transposed_terms(op) + 1)
    ),
    ops.BatchNorm: Row(_batch_norm, _rounded_batch_norm),
    ops.Shift: Row(lambda op, x: x - op.offset if op.subtract else x + op.offset, once),
    ops.Scale: Row(lambda op, x: x / op.factor if op.divide else x * op.factor, _rounded_scale),
    ops.AvgPool: Row(
        lambda op, x: F.avg_pool2d(
            x, op.kernel, op.stride, op.padding, op.ceil_mode, op.count_include_pad
        ),
        lambda rule, op, x: summed(rule, op, x, math.prod(op.kernel) + 1),
    ),
    ops.MaxPool: Row(
        lambda op, x: F.max_pool2d(x, op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode),
        rearranged,
    ),
    ops.Reshape: Row(lambda op, x: x.reshape(x.shape[0], *op.shape), rearranged),
    ops.Permute: Row(lambda op, x: x.permute(op.dims), rearranged),
    ops.Pad: Row(lambda op, x: F.pad(x, op.pads, value=op.value), _rounded_pad),
    ops.Slice: Row(lambda op, x: x[(slice(None), *op.index)], rearranged),
    ops.Take: Row(_take, rearranged),
    ops.Concat: Row(lambda op, *xs: torch.cat(xs, op.dim), rearranged),
    ops.Add: Row(lambda op, a, b: a + b, once),
    ops.Sub: Row(lambda op, a, b: a - b, once),
    ops.Relu: Row(lambda op, x: F.relu(x), lambda rule, op, x: Rounded(rule(op, x.value), x.error)),
    ops.LeakyRelu: Row(lambda op, x: F.leaky_relu(x, op.slope), _rounded_leaky),
    ops.Sigmoid: Row(lambda op, x: torch.sigmoid(x), _rounded_sigmoid),
    ops.Tanh: Row(lambda op, x: torch.tanh(x), _rounded_tanh),
    ops.Function: Row(smooth.function, smooth.rounded_function),
    ops.Mul: Row(smooth.product, smooth.rounded_product),
    ops.MatMul: Row(smooth.matrix_product, smooth.rounded_product),
    ops.Differences: Row(smooth.differences, smooth.rounded_differences),
    ops.Softmax: Row(smooth.softmax, smooth.rounded_softmax),
    ops.Standardize: Row(smooth.standardize, smooth.rounded_standardize),
    ops.Step: Row(steps.step, steps.rounded_step),
    ops.Where: Row(steps.chosen, steps.rounded_choice),
    ops.ArgMax: Row(steps.place_of_largest, steps.rounded_place),
    ops.Distance: Row(distance.value, distance.rounded),
}


class _Column(Mapping[type[ops.Op], Callable[..., Any]]):
    """The rules of one column of the table, by operation."""

    def __init__(self, read: Callable[[Row], Callable[..., Any]]) -> None:
        self.read = read

    def __getitem__(self, kind: type[ops.Op]) -> Callable[..., Any]:
        return self.read(TABLE[kind])

    def __iter__(self) -> Iterator[type[ops.Op]]:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)


RULES = _Column(lambda row: row.value)
ROUNDED_RULES = _Column(lambda row: partial(row.rounded, row.value))
