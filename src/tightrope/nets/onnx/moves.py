"""ONNX operators that copy numbers to other places.

Each is applied to the places of the numbers instead of the numbers: what comes out says where each
number of the result comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tightrope.graph.composed import taken
from tightrope.graph.values import refuse
from tightrope.limits import ONNX_TENSOR_ELEMENTS
from tightrope.nets.messages import short
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value, sample_shape
from tightrope.nets.onnx.dimensions import Shape

# Each is a place of eight bytes that is looked at many times.
MOST_COPIES = 1 << 23


def places(shape: Shape) -> Array:
    """Return the flat place of each number of a value."""
    return np.arange(math.prod(shape)).reshape(shape)


def moved(build: Builder, value: Value, index: Array) -> Value:
    """Append what brings numbers to other places: `index` holds the place that each comes from."""
    shape = tuple(index.shape)
    refuse(not index.size, "a result without elements")
    if index.size == math.prod(value.shape) and np.array_equal(
        index.reshape(-1), places((index.size,))
    ):
        return build.place(value.position, shape)
    flat = torch.from_numpy(np.array(index, dtype=np.int64).reshape(sample_shape(shape)))
    return build.place(taken(build, value.position, flat), shape)


def expanded(build: Builder, value: Value, shape: Shape) -> Value:
    """Append the copies that give a value a shape that its own broadcasts to."""
    if math.prod(shape) == math.prod(value.shape):
        return build.place(value.position, shape)
    check(build, shape)
    return moved(build, value, np.broadcast_to(places(value.shape), shape))


def check(build: Builder, shape: Shape) -> None:
    """Refuse what would be too large before anything of that size is made."""
    dimensions.check_rank(shape)
    count = ONNX_TENSOR_ELEMENTS.check(math.prod(shape), f"the result of {short(build.name)}")
    refuse(count > MOST_COPIES, f"copies to {count} places, more than {MOST_COPIES}")


def _expand(build: Builder, call: Call) -> Value:
    value, target = call.value(), call.integers(1)
    assert target is not None
    return expanded(build, value, dimensions.broadcast(value.shape, tuple(target)))


def _tile(build: Builder, call: Call) -> Value:
    value, repeats = call.value(), call.integers(1)
    assert repeats is not None and len(repeats) == len(value.shape)
    refuse(min(repeats, default=1) < 1, f"repeats={repeats}")
    check(build, tuple(s * r for s, r in zip(value.shape, repeats, strict=True)))
    return moved(build, value, np.tile(places(value.shape), repeats))


def gather(build: Builder, value: Value, indices: Array, axis: int) -> Value:
    """Append a choice of elements along an axis, in any order and number."""
    size = value.shape[axis]
    refuse(indices.dtype.kind not in "iu", f"indices of type {indices.dtype}")
    inside = bool(((indices >= -size) & (indices < size)).all())
    refuse(not inside, f"an index beyond the {size} elements of axis {axis}")
    check(build, (*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :]))
    return moved(build, value, np.take(places(value.shape), indices % size, axis))


def gather_elements(build: Builder, call: Call) -> Value:
    """An element along an axis for each place, at known places."""
    value, indices = call.value(), call.constant(1)
    assert indices is not None and indices.ndim == len(value.shape)
    refuse(indices.dtype.kind not in "iu", f"indices of type {indices.dtype}")
    axis = dimensions.axis_of(int(call.get("axis", 0)), len(value.shape))
    size = value.shape[axis]
    refuse(not bool(((indices >= -size) & (indices < size)).all()), "an index beyond the elements")
    others = zip(indices.shape, value.shape, strict=True)
    refuse(any(i > s for a, (i, s) in enumerate(others) if a != axis), "indices that do not fit")
    cut = tuple(slice(0, n) if a != axis else slice(None) for a, n in enumerate(indices.shape))
    return moved(build, value, np.take_along_axis(places(value.shape)[cut], indices % size, axis))


def gather_nd(build: Builder, call: Call) -> Value:
    """Elements by their known places along the first axes."""
    value, indices = call.value(), call.constant(1)
    assert indices is not None and indices.ndim
    refuse(indices.dtype.kind not in "iu", f"indices of type {indices.dtype}")
    refuse(bool(call.get("batch_dims", 0)), "batch_dims")
    depth = indices.shape[-1]
    refuse(not 0 < depth <= len(value.shape), f"indices of {depth} dimensions")
    sizes = np.array(value.shape[:depth])
    refuse(
        not bool(((indices >= -sizes) & (indices < sizes)).all()), "an index beyond the elements"
    )
    check(build, (*indices.shape[:-1], *value.shape[depth:]))
    return moved(build, value, places(value.shape)[tuple(np.moveaxis(indices % sizes, -1, 0))])


def split_sizes(call: Call, size: int, parts: int) -> list[int]:
    """Return the sizes that `Split` cuts an axis into."""
    given = call.integers(1, "split")
    if given is not None:
        refuse(sum(given) != size or min(given) < 1, f"a split of {size} into {given}")
        return given
    each = -(-size // parts)
    sizes = [min(each, size - i * each) for i in range(parts)]
    refuse(min(sizes) < 1, f"a split of {size} into {parts} parts")
    refuse(call.opset < 18 and size % parts != 0, f"a split of {size} into {parts} equal parts")
    return sizes


def _depth_to_space(build: Builder, call: Call) -> Value:
    value, block = call.value(), int(call.attributes["blocksize"])
    _, channels, height, width = _image(value)
    refuse(block < 1 or channels % (block * block) != 0, f"blocksize={block}")
    rest = channels // (block * block)
    mode = call.get("mode", "DCR")
    refuse(mode not in ("DCR", "CRD"), f"mode={mode}")
    deep = (block, block, rest) if mode == "DCR" else (rest, block, block)
    order = (2, 3, 0, 4, 1) if mode == "DCR" else (0, 3, 1, 4, 2)
    index = places(value.shape).reshape(*deep, height, width).transpose(order)
    return moved(build, value, index.reshape(1, rest, height * block, width * block))


def _space_to_depth(build: Builder, call: Call) -> Value:
    value, block = call.value(), int(call.attributes["blocksize"])
    _, channels, height, width = _image(value)
    refuse(block < 1 or height % block or width % block, f"blocksize={block}")  # type: ignore[arg-type]
    high, wide = height // block, width // block
    index = places(value.shape).reshape(channels, high, block, wide, block)
    index = index.transpose(2, 4, 0, 1, 3)
    return moved(build, value, index.reshape(1, channels * block * block, high, wide))


def _image(value: Value) -> Shape:
    shape = value.shape
    refuse(len(shape) != 4 or shape[0] != 1, f"an input of shape {shape}, expected (1, C, H, W)")
    return shape


_MODES = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}


def padded(
    build: Builder, value: Value, mode: str, before: Sequence[int], after: Sequence[int]
) -> Value:
    """Append a padding with numbers of the value itself."""
    refuse(mode not in _MODES, f"mode={mode}")
    for size, low, high in zip(value.shape, before, after, strict=True):
        refuse(
            mode != "edge" and max(low, high) >= size, f"mode={mode} with {[low, high]} of {size}"
        )
    widths = list(zip(before, after, strict=True))
    check(build, tuple(s + a + b for s, (a, b) in zip(value.shape, widths, strict=True)))
    return moved(build, value, np.pad(places(value.shape), widths, mode=_MODES[mode]))  # type: ignore[call-overload]


CONVERTERS: dict[str, Converter] = {
    "Expand": _expand,
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
}
