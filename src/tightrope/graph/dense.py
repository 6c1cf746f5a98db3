"""Small convolutions as matrices.

A convolution of few inputs and outputs is several times faster as one dense matrix when it is
applied to thousands of points, as latent attacks do. The matrix is a differentiable function of
the weights.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import evaluate, ops
from tightrope.graph.graph import Graph, Node, Rules

# A convolution with at most this many pairs of inputs and outputs is faster as one matrix.
DENSE_SIZE = 1 << 18


def dense_rules(graph: Graph) -> Rules:
    """Return the rules that evaluate `graph` on points, with small convolutions as matrices."""
    matrices = {}
    for node in graph.nodes:
        if isinstance(node.op, ops.Conv2d) and is_small(graph, node):
            shape = graph.nodes[node.inputs[0]].shape
            matrices[node.op] = (*convolution_matrix(node.op, shape), node.shape)
    if not matrices:
        return evaluate.RULES

    def convolve(op: ops.Conv2d, x: Tensor) -> Tensor:
        if op not in matrices:
            output: Tensor = evaluate.RULES[ops.Conv2d](op, x)
            return output
        matrix, bias, shape = matrices[op]
        return F.linear(x.flatten(1), matrix, bias).unflatten(1, shape)

    return {**evaluate.RULES, ops.Conv2d: convolve}


def is_small(graph: Graph, node: Node) -> bool:
    """Return whether a convolution is better a matrix."""
    return math.prod(node.shape) * math.prod(graph.nodes[node.inputs[0]].shape) <= DENSE_SIZE


def convolution_matrix(op: ops.Conv2d, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Return the matrix and the bias of a convolution of inputs of that shape."""
    geometry = (op.weight.shape[2:], op.stride, op.padding, op.dilation)
    row, column, tap, size = _entries(tuple(shape), op.weight.shape[0], op.groups, *geometry)
    weights = op.weight.flatten()[tap.to(op.weight.device)]
    place = (row * math.prod(shape) + column).to(op.weight.device)
    flat = weights.new_zeros(size * math.prod(shape)).scatter(0, place, weights)
    bias = None if op.bias is None else op.bias.repeat_interleave(size // op.weight.shape[0])
    return flat.view(size, -1), bias


@lru_cache(maxsize=64)
def _entries(
    shape: tuple[int, int, int],
    outputs: int,
    groups: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return row, column and weight number of each entry, and the number of rows."""
    channels, height, width = shape
    pixels = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
    taps = F.unfold(pixels, kernel, dilation, padding, stride)[0].long() - 1  # -1 is padding
    positions = taps.shape[1]
    inside = channels // groups
    output = torch.arange(outputs).view(-1, 1, 1, 1)
    channel = torch.arange(inside).view(1, -1, 1, 1)
    place = torch.arange(positions)
    tap = torch.arange(len(taps)).view(-1, 1)
    first = output // (outputs // groups) * inside  # of the output's group
    found = [
        output * positions + place + 0 * channel + 0 * tap,
        (first + channel) * (height * width) + taps,
        (output * inside + channel) * len(taps) + tap + 0 * place,
    ]
    exists = (taps >= 0).expand(outputs, inside, -1, -1)
    row, column, number = (t.expand_as(exists)[exists] for t in found)
    return row, column, number, outputs * positions
