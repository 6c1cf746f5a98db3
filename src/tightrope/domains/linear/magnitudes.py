"""How large the terms of each operation can get: what rounding errors are measured by.

For every node, `|W| |x| + |b|` with |x| the largest values its inputs take on the box. Computed
coefficients times this bound the rounding errors of a backward pass
(`tightrope.domains.linear.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.curves import function_box
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map
from tightrope.precision import ROUNDING


class Magnitudes:
    """The magnitudes of a network's nodes, visited front to back; `terms` are by position."""

    def __init__(self, graph: Graph, box: Box) -> None:
        self.graph = graph
        self.values = {0: largest(box)}
        self.terms = dict(self.values)

    def visit(self, i: int) -> None:
        """Compute the terms of a node."""
        node = self.graph.nodes[i]
        self.terms[i] = RULES[type(node.op)](node.op, *(self.values[j] for j in node.inputs))
        self.values[i] = self.terms[i]

    def hold(self, i: int, box: Box) -> None:
        """Take note of bounds on a node: it hands on no more than they allow."""
        if isinstance(self.graph.nodes[i].op, ops.Function):  # of which nothing else is known
            self.terms[i] = largest(box)
        self.values[i] = torch.minimum(self.terms[i], largest(box))


def magnitudes(graph: Graph, boxes: Mapping[int, Box]) -> dict[int, Tensor]:
    """Return the terms of every node, [batch, *shape]; `boxes` holds at least the input's box."""
    found = Magnitudes(graph, boxes[0])
    for i in range(1, len(graph.nodes)):
        found.visit(i)
        if i in boxes:
            found.hold(i, boxes[i])
        elif isinstance(op := graph.nodes[i].op, ops.Function):
            before = boxes[graph.nodes[i].inputs[0]]
            found.hold(i, function_box(op, before, rounding=ROUNDING))
    return found.terms


def largest(box: Box) -> Tensor:
    """Return the largest absolute values in a box."""
    return torch.maximum(box.lower.abs(), box.upper.abs())


def _affine(op: Any, x: Tensor) -> Tensor:
    result: Tensor = POINT_RULES[type(op)](op.map_tensors(torch.abs), x)
    return result


def _batch_norm(op: ops.BatchNorm, x: Tensor) -> Tensor:
    shape = (-1,) + (1,) * (x.dim() - 2)
    factor, _ = batchnorm_map(op)
    bias = 0.0 if op.bias is None else op.bias.abs().view(shape)
    return (x + op.mean.abs().view(shape)) * factor.abs().view(shape) + bias


def _rearrange(op: Any, *xs: Tensor) -> Tensor:
    result: Tensor = POINT_RULES[type(op)](op, *xs)
    return result


def _reach(op: ops.Softmax, x: Tensor) -> Tensor:
    """A softmax is at most 1, its logarithm at most the widest difference and a logarithm."""
    widest = 2 * x.amax(-1, keepdim=True) + x.shape[-1]
    return widest.expand_as(x) if op.logarithm else torch.ones_like(x)


def _distance(op: ops.Distance, x: Tensor) -> Tensor:
    """No number is farther from a weight than the two absolute values together."""
    return (x.amax(1, keepdim=True) + op.weight.abs().amax(1)) * op.shares.abs().sum()


RULES: dict[type[ops.Op], Callable[..., Tensor]] = {
    ops.Linear: _affine,
    ops.Conv2d: _affine,
    ops.ConvTranspose2d: _affine,
    ops.BatchNorm: _batch_norm,
    ops.Shift: lambda op, x: x + op.offset.abs(),
    ops.Scale: lambda op, x: x / op.factor.abs() if op.divide else x * op.factor.abs(),
    ops.AvgPool: _rearrange,
    ops.MaxPool: _rearrange,
    ops.Reshape: _rearrange,
    ops.Permute: _rearrange,
    ops.Pad: lambda op, x: POINT_RULES[ops.Pad](ops.Pad(op.pads, abs(op.value)), x),
    ops.Slice: _rearrange,
    ops.Take: _rearrange,
    ops.Concat: _rearrange,
    ops.Add: lambda op, a, b: a + b,
    ops.Sub: lambda op, a, b: a + b,
    ops.Relu: _rearrange,
    ops.LeakyRelu: lambda op, x: x * max(1.0, op.slope),
    ops.Sigmoid: lambda op, x: torch.ones_like(x),
    ops.Tanh: lambda op, x: torch.ones_like(x),
    ops.Function: lambda op, x: torch.full_like(x, torch.inf),
    ops.Mul: _rearrange,
    ops.MatMul: _rearrange,
    ops.Differences: lambda op, x: x.unsqueeze(-2) + x.unsqueeze(-1),
    ops.Softmax: lambda op, x: _reach(op, x),
    ops.Standardize: lambda op, x: torch.full_like(x, x.shape[-1] ** 0.5),
    ops.Step: lambda op, x: x + 1,
    ops.Where: lambda op, c, a, b: torch.maximum(a, b),
    ops.ArgMax: lambda op, x: torch.full_like(x[..., 0], x.shape[-1]),
    ops.Distance: _distance,
}
