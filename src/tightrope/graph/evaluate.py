"""Concrete evaluation: the rule of each op on points.

BatchNorm uses the statistics the op holds, as in inference; training statistics are the
business of `tightrope.training.batchnorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.dense import convolve


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


RULES: dict[type[ops.Op], Callable[..., Any]] = {
    ops.Linear: lambda op, x: F.linear(x, op.weight, op.bias),
    ops.Conv2d: convolve,
    ops.BatchNorm: _batch_norm,
    ops.Shift: lambda op, x: x - op.offset if op.subtract else x + op.offset,
    ops.Scale: lambda op, x: x / op.factor if op.divide else x * op.factor,
    ops.AvgPool: lambda op, x: F.avg_pool2d(
        x, op.kernel, op.stride, op.padding, op.ceil_mode, op.count_include_pad
    ),
    ops.MaxPool: lambda op, x: F.max_pool2d(
        x, op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode
    ),
    ops.Reshape: lambda op, x: x.reshape(x.shape[0], *op.shape),
    ops.Permute: lambda op, x: x.permute(op.dims),
    ops.Pad: lambda op, x: F.pad(x, op.pads, value=op.value),
    ops.Slice: lambda op, x: x[(slice(None), *op.index)],
    ops.Concat: lambda op, *xs: torch.cat(xs, op.dim),
    ops.Add: lambda op, a, b: a + b,
    ops.Sub: lambda op, a, b: a - b,
    ops.Relu: lambda op, x: F.relu(x),
    ops.LeakyRelu: lambda op, x: F.leaky_relu(x, op.slope),
    ops.Sigmoid: lambda op, x: torch.sigmoid(x),
    ops.Tanh: lambda op, x: torch.tanh(x),
}
