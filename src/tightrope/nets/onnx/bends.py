"""ONNX operators that are piecewise linear, number by number: they become ReLUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tightrope.graph import composed, ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx.aligning import aligned, together
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value

WithConstant = Callable[[Builder, int, Tensor], int]


def float32(default: float) -> float:
    """Return the default of an attribute; attributes are stored in single precision."""
    return float(np.float32(default))


def bent(build: Builder, value: Value, constant: Array, compose: WithConstant) -> Value:
    """Append a function of a value and a constant."""
    value, tensor = aligned(build, value, constant)
    return build.place(compose(build, value.position, tensor), value.shape)


def _number(build: Builder, call: Call, attribute: str, default: float) -> Array:
    number = float(call.get(attribute, float32(default)))
    refuse(not math.isfinite(number), f"{attribute}={number}")
    return np.array(number, dtype=_dtype(build))


def _dtype(build: Builder) -> str:
    return "float32" if build.dtype == torch.float32 else "float64"


def _leaky(build: Builder, call: Call) -> Value:
    return _with_slopes(build, call.value(), _number(build, call, "alpha", 0.01))


def _prelu(build: Builder, call: Call) -> Value:
    value, slopes = call.value(), call.constant(1)
    assert slopes is not None and slopes.size
    shape = dimensions.broadcast(value.shape, slopes.shape)
    refuse(shape != value.shape, f"slopes of shape {slopes.shape} for {value.shape}")
    return _with_slopes(build, value, slopes)


def _with_slopes(build: Builder, value: Value, slopes: Array) -> Value:
    refuse(not bool(np.isfinite(slopes).all()), "infinite or NaN slopes")
    first = float(slopes.flat[0])
    if first >= 0 and bool((slopes == slopes.flat[0]).all()):
        return build.apply(value, ops.LeakyRelu(first))
    return bent(build, value, slopes, composed.leaky)


def _clip(build: Builder, call: Call) -> Value:
    if any(isinstance(limit, Value) for limit in call.inputs[1:]):
        limits = (*call.inputs[1:], None)[:2]
        found = call
        for kind, limit in zip(("Max", "Min"), limits, strict=True):
            if limit is not None:
                value = _extremum(build, replace(found, kind=kind, inputs=(found.inputs[0], limit)))
                found = replace(call, inputs=(value,))
        return found.value()
    value = call.value()
    largest = torch.finfo(build.dtype).max
    low, high = call.constant(1, "min"), call.constant(2, "max")
    refuse(any(limit is not None and bool(np.isnan(limit)) for limit in (low, high)), "NaN")
    if low is not None and not low <= -largest:
        value = bent(build, value, _as_dtype(build, low), composed.at_least)
    if high is not None and not high >= largest:
        value = bent(build, value, _as_dtype(build, high), composed.at_most)
    return value


def _as_dtype(build: Builder, number: Array) -> Array:
    """Attributes are float32 numbers, also in float64 networks."""
    return number.astype(_dtype(build))


def _extremum(build: Builder, call: Call) -> Value:
    """`Max` and `Min` of values and constants."""
    largest = call.kind == "Max"
    values = [given for given in call.inputs if isinstance(given, Value)]
    found = values[0]
    for other in values[1:]:
        shape, positions = together(build, found, other)
        compose = composed.maximum if largest else composed.minimum
        found = build.place(compose(build, *positions), shape)
    for constant in call.inputs:
        if constant is not None and not isinstance(constant, Value):
            found = bent(build, found, constant, composed.at_least if largest else composed.at_most)
    return found


def _abs(build: Builder, call: Call) -> Value:
    value = call.value()
    return build.place(composed.absolute(build, value.position), value.shape)


def _hard_sigmoid(build: Builder, call: Call) -> Value:
    """`max(0, min(1, alpha x + beta))`."""
    value = call.value()
    scale, offset = _number(build, call, "alpha", 0.2), _number(build, call, "beta", 0.5)
    position = build.append(ops.Scale(build.tensor(scale)), value.position)
    position = build.append(ops.Shift(build.tensor(offset)), position)
    position = composed.at_least(build, position, build.number(0.0))
    return build.place(composed.at_most(build, position, build.number(1.0)), value.shape)


def _shrink(build: Builder, call: Call) -> Value:
    """`x - bias` above `lambd`, `x + bias` below `-lambd`, else zero: without a jump if equal."""
    width, bias = _number(build, call, "lambd", 0.5), _number(build, call, "bias", 0.0)
    refuse(bool(width < 0), f"lambd={width}")
    if bool(width != bias):
        return _jumping(build, call.value(), width, bias)
    return bent(build, call.value(), width, composed.soft_shrunk)


def _jumping(build: Builder, value: Value, width: Array, bias: Array) -> Value:
    x, zero = value.position, composed.zeros_like(build, value.position)
    for sign in (1, -1):
        side = x if sign == 1 else composed.negated(build, value.position)
        beyond = build.append(ops.Shift(build.tensor(width), subtract=True), side)
        moved = build.append(ops.Shift(build.tensor(bias), subtract=True), side)
        moved = moved if sign == 1 else composed.negated(build, moved)
        zero = build.append(ops.Where(), build.append(ops.Step("positive"), beyond), moved, zero)
    return build.place(zero, value.shape)


def _threshold(build: Builder, call: Call) -> Value:
    """The number itself above `alpha`, else zero."""
    value, alpha = call.value(), _number(build, call, "alpha", 1.0)
    gap = build.append(ops.Shift(build.tensor(alpha), subtract=True), value.position)
    above = build.append(ops.Step("positive"), gap)
    zero = composed.zeros_like(build, value.position)
    return build.place(build.append(ops.Where(), above, value.position, zero), value.shape)


CONVERTERS: dict[str, Converter] = {
    "LeakyRelu": _leaky,
    "PRelu": _prelu,
    "Clip": _clip,
    "Max": _extremum,
    "Min": _extremum,
    "Abs": _abs,
    "HardSigmoid": _hard_sigmoid,
    "Shrink": _shrink,
    "ThresholdedRelu": _threshold,
}
