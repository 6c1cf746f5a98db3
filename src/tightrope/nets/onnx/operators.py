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
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx import shapes as onnx_shapes
from tightrope.nets.onnx import smooth as onnx_smooth
from tightrope.nets.onnx import windows as onnx_windows
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value, sample_shape


def _float32(default: float) -> float:
    """Return the default of an attribute; attributes are stored in single precision."""
    return float(np.float32(default))


def _elementwise(
    build: Builder, value: Value, constant: Array, *steps: tuple[type[ops.Op], bool] | ops.Op
) -> Value:
    """Apply operations with one and the same constant, aligned with the value's samples."""
    shape = dimensions.broadcast(value.shape, constant.shape)
    refuse(math.prod(shape) != math.prod(value.shape), f"{value.shape} is repeated to {shape}")
    have = build.nodes[value.position].shape
    if constant.size == 1:
        aligned, position = constant.reshape(()), value.position
    elif constant.size == math.prod(shape):  # its numbers lie in the order of the value's
        aligned, position = constant.reshape(have), value.position
    else:
        full = constant.reshape((1,) * (len(shape) - constant.ndim) + constant.shape)
        wanted = sample_shape(shape)
        aligned = full if len(wanted) == len(shape) else full[0]
        position = build.at(value, wanted)
    tensor = build.tensor(aligned)
    for step in steps:
        op = step if isinstance(step, ops.Op) else step[0](tensor, step[1])  # type: ignore[call-arg]
        position = build.append(op, position)
    return build.place(position, shape)


_PLUS, _MINUS = (ops.Shift, False), (ops.Shift, True)


def _negation(build: Builder) -> ops.Scale:
    return ops.Scale(torch.tensor(-1.0, dtype=build.dtype))


def _join(build: Builder, a: Value, b: Value, op: ops.Op) -> Value:
    shape = dimensions.broadcast(a.shape, b.shape)
    for value in (a, b):
        refuse(math.prod(shape) != math.prod(value.shape), f"{value.shape} is repeated to {shape}")
    common = sample_shape(shape)
    return build.place(build.append(op, build.at(a, common), build.at(b, common)), shape)


def _operands(call: Call) -> tuple[Value | Array, Value | Array]:
    a, b = call.inputs
    assert a is not None and b is not None
    return a, b


def _add(build: Builder, call: Call) -> Value:
    return _sum(build, *_operands(call))


def _sum(build: Builder, a: Value | Array, b: Value | Array) -> Value:
    if isinstance(a, Value) and isinstance(b, Value):
        return _join(build, a, b, ops.Add())
    if isinstance(a, Value):
        assert not isinstance(b, Value)
        return _elementwise(build, a, b, _PLUS)
    assert isinstance(b, Value)
    return _elementwise(build, b, a, _PLUS)


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
    if isinstance(a, Value):
        assert not isinstance(b, Value)
        return _times_matrix(build, a, b)
    assert isinstance(b, Value)
    return _matrix_times(build, a, b)


def _as_matrix(constant: Array) -> Array:
    refuse(constant.size != math.prod(constant.shape[-2:]), "a constant that is many matrices")
    return constant.reshape(constant.shape[-2:])


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


def _reduce(build: Builder, call: Call) -> Value:
    """`ReduceSum` and `ReduceMean`: a product with ones."""
    value = call.value()
    rank = len(value.shape)
    axes = call.integers(1, "axes")
    if not axes and call.get("noop_with_empty_axes", 0):
        return value
    reduced = sorted(dimensions.axes_of(axes or range(rank), rank))
    kept = [axis for axis in range(rank) if axis not in reduced]
    shape = dimensions.reduced(value.shape, reduced, bool(call.get("keepdims", 1)))
    count = math.prod(value.shape[axis] for axis in reduced)
    if call.kind == "ReduceMean" and reduced == [2, 3] and rank == 4 and value.shape[0] == 1:
        return onnx_windows.global_average(build, value, shape)
    last = onnx_shapes.permute(build, value, kept + reduced)
    rows = math.prod(value.shape) // count
    position = build.at(last, (count,) if rows == 1 else (rows, count))
    position = build.append(ops.Linear(torch.ones(1, count, dtype=build.dtype), None), position)
    if call.kind == "ReduceMean":
        divisor = torch.tensor(float(count), dtype=build.dtype)
        position = build.append(ops.Scale(divisor, divide=True), position)
    return build.place(position, shape)


# --- activations ----------------------------------------------------------------------------


def _activation(op: type[ops.Op]) -> Converter:
    return lambda build, call: build.apply(call.value(), op())


def _leaky(build: Builder, call: Call) -> Value:
    return _leaky_with(build, call.value(), call.get("alpha", _float32(0.01)))


def _prelu(build: Builder, call: Call) -> Value:
    value, slopes = call.value(), call.constant(1)
    assert slopes is not None and slopes.size
    refuse(bool((slopes != slopes.flat[0]).any()), "several slopes")
    shape = dimensions.broadcast(value.shape, slopes.shape)
    refuse(shape != value.shape, f"slopes of shape {slopes.shape} for {value.shape}")
    return _leaky_with(build, value, float(slopes.flat[0]))


def _leaky_with(build: Builder, value: Value, slope: float) -> Value:
    refuse(not 0 <= slope < math.inf, f"slope {slope}")
    return build.apply(value, ops.LeakyRelu(slope))


def _clip(build: Builder, call: Call) -> Value:
    value = call.value()
    largest = torch.finfo(build.dtype).max
    low, high = call.constant(1, "min"), call.constant(2, "max")
    if low is not None and not low <= -largest:
        value = _at_least(build, value, _as_dtype(build, low))
    if high is not None and not high >= largest:
        value = _at_most(build, value, _as_dtype(build, high))
    return value


def _as_dtype(build: Builder, number: Array) -> Array:
    """Attributes are float32 numbers, also in float64 networks."""
    return number.astype("float32" if build.dtype == torch.float32 else "float64")


def _at_least(build: Builder, value: Value, low: Array) -> Value:
    if not low.any():
        return _elementwise(build, value, low, ops.Relu())
    return _elementwise(build, value, low, _MINUS, ops.Relu(), _PLUS)


def _at_most(build: Builder, value: Value, high: Array) -> Value:
    """`high - relu(high - x)`."""
    minus = _negation(build)
    return _elementwise(build, value, high, minus, _PLUS, ops.Relu(), minus, _PLUS)


def _extremum(build: Builder, call: Call) -> Value:
    """`Max` and `Min` of a value and constants."""
    values = [given for given in call.inputs if isinstance(given, Value)]
    refuse(len(values) != 1, "several values that depend on the input")
    value = values[0]
    for constant in call.inputs:
        if constant is not None and not isinstance(constant, Value):
            limit = _at_least if call.kind == "Max" else _at_most
            value = limit(build, value, constant)
    return value


CONVERTERS: dict[str, Converter] = {
    **onnx_shapes.CONVERTERS,
    **onnx_windows.CONVERTERS,
    **onnx_smooth.CONVERTERS,
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Neg": _neg,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "BatchNormalization": _batch_norm,
    "ReduceMean": _reduce,
    "ReduceSum": _reduce,
    "Relu": _activation(ops.Relu),
    "LeakyRelu": _leaky,
    "PRelu": _prelu,
    "Sigmoid": _activation(ops.Sigmoid),
    "Tanh": _activation(ops.Tanh),
    "Clip": _clip,
    "Max": _extremum,
    "Min": _extremum,
}
