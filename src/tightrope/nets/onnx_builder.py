"""From the nodes of an ONNX file to a `Graph`, one sample at a time.

ONNX shapes include the batch, here always of size 1; the graph's shapes do not. A sample has the
ONNX shape without its first dimension when that is 1 and not the only one, so files with, without
and with a transposed batch dimension are all the same to the converters. Values are reshaped only
when an operation needs their shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.graph import Graph, Node, evaluate, ops
from tightrope.graph.graph import prune
from tightrope.graph.values import refuse
from tightrope.nets.messages import one_line

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]


def sample_shape(shape: Shape) -> Shape:
    """Return the shape of one sample of an ONNX value."""
    if len(shape) > 1 and shape[0] == 1:
        return shape[1:]
    return shape or (1,)


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the input: the node that computes its numbers, its ONNX shape."""

    position: int
    shape: Shape


Argument = Value | Array | None


@dataclass(frozen=True)
class Call:
    """One ONNX node with its inputs in place."""

    kind: str
    name: str
    inputs: tuple[Argument, ...]
    attributes: dict[str, Any]
    opset: int

    def value(self, index: int = 0) -> Value:
        """Return an input that must depend on the network's input."""
        found = self.inputs[index]
        if not isinstance(found, Value):
            raise NotImplementedError(f"input {index} is a constant")
        return found

    def constant(self, index: int, attribute: str | None = None) -> Array | None:
        """Return an optional input that must be a constant, or the attribute it once was."""
        if attribute is not None and attribute in self.attributes:
            return np.asarray(self.attributes[attribute])
        found = self.inputs[index] if index < len(self.inputs) else None
        refuse(isinstance(found, Value), f"input {index} depends on the network's input")
        assert not isinstance(found, Value)
        return found

    def integers(self, index: int, attribute: str | None = None) -> list[int] | None:
        """Return an optional constant as a list of integers."""
        found = self.constant(index, attribute)
        return None if found is None else [int(i) for i in found.reshape(-1)]

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute."""
        return self.attributes.get(attribute, default)


class Builder:
    """Collects the graph's nodes."""

    def __init__(self, input_shape: Shape, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = "input"
        self.nodes = [Node("input", ops.Input(), (), sample_shape(input_shape))]
        self.reshaped: dict[tuple[int, Shape], int] = {}

    def apply(self, value: Value, *operations: ops.Op, to: Shape | None = None) -> Value:
        """Append operations on samples of their natural shape; `to` is the ONNX shape at the end.

        Without `to`, the operations are elementwise: any shape of the samples will do.
        """
        position = value.position if to is None else self.at(value, sample_shape(value.shape))
        for op in operations:
            position = self.append(op, position)
        return self.place(position, value.shape if to is None else to)

    def at(self, value: Value, shape: Shape) -> int:
        """Return the position of a node that holds the value's samples in the given shape."""
        position = value.position
        if self.nodes[position].shape == shape:
            return position
        if isinstance(self.nodes[position].op, ops.Reshape):
            position = self.nodes[position].inputs[0]
        if self.nodes[position].shape == shape:
            return position
        if (position, shape) not in self.reshaped:
            self.reshaped[position, shape] = self.append(ops.Reshape(shape), position)
        return self.reshaped[position, shape]

    def append(self, op: ops.Op, *inputs: int) -> int:
        """Append one operation and return its position; the shape is found by evaluation."""
        probes = [torch.zeros(1, *self.nodes[i].shape, dtype=self.dtype) for i in inputs]
        try:
            out = evaluate.RULES[type(op)](op, *probes)
        except (RuntimeError, IndexError) as error:
            raise NotImplementedError(one_line(error)) from None
        self.nodes.append(Node(self.name, op, inputs, tuple(out.shape[1:])))
        return len(self.nodes) - 1

    def place(self, position: int, shape: Shape) -> Value:
        """Return the node's result as a value of an ONNX shape."""
        have = self.nodes[position].shape
        refuse(math.prod(have) != math.prod(shape), f"shape {have} where {shape} was expected")
        return Value(position, shape)

    def tensor(self, array: Array) -> Tensor:
        """Return a constant as a tensor of its own, exactly as stored."""
        tensor = torch.from_numpy(np.array(array, order="C"))
        refuse(not bool(torch.isfinite(tensor).all()), "infinite or NaN constants")
        refuse(tensor.dtype != self.dtype, f"constants of type {array.dtype}")
        return tensor

    def finish(self, output: Value) -> Graph:
        """Return the graph with a flat output."""
        end = self.at(output, (math.prod(output.shape),))
        return _fuse_biases(prune(self.nodes, end))


Converter = Callable[[Builder, Call], Value]


def _fuse_biases(graph: Graph) -> Graph:
    """Make a constant that is added to the result of a layer its bias; nothing is rounded."""
    readers = graph.consumers()
    merged: dict[int, ops.Op] = {}
    fused = set()
    for i, node in enumerate(graph.nodes):
        if not isinstance(node.op, ops.Shift):
            continue
        before = node.inputs[0]
        layer = graph.nodes[before].op
        bias = _as_bias(node.op, graph.nodes[before])
        if bias is not None and len(readers[before]) == 1:
            assert isinstance(layer, ops.Linear | ops.Conv2d)
            fields = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
            merged[before] = type(layer)(**{**fields, "bias": bias})
            fused.add(i)
    return graph.replace_ops(merged).without(fused)


def _as_bias(shift: ops.Shift, layer: Node) -> Tensor | None:
    """Return the shift as one number per feature or channel, if that is what it is."""
    op = layer.op
    if not isinstance(op, ops.Linear | ops.Conv2d) or op.bias is not None:
        return None
    size = len(op.weight)
    if shift.offset.numel() == 1:
        offset = shift.offset.reshape(1).repeat(size)
        return -offset if shift.subtract else offset
    kept = (size, 1, 1) if isinstance(op, ops.Conv2d) else (size,)
    shape = tuple(shift.offset.shape)
    while len(shape) > len(kept) and shape[0] == 1:
        shape = shape[1:]
    if shape != kept:
        return None
    offset = shift.offset.reshape(size)
    return -offset if shift.subtract else offset
