"""ONNX operators that enlarge images: transposed convolutions and resizing.

Where the specification and onnxruntime differ, or a version of one from another, they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tightrope.graph import composed, ops
from tightrope.graph.values import refuse
from tightrope.limits import ONNX_TENSOR_ELEMENTS
from tightrope.nets.messages import short
from tightrope.nets.onnx import moves
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value
from tightrope.nets.onnx.windows import of_any_rank

# --- transposed convolutions ----------------------------------------------------------------


def _sizes(call: Call, attribute: str, default: int) -> ops.Pair:
    height, width = call.get(attribute, (default, default))
    refuse(min(height, width) < default, f"{attribute}={[height, width]}")
    return int(height), int(width)


def _conv_transpose(build: Builder, call: Call) -> Value:
    value, weight, bias = call.value(), call.constant(1), call.constant(2)
    assert weight is not None
    shape = value.shape
    refuse(len(shape) != 4 or shape[0] != 1, f"an input of shape {shape}, expected (1, C, H, W)")
    refuse(weight.ndim != 4, f"a weight of shape {weight.shape}")
    kernel = call.get("kernel_shape", weight.shape[2:])
    refuse(tuple(kernel) != weight.shape[2:], "a kernel_shape that is not the kernel's")
    strides, dilations = _sizes(call, "strides", 1), _sizes(call, "dilations", 1)
    extra = _sizes(call, "output_padding", 0)
    sizes = zip(shape[2:], weight.shape[2:], strides, dilations, extra, strict=True)
    full = [(n - 1) * s + d * (k - 1) + 1 + e for n, k, s, d, e in sizes]
    low, high = _cut(call, full, [n * s for n, s in zip(shape[2:], strides, strict=True)])
    after = [size - a - b for size, a, b in zip(full, low, high, strict=True)]
    refuse(min(after) < 1, f"outputs of size {after}")
    whole = math.prod(full) * weight.shape[1] * int(call.get("group", 1))
    ONNX_TENSOR_ELEMENTS.check(whole, f"the result of {short(build.name)} before it is cut")
    inside = (min(low[0], high[0]), min(low[1], high[1]))
    operations = composed.transposed(
        build.tensor(weight),
        None if bias is None else build.tensor(bias),
        strides,
        inside,
        extra,
        dilations,
        int(call.get("group", 1)),
    )
    top, left = low[0] - inside[0], low[1] - inside[1]
    cut = ops.Slice((slice(None), slice(top, top + after[0]), slice(left, left + after[1])))
    more = (cut,) if list(low) != list(high) else ()
    channels = weight.shape[1] * int(call.get("group", 1))
    return build.apply(value, *operations, *more, to=(1, channels, *after))


def _cut(call: Call, full: Sequence[int], same: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return how much is cut off before and after, by `pads`, `output_shape` or `auto_pad`."""
    mode = call.get("auto_pad", "NOTSET") or "NOTSET"
    refuse(mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"), f"auto_pad={mode}")
    wanted = call.get("output_shape", None)
    if wanted is None and mode in ("NOTSET", "VALID"):
        pads = [int(p) for p in call.get("pads", (0, 0, 0, 0))]
        refuse(len(pads) != 4 or min(pads) < 0, f"pads={pads}")
        refuse(mode == "VALID" and any(pads), "both auto_pad and pads")
        return pads[:2], pads[2:]
    target = same if wanted is None else [int(size) for size in wanted[-2:]]
    total = [size - size_after for size, size_after in zip(full, target, strict=True)]
    refuse(min(total) < 0, f"outputs of {list(target)}, more than {list(full)}")
    # On which side the odd one is depends on the version.
    refuse(any(t % 2 for t in total), f"an odd number of rows or columns to cut: {total}")
    return [t // 2 for t in total], [t // 2 for t in total]


# --- resizing -------------------------------------------------------------------------------


def _resize(build: Builder, call: Call) -> Value:
    value = call.value()
    rank = len(value.shape)
    old = call.opset < 11
    mode = call.get("mode", "nearest")
    transform = "asymmetric" if old else call.get("coordinate_transformation_mode", "half_pixel")
    for name, usual in (("antialias", 0), ("exclude_outside", 0), ("axes", None)):
        refuse(call.get(name, usual) != usual, name)
    policy = call.get("keep_aspect_ratio_policy", "stretch")
    refuse(policy != "stretch", f"keep_aspect_ratio_policy={policy}")
    scales = call.constant(1, "scales") if old else call.constant(2)
    sizes = None if old else call.integers(3)
    if sizes:
        refuse(len(sizes) != rank, f"{len(sizes)} sizes")
        after = sizes
        steps = [np.float32(a) / np.float32(b) for a, b in zip(after, value.shape, strict=True)]
    else:
        assert scales is not None
        refuse(scales.size != rank or not bool((scales > 0).all()), f"scales {scales}")
        steps = [np.float32(scale) for scale in scales.reshape(-1)]
        after = [int(np.floor(np.float32(n) * s)) for n, s in zip(value.shape, steps, strict=True)]
    refuse(min(after) < 1, f"a result of shape {after}")
    moves.check(build, tuple(after))
    coordinates = [
        _coordinates(transform, *sides) for sides in zip(value.shape, after, steps, strict=True)
    ]
    if mode == "nearest":
        rounding = "floor" if old else call.get("nearest_mode", "round_prefer_floor")
        index = [_nearest(c, n, rounding) for c, n in zip(coordinates, value.shape, strict=True)]
        return moves.moved(build, value, moves.places(value.shape)[np.ix_(*index)])
    refuse(mode != "linear", f"mode={mode}")
    position = build.at(value, value.shape)
    for axis, (place, size) in enumerate(zip(coordinates, value.shape, strict=True)):
        if after[axis] != size or steps[axis] != 1:
            position = composed.along(build, position, axis, _shares(build, place, size))
    return build.place(position, tuple(after))


def _coordinates(transform: str, before: int, after: int, scale: np.float32) -> Array:
    """Return where the numbers of the result lie among those of the input, along one axis."""
    place = np.arange(after, dtype=np.float32)
    half = np.float32(0.5)
    if before == after and scale == 1:
        return place
    if transform == "pytorch_half_pixel" and after == 1:
        return np.zeros(1, np.float32)
    if transform in ("half_pixel", "pytorch_half_pixel"):
        return np.asarray((place + half) / scale - half)
    if transform == "asymmetric":
        return np.asarray(place / scale)
    refuse(transform != "align_corners", f"coordinate_transformation_mode={transform}")
    if after == 1:
        return np.zeros(1, np.float32)
    return np.asarray(place * np.float32(before - 1) / np.float32(after - 1))


def _nearest(place: Array, size: int, rounding: str) -> Array:
    rules: dict[str, Callable[[Array], Array]] = {
        "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
        "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    refuse(rounding not in rules, f"nearest_mode={rounding}")
    return np.asarray(rules[rounding](place).clip(0, size - 1).astype(np.int64))


def _shares(build: Builder, place: Array, size: int) -> torch.Tensor:
    """Return the matrix of interpolation between neighbours."""
    inside = place.clip(0, np.float32(size - 1))
    first = np.floor(inside).astype(np.int64)
    second = np.minimum(first + 1, size - 1)
    share = (inside - first.astype(np.float32)).astype(np.float32)
    matrix = np.zeros((len(place), size), np.float32)
    rows = np.arange(len(place))
    np.add.at(matrix, (rows, first), np.float32(1) - share)
    np.add.at(matrix, (rows, second), share)
    return torch.from_numpy(matrix).to(build.dtype)


CONVERTERS: dict[str, Converter] = {
    "ConvTranspose": of_any_rank(_conv_transpose),
    "Resize": _resize,
    "Upsample": _resize,
}
