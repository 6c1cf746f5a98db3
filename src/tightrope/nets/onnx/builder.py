"""From the nodes of an ONNX file to a `Graph`, one sample at a time.

ONNX shapes include the batch, here always of size 1; the graph's shapes do not. A sample has the
ONNX shape without its first dimension when that is 1 and not the only one, so files with, without
and with a transposed batch dimension are all the same to the converters. Values are reshaped only
when an operation needs their shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.graph import Graph, Node, evaluate, ops
from tightrope.graph.graph import prune
from tightrope.graph.values import refuse
from tightrope.graph.work import fan_in
from tightrope.nets.messages import one_line, short
from tightrope.nets.onnx.dimensions import Shape, Sizes, broadcast, check_rank

Array = np.ndarray[Any, Any]

MOST_INTEGERS = 64


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
    kind: str = "f"  # of its type, as numpy names them: f(loat), i(nteger), b(oolean)
    hidden: Array | None = None  # where it is minus infinity, which only a softmax may take


Argument = Value | Array | None


@dataclass(frozen=True)
class Call:
    """One ONNX node with its inputs in place."""

    kind: str
    name: str
    inputs: tuple[Argument, ...]
    attributes: dict[str, Any]
    opset: int
    results: int = 1

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
        """Return an optional constant as a list of a few integers: axes, sizes, positions."""
        found = self.constant(index, attribute)
        if found is None:
            return None
        refuse(found.size > MOST_INTEGERS, f"a list of {found.size} numbers")
        refuse(found.size > 0 and found.dtype.kind not in "iu", f"a list of {found.dtype}")
        return [int(i) for i in found.reshape(-1)]

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute."""
        return self.attributes.get(attribute, default)


@dataclass(frozen=True)
class Named:
    """An ONNX value that a position of a graph holds, perhaps in another shape."""

    name: str
    shape: Shape


# Which ONNX values the positions of a graph hold.
Held = dict[int, list[Named]]


class Builder:
    """Collects the graph's nodes.

    Several inputs are parts of one flat input of the graph, in their order.
    """

    def __init__(self, inputs: Mapping[str, Shape], dtype: torch.dtype, sizes: Sizes) -> None:
        self.dtype = dtype
        self.name = "input"
        self.sizes = sizes
        self.reshaped: dict[tuple[int, Shape], int] = {}
        self.held: Held = {}
        self.partial = False  # whether places depend on the input, which may not be there
        self.products: dict[str, Array] = {}  # of constants
        self.inputs: dict[str, Value] = {}
        total = sum(math.prod(shape) for shape in inputs.values())
        sizes.hold_value((total,), "the input")
        single = next(iter(inputs.values())) if len(inputs) == 1 else (total,)
        self.nodes = [Node("input", ops.Input(), (), sample_shape(single))]
        first = 0
        for name, shape in inputs.items():
            check_rank(shape)
            end = first + math.prod(shape)
            part = ops.Slice((slice(first, end),))
            position = 0 if len(inputs) == 1 else self.append(part, 0)
            self.inputs[name] = Value(position, shape)
            first = end

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
        """Append one operation and return its position; nothing is computed but its shape."""
        shapes = [self.nodes[i].shape for i in inputs]
        shape = _shape_of(op, shapes, self.dtype)
        self.sizes.hold_value(shape, f"the result of {short(self.name)}")
        self.sizes.multiply(math.prod(shape) * fan_in(op), short(self.name))
        self.nodes.append(Node(self.name, op, inputs, shape))
        return len(self.nodes) - 1

    def shape_of(self, position: int) -> Shape:
        """Return the shape of a node's samples."""
        return self.nodes[position].shape

    def number(self, value: float) -> Tensor:
        """Return a constant in the network's precision."""
        return torch.tensor(value, dtype=self.dtype)

    def place(self, position: int, shape: Shape) -> Value:
        """Return the node's result as a value of an ONNX shape."""
        if isinstance(self.nodes[position].op, ops.Reshape):  # of which nobody would know
            position = self.nodes[position].inputs[0]
        have = self.nodes[position].shape
        check_rank(shape)
        refuse(math.prod(have) != math.prod(shape), f"shape {have} where {shape} was expected")
        return Value(position, shape)

    def tensor(self, array: Array) -> Tensor:
        """Return a constant as a tensor of its own, exactly as stored; integers as floats."""
        if array.dtype.kind in "iub":
            floats = array.astype("float32" if self.dtype == torch.float32 else "float64")
            refuse(not np.array_equal(floats.astype(array.dtype), array), "very large integers")
            array = floats
        tensor = torch.from_numpy(np.array(array, order="C"))
        # A sum of numbers is a number, or overflows: then they are looked at one by one.
        finite = tensor.numel() == 0 or bool(torch.isfinite(tensor.sum()))
        refuse(not (finite or bool(torch.isfinite(tensor).all())), "infinite or NaN constants")
        refuse(tensor.dtype != self.dtype, f"constants of type {array.dtype}")
        return tensor

    def hold(self, value: Value, name: str) -> None:
        """Take note of the ONNX name of a value."""
        self.held.setdefault(value.position, []).append(Named(name, value.shape))

    def finish(self, outputs: Sequence[Value]) -> tuple[Graph, Held]:
        """Return the graph with one flat output, and what its positions hold."""
        ends = [self.at(output, (math.prod(output.shape),)) for output in outputs]
        end = ends[0] if len(ends) == 1 else self.append(ops.Concat(1), *ends)
        graph, places = prune(self.nodes, end)
        return graph, {places[i]: held for i, held in self.held.items() if i in places}


