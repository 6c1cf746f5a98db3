"""Softmax and standardisation written with functions and products, for bounds.

As operations of their own they are compared with what a network computes, in forms that do not
overflow; bounds are those of what they are made of. All of it is exact in real arithmetic:

- softmax is `1 / sum_j exp(x_j - x_i)`, and its logarithm minus the logarithm of that sum, which is
  at least 1;
- deviations from the mean times `(variance + epsilon)^(-1/2)`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tightrope.graph import evaluate, ops
from tightrope.graph.graph import Graph, Node

COMPOSED = (ops.Softmax, ops.Standardize)


def lowered(graph: Graph, dtype: torch.dtype) -> Graph:
    """Return the same network, of that precision, without compositions."""
    if not any(isinstance(node.op, COMPOSED) for node in graph.nodes):
        return graph
    held = next((t for node in graph.nodes for t in _tensors(node.op)), torch.empty(()))
    writer = _Writer(torch.empty((), dtype=dtype, device=held.device))
    for i, node in enumerate(graph.nodes):
        inputs = tuple(writer.target[j] for j in node.inputs)
        writer.name = node.name
        if isinstance(node.op, ops.Softmax):
            writer.target[i] = writer.softmax(node.op, inputs[0])
        elif isinstance(node.op, ops.Standardize):
            writer.target[i] = writer.standardize(node.op, inputs[0])
        else:
            writer.nodes.append(replace(node, inputs=inputs))
            writer.target[i] = len(writer.nodes) - 1
    return Graph(tuple(writer.nodes))


def lowered_op(op: ops.Op, shape: tuple[int, ...], like: Tensor) -> Graph:
    """Return one composition as a network of its own."""
    writer = _Writer(like)
    writer.nodes.append(Node("input", ops.Input(), (), shape))
    if isinstance(op, ops.Softmax):
        writer.softmax(op, 0)
    else:
        assert isinstance(op, ops.Standardize)
        writer.standardize(op, 0)
    return Graph(tuple(writer.nodes))


def _tensors(op: ops.Op) -> list[Tensor]:
    return [value for value in vars(op).values() if isinstance(value, Tensor)]


class _Writer:
    """The new network in the making; `target` maps old positions to new ones."""

    def __init__(self, like: Tensor) -> None:
        self.nodes: list[Node] = []
        self.target: dict[int, int] = {}
        self.name, self.like = "", like

    def append(self, op: ops.Op, *inputs: int) -> int:
        probes = [torch.empty(1, *self.nodes[j].shape, device="meta") for j in inputs]
        rule = evaluate.RULES[type(op)]
        shape = rule(op.map_tensors(lambda t: t.to("meta", torch.float32)), *probes).shape[1:]
        self.nodes.append(Node(self.name, op, inputs, tuple(shape)))
        return len(self.nodes) - 1

    def chain(self, start: int, *operations: ops.Op) -> int:
        for op in operations:
            start = self.append(op, start)
        return start

    def ones(self, *size: int) -> ops.Linear:
        return ops.Linear(self.like.new_ones(size), None)

    def softmax(self, op: ops.Softmax, x: int) -> int:
        shape = self.nodes[x].shape
        total = self.chain(
            self.chain(x, ops.Differences(), ops.Function("exp")),
            self.ones(1, shape[-1]),
            ops.Reshape(shape),
        )
        if op.logarithm:
            minus = ops.Scale(self.like.new_tensor(-1.0))
            return self.chain(total, ops.Function("log", least=1.0), minus)
        return self.append(ops.Function("reciprocal", least=1.0), total)

    def standardize(self, op: ops.Standardize, x: int) -> int:
        size = self.nodes[x].shape[-1]
        count = ops.Scale(self.like.new_tensor(float(size)), divide=True)
        if op.center:
            mean = self.chain(x, self.ones(1, size), count, self.ones(size, 1))
            x = self.append(ops.Sub(), x, mean)
        squares = self.chain(x, ops.Function("power", (2.0,)), self.ones(1, size), count)
        shift = ops.Shift(torch.tensor(op.epsilon, dtype=torch.float64, device=self.like.device))
        root = ops.Function("power", (-0.5,), least=op.epsilon)
        # The squares of all of them add up to no more than their number.
        limit = math.sqrt(size) * (1 + 1e-12)
        return self.append(ops.Mul(limit), x, self.chain(squares, shift, root))


def without_softmax(graph: Graph, *, logarithms_only: bool = False) -> Graph:
    """Return a network without the softmax of all its outputs at its end, if it has one.

    The order of the outputs stays the same; with `logarithms_only`, their differences do.
    """
    last = len(graph.nodes) - 1
    while isinstance(graph.nodes[last].op, ops.Reshape):
        last = graph.nodes[last].inputs[0]
    node = graph.nodes[last]
    if not isinstance(node.op, ops.Softmax) or math.prod(node.shape) != node.shape[-1]:
        return graph
    return graph if logarithms_only and not node.op.logarithm else graph.without({last})
