"""Numbers at places that depend on the input: gathered from there, or written there.

A place is a whole number. Each possible one is compared with it, one after the other, so that
bounds are those of the numbers at the places that are possible. Beyond the last place
onnxruntime computes nothing; here a number that is there is the result.
"""

from __future__ import annotations

import math

import numpy as np

from tightrope.graph import composed, ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions, moves
from tightrope.nets.onnx.aligning import aligned
from tightrope.nets.onnx.builder import Array, Builder, Value
from tightrope.nets.onnx.dimensions import Shape

MOST_CHOICES = 1024  # places of a number
MOST_COMPARISONS = 1 << 24  # of places with numbers, in one operator

Given = Value | Array


def gather(build: Builder, data: Given, places: Value, axis: int) -> Value:
    """Choose elements along an axis."""
    before, size, after = data.shape[:axis], data.shape[axis], data.shape[axis + 1 :]
    shape = (*before, *places.shape, *after)
    _check(places, size, shape)
    wide = (*[1] * len(before), *places.shape, *[1] * len(after))
    where = moves.expanded(build, _counted(build, places, size, wide), shape)
    part = (*before, *[1] * len(places.shape), *after)
    options = [_reshaped(build, _at(build, data, axis, k), part) for k in range(size)]
    return _chosen(build, where, options, shape)


def gather_elements(build: Builder, data: Given, places: Value, axis: int) -> Value:
    """Choose an element along an axis for each place of the others."""
    shape, size = places.shape, data.shape[axis]
    refuse(len(shape) != len(data.shape), "indices of other dimensions")
    others = zip(shape, data.shape, strict=True)
    refuse(any(i != s for a, (i, s) in enumerate(others) if a != axis), "indices that do not fit")
    _check(places, size, shape)
    where = _counted(build, places, size, shape)
    part = (*shape[:axis], 1, *shape[axis + 1 :])
    options = [_reshaped(build, _at(build, data, axis, k), part) for k in range(size)]
    return _chosen(build, where, options, shape)


def gather_nd(build: Builder, data: Given, places: Value) -> Value:
    """Choose elements by their places along the first axes."""
    rows, row = _rows(data.shape, places)
    found = gather(build, _reshaped(build, data, (rows, *row)), _flat(build, data, places), 0)
    return build.place(found.position, (*places.shape[:-1], *row))


def scatter_nd(build: Builder, data: Given, places: Value, updates: Given) -> Value:
    """Write rows at places along the first axes, one after the other."""
    rows, row = _rows(data.shape, places)
    count = math.prod(places.shape[:-1])
    refuse(updates.shape != (*places.shape[:-1], *row), "updates that do not fit")
    flat = _flat(build, data, places)
    whole = (rows, *row)
    new = _reshaped(build, updates, (count, *row))
    shape = tuple(data.shape)
    return _written(build, (data, shape), whole, (flat, new), 0)


def scatter_elements(
    build: Builder, data: Given, places: Value, updates: Given, axis: int
) -> Value:
    """Write elements at places along one axis, one after the other."""
    shape = tuple(data.shape)
    refuse(places.shape != updates.shape, "updates that do not fit")
    refuse(len(places.shape) != len(shape), "indices of other dimensions")
    others = zip(places.shape, shape, strict=True)
    refuse(any(i != s for a, (i, s) in enumerate(others) if a != axis), "indices that do not fit")
    where = _counted(build, places, shape[axis], places.shape)
    return _written(build, (data, shape), shape, (where, updates), axis)


def _written(
    build: Builder,
    data: tuple[Given, Shape],
    whole: Shape,
    new: tuple[Value, Given],
    axis: int,
) -> Value:
    """Write slices along an axis; `new` are their places (from zero on) and their numbers."""
    places, updates = new
    size, count = whole[axis], updates.shape[axis]
    refuse(count > MOST_CHOICES, f"{count} updates")
    refuse(count * math.prod(whole) > MOST_COMPARISONS, f"{count} updates of {whole}")
    mine = np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(whole))])
    one = tuple(1 if i == axis else s for i, s in enumerate(whole))
    found = _filled(build, data[0], places, whole)
    for k in range(count):
        where = _at(build, places, axis if len(places.shape) > 1 else 0, k)
        assert isinstance(where, Value)
        fits = one if len(places.shape) > 1 else (1,) * len(whole)
        here = moves.expanded(build, build.place(where.position, fits), whole)
        update = _filled(build, _reshaped(build, _at(build, updates, axis, k), one), places, whole)
        found = build.append(ops.Where(), _equal(build, here, mine), update, found)
    return build.place(found, data[1])