Converter = Callable[[Builder, Call], Value | list[Value]]

_KEEP_SHAPE = (
    *(ops.Relu, ops.LeakyRelu, ops.Sigmoid, ops.Tanh),
    *(ops.Function, ops.Softmax, ops.Standardize),
)


def _shape_of(op: ops.Op, shapes: Sequence[Shape], dtype: torch.dtype) -> Shape:
    """Return the shape of an operation's result without computing it."""
    first = shapes[0]
    if isinstance(op, _KEEP_SHAPE):
        return first
    if isinstance(op, ops.Linear):
        refuse(first[-1:] != op.weight.shape[1:], f"a layer of {op.weight.shape[1]} inputs")
        return (*first[:-1], len(op.weight))
    if isinstance(op, ops.Take):
        return tuple(op.index.shape)
    if isinstance(op, ops.Shift | ops.Scale):
        constant = op.offset if isinstance(op, ops.Shift) else op.factor
        fits = broadcast(first, tuple(constant.shape)) == first
        refuse(not fits, f"a constant of shape {tuple(constant.shape)} for samples of {first}")
        return first
    probes = [torch.empty(1, *shape, dtype=dtype, device="meta") for shape in shapes]
    try:
        result = evaluate.RULES[type(op)](op.map_tensors(lambda t: t.to("meta")), *probes)
    except (RuntimeError, IndexError) as error:
        raise NotImplementedError(one_line(error)) from None
    return tuple(result.shape[1:])


def fuse_biases(graph: Graph, held: Held) -> tuple[Graph, Held]:
    """Make a constant that is added to the result of a layer its bias; nothing is rounded.

    The layer then holds what the addition held. A graph without such additions is returned itself.
    """
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
            merged[before] = replace(layer, bias=bias)
            fused.add(i)
    if not fused:
        return graph, held
    after: Held = {}
    places: list[int] = []
    kept = 0
    for i, node in enumerate(graph.nodes):
        places.append(places[node.inputs[0]] if i in fused else kept)
        kept += i not in fused
        if i in held and i not in merged:
            after[places[i]] = held[i]
    return graph.replace_ops(merged).without(fused), after


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
