"""ONNX operators that join values and constants, or write one into another at known places."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tightrope.graph import masks
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions, lookups, moves
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value, sample_shape


def concat(build: Builder, call: Call) -> Value:
    """Join values and constants along an axis."""
    given = [a for a in call.inputs if a is not None]
    refuse(len(given) != len(call.inputs), "an input that is left out")
    axis = dimensions.axis_of(int(call.attributes["axis"]), len(given[0].shape))
    given = [a for a in given if isinstance(a, Value) or a.size]
    shape = dimensions.concatenated([a.shape for a in given], axis)
    batched = axis > 0 and given[0].shape[0] == 1
    parts: list[int | torch.Tensor] = []
    for a in given:
        own = a.shape[1:] if batched else a.shape
        if isinstance(a, Value):
            parts.append(build.at(a, own))
        else:
            parts.append(build.tensor(a.reshape(own)))
    joined = masks.joined(build, parts, axis - 1 if batched else axis)
    return build.place(joined, shape)


def where(build: Builder, condition: Array, a: Value | Array, b: Value | Array) -> Value:
    """Choose by a condition that is known; minus infinity is left to a softmax."""
    shape = dimensions.broadcast(condition.shape, a.shape, b.shape)
    moves.check(build, shape)
    flags = np.broadcast_to(condition, shape).astype(bool)
    if isinstance(b, Value) and not isinstance(a, Value):
        flags, a, b = ~flags, b, a
    assert isinstance(a, Value)
    first = moves.expanded(build, a, shape)
    mask = torch.from_numpy(flags.copy())
    if isinstance(b, Value):
        second = moves.expanded(build, b, shape)
        places = torch.from_numpy(moves.places(shape))
        index = torch.where(mask, places, places + places.numel()).reshape(sample_shape(shape))
        parts = [first.position, second.position]
        return build.place(masks.picked(build, parts, index), shape)
    numbers = np.broadcast_to(b, shape)
    if bool((numbers == -math.inf).any()):
        refuse(bool((numbers[~flags] != -math.inf).any()), "minus infinity and other numbers")
        return replace(first, hidden=~flags)
    have = build.shape_of(first.position)
    other = build.tensor(np.where(flags, numbers.dtype.type(0), numbers)).reshape(have)
    return build.place(masks.kept(build, first.position, mask.reshape(have), other), shape)


def hidden_sum(build: Builder, value: Value, constant: Array) -> Value | None:
    """Return a value to which minus infinity is added at some places, and zero elsewhere."""
    below = constant == -math.inf
    if constant.dtype.kind != "f" or not bool(below.any()):
        return None
    refuse(bool((constant[~below] != 0).any()), "minus infinity among other numbers")
    shape = dimensions.broadcast(value.shape, constant.shape)
    moves.check(build, shape)
    wide = moves.expanded(build, value, shape)
    return replace(wide, hidden=np.broadcast_to(below, shape))


def softmax(build: Builder, value: Value, axis: int, *, logarithm: bool) -> Value:
    """Append a softmax without the numbers that are minus infinity."""
    refuse(axis != len(value.shape) - 1, "minus infinity, not along the last axis")
    assert value.hidden is not None
    rows = (math.prod(value.shape[:-1]), value.shape[-1])
    hidden = torch.from_numpy(np.array(value.hidden)).reshape(rows)
    start = build.at(value, rows)
    found = masks.masked_softmax(build, start, hidden, logarithm=logarithm)
    return build.place(found, value.shape)


def _written(index: Callable[[Call, Array, Array], Array]) -> Converter:
    """Return the converter of an operator that writes updates into data, at known places."""

    def convert(build: Builder, call: Call) -> Value:
        data, places, updates = call.inputs
        assert data is not None and places is not None and updates is not None
        refuse(call.get("reduction", "none") != "none", f"reduction={call.get('reduction', '')}")
        shape = data.shape
        if isinstance(places, Value):
            if index is _nd:
                return lookups.scatter_nd(build, data, places, updates)
            axis = dimensions.axis_of(int(call.get("axis", 0)), len(shape))
            return lookups.scatter_elements(build, data, places, updates, axis)
        total = math.prod(shape)
        own = moves.places(shape)
        labels = own if isinstance(data, Value) else -1 - own
        new = moves.places(updates.shape)
        more = math.prod(shape) if isinstance(data, Value) else 0
        if isinstance(updates, Value):
            new = new + more
        else:
            new = -1 - new - (0 if isinstance(data, Value) else total)
        found = index(replace(call, inputs=(labels, places, new)), labels, new)
        parts = [data, updates]
        values = [p.position for p in parts if isinstance(p, Value)]
        constants = [build.tensor(p) for p in parts if not isinstance(p, Value)]
        count = sum(math.prod(p.shape) for p in parts if isinstance(p, Value))
        flat = torch.from_numpy(np.where(found < 0, count - 1 - found, found))
        index_of = flat.reshape(sample_shape(shape))
        return build.place(masks.picked(build, [*values, *constants], index_of), shape)

    return convert


def _nd(call: Call, data: Array, updates: Array) -> Array:
    places = call.constant(1)
    assert places is not None
    depth = places.shape[-1]
    refuse(not 0 < depth <= data.ndim, f"indices of {depth} dimensions")
    sizes = np.array(data.shape[:depth])
    refuse(not bool(((places >= -sizes) & (places < sizes)).all()), "an index beyond the elements")
    found = data.copy()
    inside = places % sizes
    refuse(updates.shape != (*places.shape[:-1], *data.shape[depth:]), "updates that do not fit")
    rows = np.unique(inside.reshape(-1, depth), axis=0)
    refuse(len(rows) != inside.size // depth, "an index that is there twice")
    found[tuple(np.moveaxis(inside, -1, 0))] = updates
    return found


def _elements(call: Call, data: Array, updates: Array) -> Array:
    places = call.constant(1)
    assert places is not None and places.shape == updates.shape and places.ndim == data.ndim
    axis = dimensions.axis_of(int(call.get("axis", 0)), data.ndim)
    size = data.shape[axis]
    refuse(not bool(((places >= -size) & (places < size)).all()), "an index beyond the elements")
    inside = np.indices(places.shape)
    inside[axis] = places % size
    rows = np.unique(inside.reshape(data.ndim, -1), axis=1)
    refuse(rows.shape[1] != places.size, "an index that is there twice")
    found = data.copy()
    found[tuple(inside)] = updates
    return found


def _triangle(build: Builder, call: Call) -> Value:
    value = call.value()
    refuse(len(value.shape) < 2, f"an input of shape {value.shape}")
    diagonal = call.integers(1) or [0]
    cut = np.triu if call.get("upper", 1) else np.tril
    moves.check(build, value.shape)
    mask = np.broadcast_to(cut(np.ones(value.shape[-2:]), diagonal[0]) > 0, value.shape)
    have = build.shape_of(value.position)
    chosen = torch.from_numpy(mask.copy()).reshape(have)
    return build.place(masks.kept(build, value.position, chosen), value.shape)


CONVERTERS: dict[str, Converter] = {
    "Concat": concat,
    "ScatterND": _written(_nd),
    "ScatterElements": _written(_elements),
    "Scatter": _written(_elements),
    "Trilu": _triangle,
}
