"""How each ONNX operator that computes something becomes operations of the graph.

A converter raises `NotImplementedError` with a reason when the graph has no operation for it.
All of them are exact in real arithmetic.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tightrope.graph import ops
from tightrope.graph.values import refuse
from tightrope.nets.onnx import (
    bends,
    contractions,
    dimensions,
    enlarging,
    quantized,
    recurrent,
    reductions,
    steps,
    writing,
)
from tightrope.nets.onnx import shapes as onnx_shapes
from tightrope.nets.onnx import smooth as onnx_smooth
from tightrope.nets.onnx import windows as onnx_windows
from tightrope.nets.onnx.aligning import aligned, together
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value, sample_shape


def _float32(default: float) -> float:
    """Return the default of an attribute; attributes are stored in single precision."""
    return float(np.float32(default))


def _elementwise(
    build: Builder, value: Value, constant: Array, *steps: tuple[type[ops.Op], bool] | ops.Op
) -> Value:
    """Apply operations with one and the same constant, aligned with the value's samples."""
    value, tensor = aligned(build, value, constant)
    position = value.position
    for step in steps:
        op = step if isinstance(step, ops.Op) else step[0](tensor, step[1])  # type: ignore[call-arg]
        position = build.append(op, position)
    return build.place(position, value.shape)


_PLUS, _MINUS = (ops.Shift, False), (ops.Shift, True)


def _negation(build: Builder) -> ops.Scale:
    return ops.Scale(torch.tensor(-1.0, dtype=build.dtype))


def _join(build: Builder, a: Value, b: Value, op: ops.Op) -> Value:
    shape, positions = together(build, a, b)
    return build.place(build.append(op, *positions), shape)


def _operands(call: Call) -> tuple[Value | Array, Value | Array]:
    a, b = call.inputs
    assert a is not None and b is not None
    return a, b


def _add(build: Builder, call: Call) -> Value:
    return _sum(build, *_operands(call))


def _sum(build: Builder, a: Value | Array, b: Value | Array) -> Value:
    if isinstance(a, Value) and isinstance(b, Value):
        return _join(build, a, b, ops.Add())
    if not isinstance(a, Value):
        a, b = b, a
    assert isinstance(a, Value) and not isinstance(b, Value)
    hidden = writing.hidden_sum(build, a, b)
    return _elementwise(build, a, b, _PLUS) if hidden is None else hidden


def _total(build: Builder, call: Call) -> Value:
    """The sum of any number of values and constants, which come last."""
    given = sorted(
        (a for a in call.inputs if a is not None), key=lambda a: not isinstance(a, Value)
    )
    found = given[0]
    for other in given[1:]:
        found = _sum(build, found, other)
    assert isinstance(found, Value)
    return found


def _mean(build: Builder, call: Call) -> Value:
    count = ops.Scale(torch.tensor(float(len(call.inputs)), dtype=build.dtype), divide=True)
    return build.apply(_total(build, call), count)


def _sub(build: Builder, call: Call) -> Value:
    a, b = _operands(call)
    if isinstance(a, Value) and isinstance(b, Value):
        return _join(build, a, b, ops.Sub())
    if isinstance(a, Value):
        assert not isinstance(b, Value)
        return _elementwise(build, a, b, _MINUS)
    assert isinstance(b, Value)
    return _elementwise(build, b, a, _negation(build), _PLUS)


def _mul(build: Builder, call: Call) -> Value:
    a, b = _operands(call)
    if isinstance(b, Value):
        a, b = b, a
    assert isinstance(a, Value)
    if isinstance(b, Value):
        return onnx_smooth.product(build, a, b)
    return _elementwise(build, a, b, (ops.Scale, False))


def _div(build: Builder, call: Call) -> Value:
    a, b = _operands(call)
    if isinstance(b, Value):
        return onnx_smooth.quotient(build, a, b)
    assert isinstance(a, Value)
    refuse(bool((b == 0).any()), "division by zero")
    return _elementwise(build, a, b, (ops.Scale, True))


def _neg(build: Builder, call: Call) -> Value:
    return build.apply(call.value(), _negation(build))


# --- matrices -------------------------------------------------------------------------------


def _matmul(build: Builder, call: Call) -> Value:
    return _product(build, *_operands(call))


def _product(build: Builder, a: Value | Array, b: Value | Array) -> Value:
    if isinstance(a, Value) and isinstance(b, Value):
        return onnx_smooth.matrix_product(build, a, b)
    for constant in (a, b):
        if not isinstance(constant, Value) and not _is_one_matrix(constant):
            return contractions.matrix_products(build, a, b)
    if isinstance(a, Value):
        assert not isinstance(b, Value)
        return _times_matrix(build, a, b)
    assert isinstance(b, Value)
    return _matrix_times(build, a, b)


