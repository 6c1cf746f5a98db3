"""Networks as attacks see them: only the points have gradients.

Attacks spend their time on gradients with respect to points. For a convolution of very few
input channels (the first one), the library's backward pass is several times slower than its
forward pass; the same gradient is a convolution with rearranged weights followed by a pixel
shuffle, and costs as little as the forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks.kernels.small import small_network
from tightrope.attacks.pgd import Network
from tightrope.deadline import check_time
from tightrope.graph import Graph, evaluate, ops
from tightrope.graph.dense import convolution_matrix, multiply, pays
from tightrope.graph.graph import Rules
from tightrope.graph.windows import sharing
from tightrope.precision import search_type

# Above this many input channels the library's own backward pass is the faster one.
FEW_CHANNELS = 4


def for_points(graph: Graph) -> Network:
    """Return the network cut off from its parameters, made ready for many gradients."""
    small = small_network(graph.detach())
    graph, rules = prepare(graph)
    last = len(graph.nodes) - 1

    @cache
    def shortened(kind: torch.dtype) -> tuple[Graph, Rules]:
        return prepare(graph.to(kind))

    def network(points: Tensor) -> Tensor:
        check_time()
        kind = search_type(points)
        if kind != points.dtype:
            short, others = shortened(kind)
            found: Tensor = short.propagate(others, points.to(kind))[last]
            return found.to(points.dtype)
        if small is not None and small.suits(points):
            return small(points)
        output: Tensor = graph.propagate(rules, points)[last]
        return output

    return network


def prepare(graph: Graph) -> tuple[Graph, Rules]:
    """Return the network cut off from its parameters, and rules that are fast to differentiate.

    Values flattened before a linear layer have their channels last; other values are the same.
    """
    graph, flattened = flatten_in_memory_order(graph.detach())
    kernels = {
        node.op: _backward_kernel(node.op)
        for node in graph.nodes
        if isinstance(node.op, ops.Conv2d) and _has_few_channels(node.op)
    }

    def reshape(op: ops.Reshape, x: Tensor) -> Tensor:
        if op in flattened:
            return x.permute(0, 2, 3, 1).flatten(1)
        output: Tensor = _Reshape.apply(x, op.shape)
        return output

    # The weights stay the same, so each matrix is made once.
    matrix = cache(convolution_matrix)

    def convolve(op: ops.Conv2d, x: Tensor) -> Tensor:
        if pays(op, x):
            return multiply(op, x, *matrix(op, tuple(x.shape[1:])))
        if op not in kernels or not torch.is_grad_enabled():
            result: Tensor = evaluate.RULES[ops.Conv2d](op, x)
            return result
        output: Tensor = _Convolution.apply(x, op, kernels[op])
        return output

    return graph, {**evaluate.RULES, ops.Conv2d: convolve, ops.Reshape: reshape}


def flatten_in_memory_order(graph: Graph) -> tuple[Graph, set[ops.Op]]:
    """Let flattened images keep their channels last, and reorder the layer behind to suit.

    Convolutions leave channels last in memory; to flatten them first would copy every image,
    forth and back. Returns the graph and the flattening operations.
    """
    readers = graph.consumers()
    reordered: dict[int, ops.Op] = {}
    flattened: set[ops.Op] = set()
    for i, node in enumerate(graph.nodes):
        if not isinstance(node.op, ops.Reshape) or len(readers[i]) != 1 or len(node.shape) != 1:
            continue
        before, behind = graph.nodes[node.inputs[0]].shape, graph.nodes[readers[i][0]].op
        if len(before) == 3 and isinstance(behind, ops.Linear):
            weight = behind.weight.unflatten(1, before).permute(0, 2, 3, 1).flatten(1)
            reordered[readers[i][0]] = replace(behind, weight=weight)
            flattened.add(node.op)
    return graph.replace_ops(reordered), flattened


def _has_few_channels(op: ops.Conv2d) -> bool:
    plain = op.groups == 1 and op.dilation == (1, 1)
    square = op.stride[0] == op.stride[1] and op.weight.shape[2] == op.weight.shape[3]
    return plain and square and op.weight.shape[1] <= FEW_CHANNELS


def _backward_kernel(op: ops.Conv2d) -> Tensor:
    """Rearrange the weights of a stride-s convolution into those of its gradient.

    Input pixel `t = s q + r` (in the padded image) receives the output gradients at `q - a`
    through the taps `s a + r`: for each phase r a small convolution with stride one, all of
    them stacked as channels that a pixel shuffle interleaves.
    """
    stride = op.stride[0]
    outputs, inputs, size, _ = op.weight.shape
    taps = sharing(size, stride)
    missing = taps * stride - size
    weight = F.pad(op.weight, (0, missing, 0, missing))
    phases = weight.reshape(outputs, inputs, taps, stride, taps, stride).flip(2, 4)
    kernel = phases.permute(1, 3, 5, 0, 2, 4).reshape(inputs * stride**2, outputs, taps, taps)
    return kernel.contiguous(memory_format=torch.channels_last)


class _Reshape(torch.autograd.Function):
    """A reshape whose gradient has the memory order of its input: mixing orders is slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        ctx.channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return x.reshape(x.shape[0], *shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].reshape(ctx.shape)
        if ctx.channels_last:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        return gradient, None


class _Convolution(torch.autograd.Function):
    """A convolution whose backward pass computes the gradient of the points only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: ops.Conv2d, kernel: Tensor) -> Tensor:
        ctx.op, ctx.kernel, ctx.size = op, kernel, x.shape[-2:]
        result: Tensor = evaluate.RULES[ops.Conv2d](op, x)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        stride, (top, left) = ctx.op.stride[0], ctx.op.padding
        height, width = ctx.size
        gradient = F.conv2d(grads[0], ctx.kernel, padding=ctx.kernel.shape[-1] - 1)
        padded = F.pixel_shuffle(gradient, stride) if stride > 1 else gradient
        inner = padded[..., top : top + height, left : left + width]
        # Pixels that no window reaches have no gradient.
        missing = (0, width - inner.shape[-1], 0, height - inner.shape[-2])
        return (F.pad(inner, missing) if any(missing) else inner), None, None
