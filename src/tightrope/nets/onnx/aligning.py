"""Values and constants of different shapes, brought together as ONNX broadcasts them."""

from __future__ import annotations

import math

from torch import Tensor

from tightrope.nets.onnx import dimensions, moves
from tightrope.nets.onnx.builder import Array, Builder, Value, sample_shape
from tightrope.nets.onnx.dimensions import Shape


def aligned(build: Builder, value: Value, constant: Array) -> tuple[Value, Tensor]:
    """Return a value, copied if a constant has more numbers, and the constant that fits it."""
    shape = dimensions.broadcast(value.shape, constant.shape)
    value = moves.expanded(build, value, shape)
    have = build.nodes[value.position].shape
    if constant.size == 1:
        return value, build.tensor(constant.reshape(()))
    if constant.size == math.prod(shape):  # its numbers lie in the order of the value's
        return value, build.tensor(constant.reshape(have))
    full = constant.reshape((1,) * (len(shape) - constant.ndim) + constant.shape)
    wanted = sample_shape(shape)
    part = full if len(wanted) == len(shape) else full[0]
    return Value(build.at(value, wanted), shape), build.tensor(part)


def together(build: Builder, a: Value, b: Value) -> tuple[Shape, list[int]]:
    """Return the common shape of two values, and where they are, copied to it."""
    shape = dimensions.broadcast(a.shape, b.shape)
    common = sample_shape(shape)
    return shape, [build.at(moves.expanded(build, value, shape), common) for value in (a, b)]
