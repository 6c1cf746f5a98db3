"""ONNX operators with jumps: comparisons, logic, choices, rounding, casts, places of maxima."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tightrope.graph import composed, ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions, moves, writing
from tightrope.nets.onnx.aligning import aligned, together
from tightrope.nets.onnx.bends import bent
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value
from tightrope.nets.onnx.shapes import permute
from tightrope.nets.onnx.types import KINDS

# What a comparison asks of the first minus the second number (or the second minus the first).
_COMPARISONS = {
    "Greater": ("positive", False),
    "GreaterOrEqual": ("nonnegative", False),
    "Less": ("positive", True),
    "LessOrEqual": ("nonnegative", True),
    "Equal": ("zero", False),
}


def _difference(build: Builder, a: Value | Array, b: Value | Array) -> Value:
    if isinstance(a, Value) and isinstance(b, Value):
        shape, positions = together(build, a, b)
        return build.place(build.append(ops.Sub(), *positions), shape)
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    assert isinstance(value, Value) and not isinstance(constant, Value)
    value, tensor = aligned(build, value, constant)
    position = build.append(ops.Shift(tensor, subtract=True), value.position)
    if not isinstance(a, Value):
        position = composed.negated(build, position)
    return build.place(position, value.shape)


def _compare(build: Builder, call: Call) -> Value:
    a, b = call.inputs
    assert a is not None and b is not None
    kind, turned = _COMPARISONS[call.kind]
    gap = _difference(build, b, a) if turned else _difference(build, a, b)
    return build.apply(gap, ops.Step(kind))


def _not(build: Builder, call: Call) -> Value:
    value = call.value()
    return build.place(composed.opposite(build, value.position), value.shape)


def _logic(build: Builder, call: Call) -> Value:
    """The smaller, the larger one or the distance of two numbers that are 0 or 1."""
    values = [given for given in call.inputs if isinstance(given, Value)]
    constants = [
        given for given in call.inputs if given is not None and not isinstance(given, Value)
    ]
    if constants:
        limit = composed.at_most if call.kind == "And" else composed.at_least
        refuse(call.kind == "Xor", "with a constant")
        return bent(build, values[0], constants[0], limit)
    shape, positions = together(build, *values)
    if call.kind == "Xor":
        gap = build.append(ops.Sub(), *positions)
        return build.place(composed.absolute(build, gap), shape)
    both = composed.minimum if call.kind == "And" else composed.maximum
    return build.place(both(build, *positions), shape)


def _where(build: Builder, call: Call) -> Value:
    condition, a, b = call.inputs
    assert condition is not None and a is not None and b is not None
    if not isinstance(condition, Value):
        return writing.where(build, condition, a, b)
    shape = dimensions.broadcast(condition.shape, a.shape, b.shape)
    anchor = next(given for given in (condition, a, b) if isinstance(given, Value))
    positions = [_filled(build, given, anchor, shape) for given in (condition, a, b)]
    return build.place(build.append(ops.Where(), *positions), shape)


def _filled(build: Builder, given: Value | Array, anchor: Value, shape: tuple[int, ...]) -> int:
    """Return a node that holds a value, or a constant, in a shape: zero times anything, and it."""
    flat = (math.prod(shape),)
    if isinstance(given, Value):
        return build.at(moves.expanded(build, given, shape), flat)
    start = build.at(moves.expanded(build, anchor, shape), flat)
    zeros = build.append(ops.Scale(build.number(0.0)), start)
    numbers = build.tensor(np.broadcast_to(given, shape).reshape(flat))
    return build.append(ops.Shift(numbers), zeros)


def _step(kind: str) -> Converter:
    return lambda build, call: build.apply(call.value(), ops.Step(kind))


def _sign(build: Builder, call: Call) -> Value:
    value = call.value()
    above = build.append(ops.Step("positive"), value.position)
    below = build.append(ops.Step("positive"), composed.negated(build, value.position))
    return build.place(build.append(ops.Sub(), above, below), value.shape)


def _cast(build: Builder, call: Call) -> Value:
    value = call.value()
    target = int(call.get("to", 0))
    kind = KINDS.get(target)
    refuse(kind is None, "a cast to another type")
    refuse(kind == "f" and target != (1 if build.dtype.itemsize == 4 else 11), "another precision")
    if kind == "b" and value.kind != "b":
        zero = build.append(ops.Step("zero"), value.position)
        return build.place(composed.opposite(build, zero), value.shape)
    if kind == "i" and value.kind == "f":
        # Bounds of whole numbers hold more than these where something was rounded on the way.
        whole = _is_whole(build, value.position)
        return build.apply(value, ops.Step("round" if whole else "trunc"))
    return value


def _is_whole(build: Builder, position: int) -> bool:
    """Whether a node has whole numbers: rounded ones, with such constants, clipped or moved."""
    left, seen = [position], {position}
    while left:
        node = build.nodes[left.pop()]
        if isinstance(node.op, ops.Step):
            continue
        kept = isinstance(node.op, (*_MOVES, ops.Relu, ops.Add, ops.Sub))
        if not kept and not _has_whole_constant(node.op):
            return False
        left += [i for i in node.inputs if i not in seen]
        seen.update(node.inputs)
    return True


def _has_whole_constant(op: ops.Op) -> bool:
    if not isinstance(op, ops.Shift | ops.Scale) or (isinstance(op, ops.Scale) and op.divide):
        return False
    constant = op.offset if isinstance(op, ops.Shift) else op.factor
    return torch.equal(constant, constant.round())


def _cast_like(build: Builder, call: Call) -> Value:
    value, like = call.inputs
    assert value is not None and like is not None
    kind = like.kind if isinstance(like, Value) else like.dtype.kind
    refuse(not isinstance(value, Value) or kind not in "fib", "a cast of a constant")
    targets = {"f": 1 if build.dtype.itemsize == 4 else 11, "i": 7, "b": 9}
    return _cast(build, replace(call, inputs=(value,), attributes={"to": targets[kind]}))


def _hardmax(build: Builder, call: Call) -> Value:
    """One at the first of the largest numbers along an axis, zero elsewhere."""
    value = call.value()
    axis = dimensions.axis_of(int(call.get("axis", -1)), len(value.shape))
    refuse(call.opset < 13, "of several dimensions, before opset 13")
    place = _place(build, replace(call, kind="ArgMax", attributes={"axis": axis}))
    copies = moves.expanded(build, place, value.shape)
    ends = [-1 if i == axis else 1 for i in range(len(value.shape))]
    numbers = np.arange(value.shape[axis]).reshape(ends)
    return build.apply(_difference(build, copies, numbers), ops.Step("zero"))


def _place(build: Builder, call: Call) -> Value:
    """`ArgMax` and `ArgMin`; of two numbers the answer is in the sign of their difference."""
    value = call.value()
    rank = len(value.shape)
    axis = dimensions.axis_of(int(call.get("axis", 0)), rank)
    shape = dimensions.reduced(value.shape, [axis], bool(call.get("keepdims", 1)))
    last = bool(call.get("select_last_index", 0))
    order = [*(i for i in range(rank) if i != axis), axis]
    size = value.shape[axis]
    rows = math.prod(value.shape) // size
    turned = permute(build, _unsoftened(build, value, axis), order)
    position = build.at(turned, (rows, size))
    if call.kind == "ArgMin":
        position = composed.negated(build, position)
    if size != 2:
        return build.place(build.append(ops.ArgMax(last), position), shape)
    kind = ops.Step("nonnegative" if last else "positive")
    found = _gap_of_channels(build, position)
    if found is not None:
        gap, index = found
        return build.place(composed.taken(build, build.append(kind, gap), index), shape)
    first, second = (build.append(ops.Slice((slice(None), i)), position) for i in (0, 1))
    return build.place(build.append(kind, build.append(ops.Sub(), second, first)), shape)


def _gap_of_channels(build: Builder, position: int) -> tuple[int, Tensor] | None:
    """Write differences of two channels of an image as a convolution, which keeps it an image.

    Linear bounds of images take windows of them only. Also returns which pixel each difference is.
    """
    chain, base = _moves_before(build, position)
    shape = build.shape_of(base)
    if len(shape) != 3:
        return None
    places = composed.places(shape).double().unsqueeze(0)
    pairs = composed.replayed(chain, places)[0].long()
    pixel, channel = pairs % math.prod(shape[1:]), pairs // math.prod(shape[1:])
    alike = bool((pixel[:, 0] == pixel[:, 1]).all()) and bool((channel == channel[:1]).all())
    if not alike:
        return None
    weight = torch.zeros(1, shape[0], 1, 1, dtype=build.dtype)
    weight[0, channel[0, 0]] -= 1
    weight[0, channel[0, 1]] += 1
    gap = build.append(ops.Conv2d(weight, None, (1, 1), (0, 0), (1, 1), 1), base)
    return gap, pixel[:, 0]


def _moves_before(build: Builder, position: int) -> tuple[list[ops.Op], int]:
    """Return the operations that only moved numbers up to a node, in order, and of which node."""
    chain: list[ops.Op] = []
    while isinstance(build.nodes[position].op, _MOVES):
        chain.append(build.nodes[position].op)
        (position,) = build.nodes[position].inputs
    return chain[::-1], position


_MOVES = (ops.Permute, ops.Reshape, ops.Slice, ops.Take)


def _unsoftened(build: Builder, value: Value, axis: int) -> Value:
    """Return what a softmax was taken of, if the order along an axis is that of its inputs."""
    chain, position = _moves_before(build, value.position)
    node = build.nodes[position]
    if not isinstance(node.op, ops.Softmax):
        return value
    # Whose numbers are compared with each other? Those of one softmax, or there is no saying.
    rows = math.prod(node.shape[:-1])
    owners = composed.places((rows, 1)).double().expand(rows, node.shape[-1])
    found = composed.replayed(chain, owners.reshape(1, *node.shape))
    owner = found.reshape(value.shape).movedim(axis, -1)
    if not bool((owner == owner[..., :1]).all()):
        return value
    position = node.inputs[0]
    for op in chain:
        position = build.append(op, position)
    return Value(position, value.shape, value.kind)


def _one_hot(build: Builder, call: Call) -> Value:
    value, depth, values = call.value(), call.integers(1), call.constant(2)
    assert depth is not None and values is not None and values.size == 2
    count = depth[0]
    rank = len(value.shape) + 1
    axis = dimensions.axis_of(int(call.get("axis", -1)), rank)
    refuse(count < 1, f"depth={depth}")
    wide = (*value.shape[:axis], 1, *value.shape[axis:])
    shape = (*value.shape[:axis], count, *value.shape[axis:])
    copies = moves.expanded(build, build.place(value.position, wide), shape)
    numbers = np.arange(count).reshape(-1, *[1] * (rank - 1 - axis))
    # An index below zero counts from the end.
    inside = build.apply(_difference(build, copies, numbers), ops.Step("zero"))
    behind = build.apply(_difference(build, copies, numbers - count), ops.Step("zero"))
    hot = build.place(composed.maximum(build, inside.position, behind.position), shape)
    off, on = (values.reshape(-1)[i : i + 1] for i in (0, 1))
    if bool(off == 0) and bool(on == 1):
        return hot
    position = build.append(ops.Scale(build.tensor(on - off).reshape(())), hot.position)
    return build.place(build.append(ops.Shift(build.tensor(off).reshape(())), position), shape)


CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(_COMPARISONS, _compare),
    **dict.fromkeys(("And", "Or", "Xor"), _logic),
    "Not": _not,
    "Where": _where,
    "Sign": _sign,
    "Floor": _step("floor"),
    "Ceil": _step("ceil"),
    "Round": _step("round"),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Hardmax": _hardmax,
    "ArgMax": _place,
    "ArgMin": _place,
    "OneHot": _one_hot,
}
