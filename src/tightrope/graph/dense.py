"""Small convolutions as matrices.

A convolution of few inputs and outputs is several times faster as one dense matrix when it is
applied to many points, as training and latent attacks on small networks do. The matrix is a
differentiable function of the weights. Its zeros add nothing to a sum, not even a rounding error.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.devices import launches
from tightrope.graph import ops
from tightrope.graph.windows import Side, places, sides

# A convolution with at most this many pairs of inputs and outputs is faster as one matrix,
LARGEST_MATRIX = 1 << 18
# if it has at least this many products with the matrix to do.
SMALLEST_PRODUCT = 1 << 20


def pays(op: ops.Conv2d, x: Tensor) -> bool:
    """Return whether the matrix is the faster way to convolve these inputs."""
    if launches(x) or x.dim() != 4:
        return False
    rows, columns = sides(op, x.shape)
    outputs = op.weight.shape[0] * rows.windows() * columns.windows()
    entries = x[0].numel() * outputs if len(x) else 0
    return entries <= LARGEST_MATRIX and len(x) * entries >= SMALLEST_PRODUCT


def convolve(op: ops.Conv2d, x: Tensor) -> Tensor:
    """Evaluate a convolution in whichever way is faster."""
    if pays(op, x):
        return multiply(op, x, *convolution_matrix(op, tuple(x.shape[1:])))
    stride = op.stride
    if op.weight.shape[2:] == (1, 1) and op.padding == (0, 0) and stride != (1, 1):
        # It reads every other pixel only. (With few channels, channels last and a stride, the
        # backward pass of PyTorch 2.13 on a CPU writes where it should not.)
        x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
    return F.conv2d(x, op.weight, op.bias, stride, op.padding, op.dilation, op.groups)


def multiply(op: ops.Conv2d, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Evaluate a convolution by its matrix."""
    outputs = F.linear(x.flatten(1), matrix, bias)
    return outputs.view(len(x), len(op.weight), sides(op, x.shape)[0].windows(), -1)


def convolution_matrix(op: ops.Conv2d, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Return the matrix and the bias of a convolution of inputs of that shape."""
    row, column, tap, size = convolution_entries(op, shape)
    weights = op.weight.flatten()[tap.to(op.weight.device)]
    place = (row * math.prod(shape) + column).to(op.weight.device)
    flat = weights.new_zeros(size * math.prod(shape)).scatter(0, place, weights)
    bias = None if op.bias is None else op.bias.repeat_interleave(size // op.weight.shape[0])
    return flat.view(size, -1), bias


def convolution_entries(
    op: ops.Conv2d, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return row, column and weight number of each entry, and the number of rows."""
    return _entries(shape[0], op.weight.shape[0], op.groups, *sides(op, shape))


def transposed_shape(op: ops.ConvTranspose2d, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what a transposed convolution makes of inputs of that shape."""
    sizes = zip(
        shape[1:], op.weight.shape[2:], op.stride, op.padding, op.extra, op.dilation, strict=True
    )
    after = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, e, d in sizes]
    return (op.weight.shape[1] * op.groups, *after)


def transposed_entries(
    op: ops.ConvTranspose2d, after: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, output and weight number of each entry; `after` is the outputs' shape."""
    conv = ops.Conv2d(op.weight, None, op.stride, op.padding, op.dilation, op.groups)
    return convolution_entries(conv, after)[:3]


@lru_cache(maxsize=64)
def _entries(
    channels: int, outputs: int, groups: int, rows: Side, columns: Side
) -> tuple[Tensor, Tensor, Tensor, int]:
    taps = places(rows, columns, (rows.windows(), columns.windows())).flatten(1)
    positions = taps.shape[1]
    inside = channels // groups
    output = torch.arange(outputs).view(-1, 1, 1, 1)
    channel = torch.arange(inside).view(1, -1, 1, 1)
    place = torch.arange(positions)
    tap = torch.arange(len(taps)).view(-1, 1)
    first = output // (outputs // groups) * inside  # of the output's group
    found = [
        output * positions + place + 0 * channel + 0 * tap,
        (first + channel) * (rows.size * columns.size) + taps,
        (output * inside + channel) * len(taps) + tap + 0 * place,
    ]
    exists = (taps >= 0).expand(outputs, inside, -1, -1)
    row, column, number = (t.expand_as(exists)[exists] for t in found)
    return row, column, number, outputs * positions