def _chosen(build: Builder, where: Value, options: list[Given], shape: Shape) -> Value:
    """Return, for each place, the number of the option that it counts.

    Which options come before it is asked, from the last one on: those that bounds exclude leave
    nothing behind.
    """
    found = _filled(build, options[-1], where, shape)
    for k in range(len(options) - 2, -1, -1):
        gap = _whole(build, _gap(build, where, np.array(k)))
        later = composed.shaped(build, build.append(ops.Step("positive"), gap), (math.prod(shape),))
        option = _filled(build, options[k], where, shape)
        found = build.append(ops.Where(), later, found, option)
    return build.place(found, shape)


def _gap(build: Builder, where: Value, numbers: Array) -> int:
    value, tensor = aligned(build, where, numbers)
    return build.append(ops.Shift(tensor, subtract=True), value.position)


def _equal(build: Builder, where: Value, numbers: Array) -> int:
    """Append a row of ones where a value is that number, and zeros elsewhere."""
    found = build.append(ops.Step("zero"), _whole(build, _gap(build, where, numbers)))
    return composed.shaped(build, found, (math.prod(where.shape),))


def _filled(build: Builder, given: Given, anchor: Value, shape: Shape) -> int:
    """Return a row that holds a value, or a constant, in a shape."""
    flat = (math.prod(shape),)
    if isinstance(given, Value):
        return build.at(moves.expanded(build, given, shape), flat)
    start = build.at(moves.moved(build, anchor, np.zeros(shape, dtype=np.int64)), flat)
    numbers = build.tensor(np.broadcast_to(given, shape).reshape(flat))
    return build.append(ops.Shift(numbers), composed.zeros_like(build, start))


def _counted(build: Builder, places: Value, size: int, shape: Shape) -> Value:
    """Return places counted from the front: those below zero count from the end."""
    build.partial = True
    start = _whole(build, places.position)
    behind = build.append(ops.Shift(build.number(float(size))), start)
    ahead = build.append(ops.Step("nonnegative"), start)
    return build.place(build.append(ops.Where(), ahead, start, _whole(build, behind)), shape)


def _whole(build: Builder, position: int) -> int:
    """Return a node of whole numbers whose bounds are whole, too, whatever was rounded."""
    return build.append(ops.Step("round"), position)


def _flat(build: Builder, data: Given, places: Value) -> Value:
    """Return places along several axes as places among all their rows."""
    depth = places.shape[-1]
    total = None
    for i, size in enumerate(data.shape[:depth]):
        part = _at(build, places, len(places.shape) - 1, i)
        assert isinstance(part, Value)
        count = (math.prod(places.shape[:-1]),)
        from_front = _counted(build, part, size, count)
        step = build.number(float(math.prod(data.shape[i + 1 : depth])))
        own = build.append(ops.Scale(step), build.at(from_front, count))
        total = own if total is None else build.append(ops.Add(), total, own)
    assert total is not None
    return build.place(_whole(build, total), (math.prod(places.shape[:-1]),))


def _rows(shape: Shape, places: Value) -> tuple[int, Shape]:
    depth = places.shape[-1] if places.shape else 0
    refuse(not 0 < depth <= len(shape), f"indices of {depth} dimensions")
    return math.prod(shape[:depth]), tuple(shape[depth:])


def _check(places: Value, size: int, shape: Shape) -> None:
    dimensions.check_rank(shape)
    refuse(size > MOST_CHOICES, f"a choice among {size} places that depends on the input")
    work = size * math.prod(shape)
    refuse(work > MOST_COMPARISONS, f"{math.prod(shape)} choices among {size} places")


def _at(build: Builder, given: Given, axis: int, k: int) -> Given:
    """Return what lies at one place along an axis, which stays."""
    if not isinstance(given, Value):
        return np.take(given, [k], axis)
    return moves.gather(build, given, np.array([k]), axis)


def _reshaped(build: Builder, given: Given, shape: Shape) -> Given:
    if not isinstance(given, Value):
        return given.reshape(shape)
    return build.place(given.position, shape)