def _as_matrix(constant: Array) -> Array:
    return constant.reshape(constant.shape[-2:])


def _is_one_matrix(constant: Array) -> bool:
    return constant.ndim < 2 or constant.size == math.prod(constant.shape[-2:])


def _times_matrix(build: Builder, value: Value, constant: Array) -> Value:
    """`value @ constant`: a linear layer over the value's last dimension."""
    shape = dimensions.product(value.shape, constant.shape)
    matrix = _as_matrix(constant) if constant.ndim > 1 else constant.reshape(-1, 1)
    # One row is a vector, as everywhere else, however many dimensions of size one it has.
    last = value.shape[-1]
    flat = math.prod(value.shape) == last
    position = build.at(value, (last,) if flat else sample_shape(value.shape))
    linear = ops.Linear(build.tensor(matrix.T), None)
    return build.place(build.append(linear, position), shape)


def _matrix_times(build: Builder, constant: Array, value: Value) -> Value:
    """`constant @ value`: a linear layer over the value's last dimension but one."""
    shape = dimensions.product(constant.shape, value.shape)
    matrix = _as_matrix(constant) if constant.ndim > 1 else constant.reshape(1, -1)
    linear = ops.Linear(build.tensor(matrix), None)
    inner = constant.shape[-1]
    if math.prod(value.shape) == inner:
        return build.place(build.append(linear, build.at(value, (inner,))), shape)
    order = list(range(len(value.shape)))
    order[-2:] = order[-1], order[-2]
    turned = onnx_shapes.permute(build, value, order)
    there = (*turned.shape[:-1], len(matrix))
    product = build.apply(turned, linear, to=there)
    return Value(onnx_shapes.permute(build, product, order).position, shape)


def _gemm(build: Builder, call: Call) -> Value:
    a, b = (
        _turned(build, operand) if call.get(flag, 0) else operand
        for operand, flag in zip(call.inputs[:2], ("transA", "transB"), strict=True)
    )
    assert a is not None and b is not None
    product = _product(build, a, b)
    alpha, beta = float(call.get("alpha", 1.0)), float(call.get("beta", 1.0))
    refuse(not (math.isfinite(alpha) and math.isfinite(beta)), f"alpha={alpha}, beta={beta}")
    if alpha != 1:
        product = build.apply(product, ops.Scale(torch.tensor(alpha, dtype=build.dtype)))
    addend = call.inputs[2] if len(call.inputs) > 2 else None
    if addend is None or beta == 0:
        return product
    if beta != 1:
        if isinstance(addend, Value):
            addend = build.apply(addend, ops.Scale(torch.tensor(beta, dtype=build.dtype)))
        else:
            scaled = np.asarray(addend * addend.dtype.type(beta))
            exact = np.array_equal(scaled.astype(np.longdouble), addend * np.longdouble(beta))
            refuse(not exact, f"beta={beta}, which does not multiply the bias without rounding")
            addend = scaled
    return _sum(build, product, addend)


def _turned(build: Builder, operand: Value | Array | None) -> Value | Array:
    assert operand is not None
    return onnx_shapes.permute(build, operand, [1, 0]) if isinstance(operand, Value) else operand.T


def _batch_norm(build: Builder, call: Call) -> Value:
    value = call.value()
    refuse(bool(call.get("training_mode", 0)), "training_mode")
    refuse(call.get("spatial", 1) != 1, "spatial=0")
    refuse(len(value.shape) < 2 or value.shape[0] != 1, f"an input of shape {value.shape}")
    arrays = [call.constant(i) for i in range(1, 5)]
    weight, bias, mean, variance = (build.tensor(a) for a in arrays if a is not None)
    epsilon = call.get("epsilon", _float32(1e-5))
    norm = ops.BatchNorm(weight, bias, mean, variance, epsilon, None, None)
    return build.apply(value, norm, to=value.shape)


# --- activations ----------------------------------------------------------------------------


def _activation(op: type[ops.Op]) -> Converter:
    return lambda build, call: build.apply(call.value(), op())


CONVERTERS: dict[str, Converter] = {
    **onnx_shapes.CONVERTERS,
    **onnx_windows.CONVERTERS,
    **enlarging.CONVERTERS,
    **bends.CONVERTERS,
    **reductions.CONVERTERS,
    **steps.CONVERTERS,
    **onnx_smooth.CONVERTERS,
    **contractions.CONVERTERS,
    **writing.CONVERTERS,
    **recurrent.CONVERTERS,
    **quantized.CONVERTERS,
    "Add": _add,
    "Sum": _total,
    "Mean": _mean,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Neg": _neg,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "BatchNormalization": _batch_norm,
    "Relu": _activation(ops.Relu),
    "Sigmoid": _activation(ops.Sigmoid),
    "Tanh": _activation(ops.Tanh),
}
