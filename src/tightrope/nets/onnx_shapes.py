"""ONNX operators that only rearrange: reshapes, transposes, slices, padding, concatenation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tightrope.graph import ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx_builder import Builder, Call, Converter, Shape, Value, sample_shape


def _identity(build: Builder, call: Call) -> Value:
    return call.value()


def _dropout(build: Builder, call: Call) -> Value:
    training = call.constant(2)
    refuse(training is not None and bool(training), "training_mode")
    return call.value()


def _cast(build: Builder, call: Call) -> Value:
    same = {torch.float32: 1, torch.float64: 11}[build.dtype]  # numbers of `onnx.TensorProto`
    refuse(call.get("to", 0) != same, "a cast to another type")
    return call.value()


def _flatten(build: Builder, call: Call) -> Value:
    value = call.value()
    axis = int(call.get("axis", 1))
    axis = axis + len(value.shape) if axis < 0 else axis
    sizes = math.prod(value.shape[:axis]), math.prod(value.shape[axis:])
    return build.place(value.position, sizes)


def _reshape(build: Builder, call: Call) -> Value:
    value = call.value()
    target = call.integers(1, "shape")
    assert target is not None
    if not call.get("allowzero", 0):
        target = [value.shape[i] if size == 0 else size for i, size in enumerate(target)]
    if -1 in target:
        known = math.prod(size for size in target if size != -1)
        refuse(known == 0, f"reshape to {target}")
        target[target.index(-1)] = math.prod(value.shape) // known
    return build.place(value.position, tuple(target))


def _squeeze(build: Builder, call: Call) -> Value:
    value = call.value()
    rank = len(value.shape)
    axes = call.integers(1, "axes")
    ones = [axis for axis, size in enumerate(value.shape) if size == 1]
    dropped = ones if axes is None else [axis % rank for axis in axes]
    shape = tuple(size for axis, size in enumerate(value.shape) if axis not in dropped)
    return build.place(value.position, shape)


def _unsqueeze(build: Builder, call: Call) -> Value:
    value = call.value()
    axes = call.integers(1, "axes")
    assert axes is not None
    rank = len(value.shape) + len(axes)
    inserted = {axis % rank for axis in axes}
    sizes = iter(value.shape)
    shape = tuple(1 if axis in inserted else next(sizes) for axis in range(rank))
    return build.place(value.position, shape)


def _transpose(build: Builder, call: Call) -> Value:
    value = call.value()
    order = call.get("perm", range(len(value.shape))[::-1])
    return permute(build, value, [int(axis) for axis in order])


def permute(build: Builder, value: Value, order: Sequence[int]) -> Value:
    """Reorder the dimensions of an ONNX shape."""
    shape = tuple(value.shape[axis] for axis in order)
    moved = [axis for axis in order if value.shape[axis] != 1]
    if moved == sorted(moved):  # nothing but dimensions of size one changes its place
        return build.place(value.position, shape)
    if order[0] == 0 and value.shape[0] == 1:
        return build.apply(value, ops.Permute(tuple(order)), to=shape)
    position = build.at(value, value.shape)
    turned = build.append(ops.Permute((0, *(axis + 1 for axis in order))), position)
    return build.place(turned, shape)


def _pad(build: Builder, call: Call) -> Value:
    value = call.value()
    mode = call.get("mode", "constant")
    refuse(mode != "constant", f"mode={mode}")
    pads = call.integers(1, "pads")
    fill = call.constant(2, "value")
    rank = len(value.shape)
    axes = call.integers(3) or list(range(rank))
    assert pads is not None
    refuse(min(pads, default=0) < 0, "padding below zero")
    before, after = [0] * rank, [0] * rank
    for axis, low, high in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        before[axis], after[axis] = low, high
    if not any(pads):
        return value
    shape = tuple(b + s + a for b, s, a in zip(before, value.shape, after, strict=True))
    kept = len(sample_shape(value.shape))
    refuse(sum(shape[: rank - kept]) > rank - kept, "padding the batch dimension")
    sides: list[int] = []
    for axis in range(rank - 1, rank - kept - 1, -1):
        sides += [before[axis], after[axis]]
    number = 0.0 if fill is None else float(fill.reshape(()))
    refuse(not math.isfinite(number), f"padding with {number}")
    return build.apply(value, ops.Pad(tuple(sides), number), to=shape)


def _slice(build: Builder, call: Call) -> Value:
    value = call.value()
    starts, ends = call.integers(1, "starts"), call.integers(2, "ends")
    assert starts is not None and ends is not None
    axes = call.integers(3, "axes") or list(range(len(starts)))
    steps = call.integers(4) or [1] * len(starts)
    refuse(min(steps, default=1) < 1, "slices that run backwards")
    index = [slice(None)] * len(value.shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(*slice(start, end, step).indices(value.shape[axis]))
    return _indexed(build, value, index)


def _gather(build: Builder, call: Call) -> Value:
    value, indices = call.value(), call.constant(1)
    assert indices is not None
    axis = int(call.get("axis", 0)) % len(value.shape)
    index: list[slice | int] = [slice(None)] * len(value.shape)
    chosen = [int(i) % value.shape[axis] for i in indices.reshape(-1)]
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    even = step > 0 and chosen == list(range(chosen[0], chosen[-1] + 1, step))
    refuse(indices.ndim > 1 or not even, "a choice of elements that is no slice")
    index[axis] = slice(chosen[0], chosen[-1] + 1, step) if indices.ndim else chosen[0]
    return _indexed(build, value, index)


def _indexed(build: Builder, value: Value, index: Sequence[slice | int]) -> Value:
    shape = np.empty(value.shape, np.bool_)[tuple(index)].shape
    refuse(0 in shape, "a slice without elements")
    if shape == value.shape:
        return value
    kept = sample_shape(value.shape)
    if len(kept) < len(value.shape) and index[0] in (slice(None), slice(0, 1, 1)):
        return build.apply(value, ops.Slice(tuple(index[1:])), to=shape)
    position = build.at(value, value.shape)
    return build.place(build.append(ops.Slice(tuple(index)), position), shape)


def _concat(build: Builder, call: Call) -> Value:
    values = [given for given in call.inputs if isinstance(given, Value)]
    refuse(len(values) != len(call.inputs), "concatenation with a constant")
    rank = len(values[0].shape)
    axis = int(call.get("axis", 1)) % rank
    total = sum(value.shape[axis] for value in values)
    shape: Shape = (*values[0].shape[:axis], total, *values[0].shape[axis + 1 :])
    without_batch = axis > 0 and values[0].shape[0] == 1
    positions = [build.at(v, v.shape[1:] if without_batch else v.shape) for v in values]
    joined = build.append(ops.Concat(axis if without_batch else axis + 1), *positions)
    return build.place(joined, shape)


CONVERTERS: dict[str, Converter] = {
    "Identity": _identity,
    "Dropout": _dropout,
    "Cast": _cast,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Pad": _pad,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
}
