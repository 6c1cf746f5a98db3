"""Small convolutions as matrices.

A convolution of few inputs and outputs is several times faster as one dense matrix when it is
applied to thousands of points, as latent attacks do. The matrix is a differentiable function of
the weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import evaluate, ops
from tightrope.graph.graph import Graph, Node, Rules

# A convolution with at most this many pairs of inputs and outputs is faster as one matrix.
DENSE_SIZE = 1 << 16


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
    size = math.prod(shape)
    inputs = torch.eye(size, dtype=op.weight.dtype, device=op.weight.device)
    columns = evaluate.RULES[ops.Conv2d](replace(op, bias=None), inputs.view(size, *shape))
    bias = None
    if op.bias is not None:
        bias = op.bias.repeat_interleave(math.prod(columns.shape[2:]))
    return columns.flatten(1).T.contiguous(), bias
