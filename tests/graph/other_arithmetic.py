"""The same numbers computed in other ways: other orders of sums, fused or not, other formulas.

`evaluations(op, x, draw)` yields results of an operation, each of which a network might compute
with its own kernels: every step is rounded to the precision of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import evaluate, ops

Draw = torch.Generator


def evaluations(op: ops.Op, xs: list[Tensor], draw: Draw) -> Iterator[Tensor]:
    """Yield results of an operation, in the precision of its inputs."""
    yield evaluate.RULES[type(op)](op, *xs)
    yield _in_double(op, *xs)
    yield from _OTHERS.get(type(op), lambda *_: iter(()))(op, *xs, draw)


def _in_double(op: ops.Op, *xs: Tensor) -> Tensor:
    """Compute in float64 and round once."""
    wide = op.map_tensors(lambda t: t.double() if t.is_floating_point() else t)
    return evaluate.RULES[type(op)](wide, *(x.double() for x in xs)).to(xs[0].dtype)


# --- sums of products -------------------------------------------------------------------------


def sums(factors: Tensor, weights: Tensor, start: Tensor, draw: Draw) -> Iterator[Tensor]:
    """Yield sums of `factors * weights` over the last dimension, and of `start`."""
    products = factors * weights
    count = products.shape[-1]
    backwards = torch.arange(count - 1, -1, -1)
    for order in (torch.arange(count), backwards, torch.randperm(count, generator=draw)):
        yield _in_a_row(products[..., order], start)
        yield _in_a_row(products[..., order], torch.zeros_like(start)) + start
        yield _fused(factors[..., order], weights[..., order], start)
    by_size = products.abs().argsort(-1)
    yield _in_a_row(products.gather(-1, by_size), start)
    yield _in_a_row(products.gather(-1, by_size.flip(-1)), start)
    yield _pairwise(products) + start
    yield _in_lanes(products, 8) + start


def _in_a_row(terms: Tensor, start: Tensor) -> Tensor:
    total = start.expand(terms.shape[:-1]).clone()
    for term in terms.unbind(-1):
        total = total + term
    return total


def _fused(factors: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """Round after each multiplication and addition in one: exact enough in float64."""
    shape = torch.broadcast_shapes(factors.shape, weights.shape)
    pairs = zip(factors.expand(shape).unbind(-1), weights.expand(shape).unbind(-1), strict=True)
    total = start.expand(shape[:-1])
    for factor, weight in pairs:
        total = (factor.double() * weight.double() + total.double()).to(factors.dtype)
    return total


def _pairwise(terms: Tensor) -> Tensor:
    count = terms.shape[-1]
    if count == 1:
        return terms[..., 0]
    return _pairwise(terms[..., : count // 2]) + _pairwise(terms[..., count // 2 :])


def _in_lanes(terms: Tensor, lanes: int) -> Tensor:
    """Sum in several accumulators, as vector units do, and those in pairs."""
    padded = F.pad(terms, (0, -terms.shape[-1] % lanes))
    partial = padded.reshape(*terms.shape[:-1], -1, lanes).transpose(-1, -2)
    return _pairwise(_in_a_row(partial, torch.zeros_like(partial[..., 0])))


def _linear(op: ops.Linear, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    bias = x.new_zeros(()) if op.bias is None else op.bias
    yield from sums(x[..., None, :], op.weight, bias, draw)


def _conv(op: ops.Conv2d, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    assert op.groups == 1
    patches = F.unfold(x, op.weight.shape[2:], op.dilation, op.padding, op.stride)
    weights = op.weight.flatten(1)[None, :, None]
    bias = x.new_zeros(()) if op.bias is None else op.bias[:, None]
    shape = evaluate.RULES[ops.Conv2d](op, x).shape
    for found in sums(patches.transpose(1, 2)[:, None], weights, bias, draw):
        yield found.reshape(shape)


def _conv_transpose(op: ops.ConvTranspose2d, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    size = x[0].numel()
    units = torch.eye(size, dtype=x.dtype).view(size, *x.shape[1:])
    matrix = evaluate.RULES[ops.ConvTranspose2d](replace(op, bias=None), units)
    shape = matrix.shape[1:]
    bias = x.new_zeros(()) if op.bias is None else op.bias.repeat_interleave(shape[1:].numel())
    for found in sums(x.flatten(1)[:, None], matrix.flatten(1).T, bias, draw):
        yield found.reshape(len(x), *shape)


def _avg_pool(op: ops.AvgPool, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    channels = x.shape[1]
    patches = F.unfold(x, op.kernel, padding=op.padding, stride=op.stride)
    terms = patches.unflatten(1, (channels, -1)).transpose(2, 3)
    size, one = x.new_tensor(float(math.prod(op.kernel))), x.new_ones(())
    shape = evaluate.RULES[ops.AvgPool](op, x).shape
    for found in sums(terms, one.expand(terms.shape[-1]), x.new_zeros(()), draw):
        yield (found / size).reshape(shape)
        yield (found * (one / size)).reshape(shape)
    for found in sums(terms, (one / size).expand(terms.shape[-1]), x.new_zeros(()), draw):
        yield found.reshape(shape)


# --- other operations -------------------------------------------------------------------------


def _batch_norm(op: ops.BatchNorm, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    shape = (-1, *[1] * (x.dim() - 2))
    ones, zeros = torch.ones_like(op.mean), torch.zeros_like(op.mean)
    weight = (ones if op.weight is None else op.weight).view(shape)
    bias = (zeros if op.bias is None else op.bias).view(shape)
    mean, deviation = op.mean.view(shape), torch.sqrt(op.variance + op.epsilon).view(shape)
    factor = weight / deviation
    yield (x - mean) / deviation * weight + bias
    yield (x - mean) * (1 / deviation) * weight + bias
    yield (x - mean) * (1 / deviation * weight) + bias
    yield x * factor + (bias - mean * factor)
    yield (x.double() * factor.double() + (bias - mean * factor).double()).to(x.dtype)


def _shift(op: ops.Shift, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    offset = op.offset.to(x.dtype)
    yield x - offset if op.subtract else x + offset


def _scale(op: ops.Scale, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    factor = op.factor.to(x.dtype)
    yield x * (1 / factor) if op.divide else x * factor


def _sigmoid(op: ops.Sigmoid, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    yield 1 / (1 + torch.exp(-x))
    yield 0.5 * torch.tanh(0.5 * x) + 0.5
    yield torch.where(x < 0, 1 - 1 / (1 + torch.exp(x)), 1 / (1 + torch.exp(-x)))


def _tanh(op: ops.Tanh, x: Tensor, draw: Draw) -> Iterator[Tensor]:
    change = torch.expm1(-2 * x.abs())
    yield torch.where(x < 0, change, -change) / (change + 2)


_OTHERS: dict[type[ops.Op], Callable[..., Iterator[Tensor]]] = {
    ops.Linear: _linear,
    ops.Conv2d: _conv,
    ops.ConvTranspose2d: _conv_transpose,
    ops.AvgPool: _avg_pool,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.Sigmoid: _sigmoid,
    ops.Tanh: _tanh,
}
