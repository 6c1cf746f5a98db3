"""`QuantizeLinear` and `DequantizeLinear`: rounding to a grid, which jumps, and back."""

from __future__ import annotations

import numpy as np

from tightrope.graph import composed, ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx.aligning import aligned
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value


def _grid(call: Call, value: Value) -> tuple[Array, Array]:
    """Return scale and zero of each number, aligned with the value."""
    scale, zero = call.constant(1), call.constant(2)
    assert scale is not None
    refuse(bool(call.get("block_size", 0)), "block_size")
    refuse(zero is None and bool(call.get("output_dtype", 0)), "output_dtype without a zero")
    refuse(not bool((scale > 0).all()), "scales that are not positive")
    if zero is None:
        zero = np.zeros(scale.shape, np.uint8)
    refuse(zero.dtype not in (np.uint8, np.int8, np.int32), f"zeros of type {zero.dtype}")
    if scale.size == 1:
        return scale.reshape(()), zero.reshape(())
    axis = dimensions.axis_of(int(call.get("axis", 1)), len(value.shape))
    shape = (-1, *[1] * (len(value.shape) - 1 - axis))
    return scale.reshape(shape), zero.reshape(shape)


def _quantized(build: Builder, call: Call) -> Value:
    """`clip(round(x / scale) + zero)`."""
    value = call.value()
    scale, zero = _grid(call, value)
    info = np.iinfo(zero.dtype)
    value, factor = aligned(build, value, scale)
    position = build.append(ops.Scale(factor, divide=True), value.position)
    found = build.place(build.append(ops.Step("round"), position), value.shape)
    found, offset = aligned(build, found, zero)
    position = build.append(ops.Shift(offset), found.position)
    position = composed.at_least(build, position, build.number(float(info.min)))
    position = composed.at_most(build, position, build.number(float(info.max)))
    return build.place(position, value.shape)


def _dequantized(build: Builder, call: Call) -> Value:
    """`(q - zero) scale`."""
    value = call.value()
    scale, zero = _grid(call, value)
    value, offset = aligned(build, value, zero)
    found = build.place(build.append(ops.Shift(offset, subtract=True), value.position), value.shape)
    found, factor = aligned(build, found, scale)
    return build.place(build.append(ops.Scale(factor), found.position), value.shape)


CONVERTERS: dict[str, Converter] = {
    "QuantizeLinear": _quantized,
    "DequantizeLinear": _dequantized,
}
