"""ONNX operators that slide a window over an image: convolution and pooling."""

from __future__ import annotations

from tightrope.graph import ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx_builder import Builder, Call, Converter, Shape, Value, sample_shape

_Padding = tuple[int, int, int, int]  # left, right, top, bottom, as in `ops.Pad`


def _image(call: Call) -> Value:
    value = call.value()
    shape = value.shape
    refuse(len(shape) != 4 or shape[0] != 1, f"an input of shape {shape}, expected (1, C, H, W)")
    return value


def _pair(call: Call, attribute: str, default: int = 1) -> ops.Pair:
    height, width = call.get(attribute, (default, default))
    return int(height), int(width)


def _padding(call: Call, value: Value, kernel: ops.Pair) -> _Padding:
    """Resolve `auto_pad` and `pads`."""
    mode = call.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        sizes = zip(
            value.shape[2:], kernel, _pair(call, "strides"), _pair(call, "dilations"), strict=True
        )
        for size, taps, stride, dilation in sizes:
            outputs = -(-size // stride)
            total = max(0, (outputs - 1) * stride + (taps - 1) * dilation + 1 - size)
            small, large = total // 2, total - total // 2
            before.append(small if mode == "SAME_UPPER" else large)
            after.append(large if mode == "SAME_UPPER" else small)
    elif mode == "VALID":
        before, after = [0, 0], [0, 0]
    else:
        refuse(mode not in ("", "NOTSET"), f"auto_pad={mode}")
        pads = [int(p) for p in call.get("pads", (0, 0, 0, 0))]
        refuse(len(pads) != 4 or min(pads) < 0, f"pads={pads}")
        before, after = pads[:2], pads[2:]
    return before[1], after[1], before[0], after[0]


def _symmetric(padding: _Padding) -> ops.Pair | None:
    left, right, top, bottom = padding
    return (top, left) if (top, left) == (bottom, right) else None


def _run(build: Builder, value: Value, *operations: ops.Op) -> Value:
    position = build.at(value, sample_shape(value.shape))
    for op in operations:
        position = build.append(op, position)
    return build.place(position, (1, *build.nodes[position].shape))


def _conv(build: Builder, call: Call) -> Value:
    weight, bias = call.constant(1), call.constant(2)
    assert weight is not None
    refuse(weight.ndim != 4, f"a convolution over {weight.ndim - 2} dimensions, expected 2")
    value = _image(call)
    padding = _padding(call, value, (weight.shape[2], weight.shape[3]))
    inside = _symmetric(padding)
    conv = ops.Conv2d(
        build.tensor(weight),
        None if bias is None else build.tensor(bias),
        _pair(call, "strides"),
        inside or (0, 0),
        _pair(call, "dilations"),
        int(call.get("group", 1)),
    )
    return _run(build, value, *(() if inside else (ops.Pad(padding, 0.0),)), conv)


def _average_pool(build: Builder, call: Call) -> Value:
    value = _image(call)
    kernel = _pair(call, "kernel_shape")
    refuse(_pair(call, "dilations") != (1, 1), "dilations")
    padding = _padding(call, value, kernel)
    count_padding = bool(call.get("count_include_pad", 0))
    inside = _symmetric(padding)
    refuse(inside is None and not count_padding, f"padding {padding} that differs between sides")
    ceil_mode = bool(call.get("ceil_mode", 0))
    refuse(inside is None and ceil_mode, "ceil_mode with padding that differs between sides")
    strides = _pair(call, "strides")
    pool = ops.AvgPool(kernel, strides, inside or (0, 0), ceil_mode, count_padding)
    return _run(build, value, *(() if inside else (ops.Pad(padding, 0.0),)), pool)


def _max_pool(build: Builder, call: Call) -> Value:
    value = _image(call)
    kernel = _pair(call, "kernel_shape")
    padding = _padding(call, value, kernel)
    inside = _symmetric(padding)
    before: tuple[ops.Op, ...] = ()
    if inside is None:
        # Zeros never win against what a ReLU gives; of other values nothing is known.
        positive = isinstance(build.nodes[value.position].op, ops.Relu)
        refuse(not positive, f"padding {padding} that differs between sides")
        before, inside = (ops.Pad(padding, 0.0),), (0, 0)
    strides, dilations = _pair(call, "strides"), _pair(call, "dilations")
    ceil_mode = bool(call.get("ceil_mode", 0))
    return _run(build, value, *before, ops.MaxPool(kernel, strides, inside, dilations, ceil_mode))


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
    return _run(build, value, ops.MaxPool(size, size, (0, 0), (1, 1), False))


CONVERTERS: dict[str, Converter] = {
    "Conv": _conv,
    "AveragePool": _average_pool,
    "MaxPool": _max_pool,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
}
