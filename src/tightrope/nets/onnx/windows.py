"""ONNX operators that slide a window over an image: convolution and pooling.

Where windows lie follows the ONNX specification. Options with which onnxruntime and the
specification, or its reference implementation, disagree are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from tightrope.graph import ops
from tightrope.graph.values import refuse
from tightrope.graph.volumes import convolved
from tightrope.graph.windows import Side
from tightrope.limits import ONNX_TENSOR_ELEMENTS
from tightrope.nets.messages import short
from tightrope.nets.onnx import moves
from tightrope.nets.onnx.builder import Argument, Builder, Call, Converter, Value, sample_shape
from tightrope.nets.onnx.dimensions import Shape

_Padding = tuple[int, int, int, int]  # left, right, top, bottom, as in `ops.Pad`
_SAME = ("SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class _Windows:
    """Where the windows of an operator lie."""

    kernel: ops.Pair
    strides: ops.Pair
    dilations: ops.Pair
    padding: _Padding
    count: ops.Pair  # windows along height and width
    ceil_mode: bool

    @property
    def inside(self) -> ops.Pair | None:
        """The padding as PyTorch takes it, if it is the same on both sides."""
        left, right, top, bottom = self.padding
        return (top, left) if (top, left) == (bottom, right) else None


def _image(call: Call) -> Value:
    value = call.value()
    shape = value.shape
    refuse(len(shape) != 4 or shape[0] != 1, f"an input of shape {shape}, expected (1, C, H, W)")
    return value


def _pair(call: Call, attribute: str, default: ops.Pair = (1, 1)) -> ops.Pair:
    height, width = call.get(attribute, default)
    refuse(height < 1 or width < 1, f"{attribute}={[height, width]}")
    return int(height), int(width)


def lifted(call: Call) -> Call:
    """Return a call of lines [1, C, L] as one of images of height one."""
    value = call.inputs[0]
    assert isinstance(value, Value)
    channels, length = value.shape[1:]
    inputs: list[Argument] = [Value(value.position, (1, channels, 1, length)), *call.inputs[1:]]
    if call.kind in ("Conv", "ConvTranspose"):
        weight = call.constant(1)
        assert weight is not None
        refuse(weight.ndim != 3, f"a weight of shape {weight.shape} for lines")
        inputs[1] = weight[:, :, None]
    attributes = dict(call.attributes)
    for name, before in _OF_LINES.items():
        if name in attributes:
            refuse(len(attributes[name]) != 1, f"{name}={attributes[name]} for lines")
            attributes[name] = [before, *attributes[name]]
    if "pads" in attributes:
        low, high = attributes["pads"]
        attributes["pads"] = [0, low, 0, high]
    return replace(call, inputs=tuple(inputs), attributes=attributes)


_OF_LINES = {
    **{"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0, "output_shape": 1},
}


def of_any_rank(images: Converter, volumes: Converter | None = None) -> Converter:
    """Return a converter of lines, of images and, if there is one for them, of volumes."""

    def convert(build: Builder, call: Call) -> Value:
        rank = len(call.value().shape)
        if rank == 3 and call.value().shape[0] == 1:
            found = images(build, lifted(call))
            assert isinstance(found, Value)
            return build.place(found.position, (*found.shape[:2], found.shape[3]))
        found = volumes(build, call) if rank == 5 and volumes is not None else images(build, call)
        assert isinstance(found, Value)
        return found

    return convert


def _windows(call: Call, value: Value, kernel: ops.Pair) -> _Windows:
    """Resolve `auto_pad`, `pads` and `ceil_mode`."""
    mode = call.get("auto_pad", "NOTSET") or "NOTSET"
    refuse(mode not in (*_SAME, "VALID", "NOTSET"), f"auto_pad={mode}")
    refuse(mode != "NOTSET" and "pads" in call.attributes, "both auto_pad and pads")
    strides, dilations = _pair(call, "strides"), _pair(call, "dilations")
    ceil_mode = bool(call.get("ceil_mode", 0))
    # Here onnxruntime does something else than the specification.
    refuse(mode in _SAME and dilations != (1, 1), f"auto_pad={mode} with dilations")
    pads = [int(p) for p in call.get("pads", (0, 0, 0, 0))]
    refuse(len(pads) != 4 or min(pads) < 0, f"pads={pads}")
    before, after, count = [], [], []
    for i, size in enumerate(value.shape[2:]):
        low, high = pads[i], pads[i + 2]
        side = Side(size, kernel[i], strides[i], low, high, dilations[i])
        if mode in _SAME:
            low, high = side.same
            refuse(low + high < 0, f"auto_pad={mode} with gaps between the windows")
            low, high = (low, high) if mode == "SAME_UPPER" else (high, low)
            side = side._replace(before=low, after=high)
        refuse(side.free < 0, f"a window of {side.span} for {size} and padding {[low, high]}")
        before.append(low)
        after.append(high)
        count.append(side.windows(ceil_mode))
    height, width = (
        size + low + high for size, low, high in zip(value.shape[2:], before, after, strict=True)
    )
    padded = (1, value.shape[1], height, width)
    ONNX_TENSOR_ELEMENTS.check(math.prod(padded), f"the padded image {padded}")
    padding = before[1], after[1], before[0], after[0]
    return _Windows(kernel, strides, dilations, padding, (count[0], count[1]), ceil_mode)


def _run(build: Builder, value: Value, windows: _Windows, *operations: ops.Op) -> Value:
    position = build.at(value, sample_shape(value.shape))
    for op in operations:
        position = build.append(op, position)
    found = build.nodes[position].shape
    refuse(found[1:] != windows.count, f"{windows.count} windows, not {found[1:]} as in PyTorch")
    return build.place(position, (1, *found))


def _conv(build: Builder, call: Call) -> Value:
    weight, bias = call.constant(1), call.constant(2)
    assert weight is not None
    refuse(weight.ndim != 4, f"a convolution over {weight.ndim - 2} dimensions, expected 2")
    value = _image(call)
    kernel = (weight.shape[2], weight.shape[3])
    refuse(_pair(call, "kernel_shape", kernel) != kernel, "a kernel_shape that is not the kernel's")
    windows = _windows(call, value, kernel)
    unfolded = math.prod(windows.count) * value.shape[1] * math.prod(kernel)
    ONNX_TENSOR_ELEMENTS.check(unfolded, f"what the windows of {short(call.name)} hold")
    inside = windows.inside
    conv = ops.Conv2d(
        build.tensor(weight),
        None if bias is None else build.tensor(bias),
        windows.strides,
        inside or (0, 0),
        windows.dilations,
        int(call.get("group", 1)),
    )
    before = () if inside else (ops.Pad(windows.padding, 0.0),)
    return _run(build, value, windows, *before, conv)


def _conv_of_volumes(build: Builder, call: Call) -> Value:
    """A convolution over depth, height and width, with explicit padding."""
    value, weight, bias = call.value(), call.constant(1), call.constant(2)
    assert weight is not None
    refuse(weight.ndim != 5 or value.shape[0] != 1, f"a weight of shape {weight.shape}")
    mode = call.get("auto_pad", "NOTSET") or "NOTSET"
    refuse(mode not in ("NOTSET", "VALID"), f"auto_pad={mode}")
    pads = [int(p) for p in call.get("pads", [0] * 6)]
    refuse(len(pads) != 6 or min(pads) < 0 or (mode == "VALID" and any(pads)), f"pads={pads}")
    found = [
        Side(size, taps, int(step), low, high, int(apart))
        for size, taps, step, low, high, apart in zip(
            value.shape[2:], weight.shape[2:], call.get("strides", [1] * 3), pads[:3], pads[3:],
            call.get("dilations", [1] * 3), strict=True,
        )
    ]  # fmt: skip
    refuse(min(min(side.stride, side.dilation) for side in found) < 1, "a step below one")
    refuse(min(side.free for side in found) < 0, "a kernel larger than its input")
    unfolded = math.prod(side.windows() for side in found) * weight[0].size
    ONNX_TENSOR_ELEMENTS.check(unfolded, f"what the windows of {short(call.name)} hold")
    position = convolved(
        build,
        build.at(value, value.shape[1:]),
        build.tensor(weight),
        None if bias is None else build.tensor(bias),
        found,
        int(call.get("group", 1)),
    )
    return build.place(position, (1, *build.shape_of(position)))


def _average_pool(build: Builder, call: Call) -> Value:
    value = _image(call)
    windows = _windows(call, value, _kernel(call))
    refuse(windows.dilations != (1, 1), "dilations")
    count_padding = bool(call.get("count_include_pad", 0))
    inside = windows.inside
    refuse(
        inside is None and windows.ceil_mode,
        f"ceil_mode with padding {windows.padding} that differs between sides",
    )
    pool = ops.AvgPool(
        windows.kernel, windows.strides, inside or (0, 0), windows.ceil_mode, count_padding
    )
    if inside is not None:
        return _run(build, value, windows, pool)
    padding = ops.Pad(windows.padding, 0.0)
    pool = replace(pool, count_include_pad=True)
    if count_padding:
        return _run(build, value, windows, padding, pool)
    size = build.number(float(math.prod(windows.kernel)))
    shares = (ops.Scale(size), ops.Scale(_numbers_in(build, value, windows), divide=True))
    return _run(build, value, windows, padding, pool, *shares)


def _numbers_in(build: Builder, value: Value, windows: _Windows) -> torch.Tensor:
    """Return how many numbers of the image, not of its padding, each window holds."""
    left, right, top, bottom = windows.padding
    counts = []
    for axis, (low, high) in enumerate(((top, bottom), (left, right))):
        real = np.pad(np.ones(value.shape[2 + axis]), (low, high))
        starts = windows.strides[axis] * np.arange(windows.count[axis])
        inside = real[starts[:, None] + np.arange(windows.kernel[axis])].sum(1)
        refuse(not inside.all(), "windows of nothing but padding")
        counts.append(inside)
    return torch.from_numpy(np.outer(*counts)).to(build.dtype)


def _kernel(call: Call) -> ops.Pair:
    refuse("kernel_shape" not in call.attributes, "no kernel_shape")
    return _pair(call, "kernel_shape")


def _max_pool(build: Builder, call: Call) -> Value:
    value = _image(call)
    windows = _windows(call, value, _kernel(call))
    # Here the reference implementation does something else than onnxruntime.
    mode = call.get("auto_pad", "NOTSET")
    refuse(mode == "SAME_LOWER", f"auto_pad={mode}")
    refuse(mode == "VALID" and windows.ceil_mode, f"auto_pad={mode} with ceil_mode")
    inside = windows.inside
    before: tuple[ops.Op, ...] = ()
    if inside is None and _never_negative(build, value.position):
        # Zeros never win against such numbers.
        before = (ops.Pad(windows.padding, 0.0),)
    elif inside is None:
        value = _continued(build, value, windows)
    inside = inside or (0, 0)
    pool = ops.MaxPool(
        windows.kernel, windows.strides, inside, windows.dilations, windows.ceil_mode
    )
    return _run(build, value, windows, *before, pool)


def _never_negative(build: Builder, position: int) -> bool:
    """Whether a ReLU gave the numbers of a node, and they were only moved or pooled since."""
    kept = (ops.Reshape, ops.Permute, ops.Slice, ops.Take, ops.MaxPool, ops.AvgPool)
    while isinstance(build.nodes[position].op, kept):
        (position,) = build.nodes[position].inputs
    return isinstance(build.nodes[position].op, ops.Relu)


def _continued(build: Builder, value: Value, windows: _Windows) -> Value:
    """Return an image with its edges repeated instead of padding, which is the same to maxima.

    A window that meets the padding holds the number at the edge, too: it is not dilated, and wider
    than the padding.
    """
    left, right, top, bottom = windows.padding
    what = f"padding {windows.padding} that differs between sides"
    refuse(windows.dilations != (1, 1), f"dilations with {what}")
    refuse(windows.ceil_mode, f"ceil_mode with {what}")
    wide = max(top, bottom) >= windows.kernel[0] or max(left, right) >= windows.kernel[1]
    refuse(wide, f"{what}, as wide as the windows")
    sides = ((0, 0), (0, 0), (top, bottom), (left, right))
    return moves.moved(build, value, np.pad(moves.places(value.shape), sides, mode="edge"))


def global_average(build: Builder, value: Value, shape: Shape) -> Value:
    """Append the mean over height and width."""
    size = (value.shape[2], value.shape[3])
    return build.apply(value, ops.AvgPool(size, size, (0, 0), False, True), to=shape)


def _global_average_pool(build: Builder, call: Call) -> Value:
    value = _image(call)
    return global_average(build, value, (1, value.shape[1], 1, 1))


def _global_max_pool(build: Builder, call: Call) -> Value:
    value = _image(call)
    size = (value.shape[2], value.shape[3])
    pool = ops.MaxPool(size, size, (0, 0), (1, 1), False)
    return build.apply(value, pool, to=(1, value.shape[1], 1, 1))


CONVERTERS: dict[str, Converter] = {
    "Conv": of_any_rank(_conv, _conv_of_volumes),
    "AveragePool": of_any_rank(_average_pool),
    "MaxPool": of_any_rank(_max_pool),
    "GlobalAveragePool": of_any_rank(_global_average_pool),
    "GlobalMaxPool": of_any_rank(_global_max_pool),
}
