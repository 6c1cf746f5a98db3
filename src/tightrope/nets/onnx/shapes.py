"""ONNX operators that only rearrange: reshapes, transposes, slices, padding, concatenation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tightrope.graph import ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions, lookups, moves
from tightrope.nets.onnx.builder import Builder, Call, Converter, Value, sample_shape
from tightrope.nets.onnx.constants import slice_index


def _identity(build: Builder, call: Call) -> Value:
    return call.value()


def _dropout(build: Builder, call: Call) -> Value:
    training = call.constant(2)
    refuse(training is not None and bool(training), "training_mode")
    return call.value()


def _flatten(build: Builder, call: Call) -> Value:
    value = call.value()
    shape = dimensions.flattened(value.shape, int(call.get("axis", 1)))
    return build.place(value.position, shape)


def _reshape(build: Builder, call: Call) -> Value:
    value, target = call.value(), call.integers(1)
    assert target is not None
    shape = dimensions.reshaped(value.shape, target, bool(call.get("allowzero", 0)))
    return build.place(value.position, shape)


def _squeeze(build: Builder, call: Call) -> Value:
    value = call.value()
    shape = dimensions.squeezed(value.shape, call.integers(1, "axes"))
    return build.place(value.position, shape)


def _unsqueeze(build: Builder, call: Call) -> Value:
    value, axes = call.value(), call.integers(1, "axes")
    assert axes is not None
    return build.place(value.position, dimensions.unsqueezed(value.shape, axes))


def _transpose(build: Builder, call: Call) -> Value:
    value = call.value()
    order = call.get("perm", range(len(value.shape))[::-1])
    return permute(build, value, [int(axis) for axis in order])


def permute(build: Builder, value: Value, order: Sequence[int]) -> Value:
    """Reorder the dimensions of an ONNX shape."""
    shape = dimensions.permuted(value.shape, order)
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
    pads = call.integers(1, "pads")
    fill = call.constant(2, "value")
    assert pads is not None
    before, after = dimensions.padded(value.shape, pads, call.integers(3))
    if not any(pads):
        return value
    if mode != "constant":
        return moves.padded(build, value, mode, before, after)
    shape = tuple(b + s + a for b, s, a in zip(before, value.shape, after, strict=True))
    rank, kept = len(shape), len(sample_shape(value.shape))
    refuse(sum(shape[: rank - kept]) > rank - kept, "padding the batch dimension")
    sides: list[int] = []
    for axis in range(rank - 1, rank - kept - 1, -1):
        sides += [before[axis], after[axis]]
    number = 0.0 if fill is None else float(fill.reshape(()))
    refuse(not math.isfinite(number), f"padding with {number}")
    return build.apply(value, ops.Pad(tuple(sides), number), to=shape)


def _slice(build: Builder, call: Call) -> Value:
    value = call.value()
    index = slice_index(call, value.shape)
    refuse(any(part.step == 0 for part in index), "slices without a step")
    if any(part.step is not None and part.step < 0 for part in index):
        return moves.moved(build, value, moves.places(value.shape)[tuple(index)])
    inside = [slice(*s.indices(size)) for s, size in zip(index, value.shape, strict=True)]
    return _indexed(build, value, inside)


def _gather(build: Builder, call: Call) -> Value:
    data, where = call.inputs
    if isinstance(where, Value):
        assert data is not None
        axis = dimensions.axis_of(int(call.get("axis", 0)), len(data.shape))
        return lookups.gather(build, data, where, axis)
    value, indices = call.value(), call.constant(1)
    assert indices is not None
    axis = dimensions.axis_of(int(call.get("axis", 0)), len(value.shape))
    refuse(not indices.size, "a choice of no elements")
    if indices.ndim > 1 or indices.size > dimensions.MOST_PARTS:
        return moves.gather(build, value, indices, axis)
    chosen = [dimensions.axis_of(int(i), value.shape[axis]) for i in indices.reshape(-1)]
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step < 1 or chosen != list(range(chosen[0], chosen[-1] + 1, step)):
        return moves.gather(build, value, indices, axis)
    index: list[slice | int] = [slice(0, whole, 1) for whole in value.shape]
    index[axis] = slice(chosen[0], chosen[-1] + 1, step) if indices.ndim else chosen[0]
    return _indexed(build, value, index)


def _gather_elements(build: Builder, call: Call) -> Value:
    data, where = call.inputs
    if not isinstance(where, Value):
        return moves.gather_elements(build, call)
    assert data is not None
    axis = dimensions.axis_of(int(call.get("axis", 0)), len(data.shape))
    return lookups.gather_elements(build, data, where, axis)


def _gather_nd(build: Builder, call: Call) -> Value:
    data, where = call.inputs
    if not isinstance(where, Value):
        return moves.gather_nd(build, call)
    assert data is not None
    refuse(bool(call.get("batch_dims", 0)), "batch_dims")
    return lookups.gather_nd(build, data, where)


def _split(build: Builder, call: Call) -> list[Value]:
    value = call.value()
    axis = dimensions.axis_of(int(call.get("axis", 0)), len(value.shape))
    parts, end = [], 0
    for size in moves.split_sizes(call, value.shape[axis], call.results):
        index: list[slice | int] = [slice(0, whole, 1) for whole in value.shape]
        index[axis] = slice(end, end + size, 1)
        parts.append(_indexed(build, value, index))
        end += size
    refuse(len(parts) != call.results, f"{call.results} results of {len(parts)} parts")
    return parts


def _indexed(build: Builder, value: Value, index: Sequence[slice | int]) -> Value:
    shape = dimensions.indexed(value.shape, index)
    refuse(0 in shape, "a slice without elements")
    if shape == value.shape:
        return value
    kept = sample_shape(value.shape)
    if len(kept) < len(value.shape) and index[0] == slice(0, 1, 1):
        return build.apply(value, ops.Slice(tuple(index[1:])), to=shape)
    position = build.at(value, value.shape)
    return build.place(build.append(ops.Slice(tuple(index)), position), shape)


CONVERTERS: dict[str, Converter] = {
    "Identity": _identity,
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Pad": _pad,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
    **moves.CONVERTERS,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
}
