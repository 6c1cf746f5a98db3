"""ONNX operators that are smooth functions, products of two values, or layers made of them."""

from __future__ import annotations

import math

import numpy as np

from tightrope.graph import composed, layers, ops, statistics
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions, writing
from tightrope.nets.onnx import shapes as onnx_shapes
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value
from tightrope.nets.onnx.dimensions import Shape


def _float32(default: float) -> float:
    """Return the default of an attribute; attributes are stored in single precision."""
    return float(np.float32(default))


# --- functions ------------------------------------------------------------------------------


def _function(name: str) -> Converter:
    return lambda build, call: build.apply(call.value(), ops.Function(name))


def _pow(build: Builder, call: Call) -> Value:
    base, exponent = call.inputs
    assert base is not None and exponent is not None
    if isinstance(exponent, Value):
        return _power_of(build, base, exponent)
    value = call.value()
    refuse(exponent.size != 1, f"exponents of shape {exponent.shape}")
    shape = dimensions.broadcast(value.shape, exponent.shape)
    refuse(math.prod(shape) != math.prod(value.shape), f"{value.shape} is repeated to {shape}")
    position = layers.power(build, value.position, float(exponent.reshape(())))
    return build.place(position, shape)


def _power_of(build: Builder, base: Value | Array, exponent: Value) -> Value:
    """A positive constant to the power of a value."""
    refuse(isinstance(base, Value), "a base and an exponent that depend on the input")
    assert not isinstance(base, Value)
    refuse(base.size != 1, f"powers of several constants, of shape {base.shape}")
    shape = dimensions.broadcast(base.shape, exponent.shape)
    number = float(base.reshape(()))
    refuse(not 0 < number < math.inf or number == 1, f"powers of {number}")
    found = build.apply(exponent, ops.Function("exponential", (number,)))
    return build.place(found.position, shape)


def _swish(build: Builder, call: Call) -> Value:
    """`x sigmoid(alpha x)`."""
    value, alpha = call.value(), float(call.get("alpha", 1.0))
    refuse(not math.isfinite(alpha), f"alpha {alpha}")
    inner = value if alpha == 1 else build.apply(value, ops.Scale(build.number(alpha)))
    # As it stands: onnxruntime's logistic function is far less precise than its exponential.
    return product(build, value, build.apply(inner, ops.Sigmoid()))


def _tan(build: Builder, call: Call) -> Value:
    value = call.value()
    sine, cosine = (build.apply(value, ops.Function(name)) for name in ("sin", "cos"))
    return quotient(build, sine, cosine)


def _gelu(build: Builder, call: Call) -> Value:
    form = call.get("approximate", "none")
    return build.apply(call.value(), ops.Function("gelu_tanh" if form == "tanh" else "gelu"))


def _elu(build: Builder, value: Value, alpha: float, scale: float, factor: float) -> Value:
    fits = all(0 < number < math.inf for number in (alpha, scale, factor))
    refuse(not fits, f"alpha {alpha}, gamma {scale}")
    return build.apply(value, ops.Function("elu", (alpha, scale, factor)))


def _selu(build: Builder, call: Call) -> Value:
    alpha = call.get("alpha", _float32(1.67326319217681884765625))
    return _elu(build, call.value(), alpha, call.get("gamma", _float32(1.05070102214813232)), 1.0)


def _celu(build: Builder, call: Call) -> Value:
    alpha = call.get("alpha", 1.0)
    refuse(not 0 < alpha < math.inf, f"alpha {alpha}")
    factor = 1 / alpha
    refuse(alpha * factor != 1 or float(np.float32(factor)) != factor, f"alpha {alpha}")
    return _elu(build, call.value(), alpha, 1.0, factor)


def _softplus(build: Builder, call: Call) -> Value:
    """`log(1 + exp(x))`, of which numbers above 40 are no threshold that matters."""
    return build.apply(call.value(), ops.Function("softplus", (1.0, 40.0)))


def _softsign(build: Builder, call: Call) -> Value:
    """`x / (1 + |x|)`."""
    value = call.value()
    size = composed.absolute(build, value.position)
    above = build.append(ops.Shift(build.number(1.0)), size)
    return build.place(layers.quotient(build, value.position, above), value.shape)


def _normalized(build: Builder, call: Call) -> Value:
    """Numbers over the norm along an axis, of order one or two."""
    value = call.value()
    axis = dimensions.axis_of(int(call.get("axis", -1)), len(value.shape))
    start = build.at(value, value.shape)
    size = statistics.norm(build, start, [axis], float(call.get("p", 2)))
    ones = tuple(1 if i == axis else n for i, n in enumerate(value.shape))
    wide = composed.expanded(build, composed.shaped(build, size, ones), value.shape)
    return build.place(layers.quotient(build, start, wide), value.shape)


# --- products -------------------------------------------------------------------------------


def product(build: Builder, a: Value, b: Value) -> Value:
    """The product of two values, number by number."""
    return _aligned(build, a, b, layers.product)


def quotient(build: Builder, a: Value | Array, b: Value) -> Value:
    """The quotient of two values, or of a constant and a value."""
    if isinstance(a, Value):
        return _aligned(build, a, b, layers.quotient)
    inverse = build.apply(b, ops.Function("reciprocal"))
    shape = dimensions.broadcast(a.shape, b.shape)
    refuse(math.prod(shape) != math.prod(b.shape), f"{b.shape} is repeated to {shape}")
    full = np.broadcast_to(a, shape) if a.size > 1 else a.reshape(())
    have = build.nodes[inverse.position].shape
    factor = build.tensor(full.reshape(have) if a.size > 1 else full)
    return build.place(build.append(ops.Scale(factor), inverse.position), shape)


def _aligned(build: Builder, a: Value, b: Value, make: object) -> Value:
    """Apply an operation to samples of as many dimensions, which are broadcast."""
    shape = dimensions.broadcast(a.shape, b.shape)
    whole = [(1,) * (len(shape) - len(v.shape)) + v.shape for v in (a, b)]
    batched = len(shape) > 1 and shape[0] == 1
    places = [build.at(v, w[1:] if batched else w) for v, w in zip((a, b), whole, strict=True)]
    return build.place(make(build, *places), shape)  # type: ignore[operator]


def matrix_product(build: Builder, a: Value, b: Value) -> Value:
    """The product of two values as matrices."""
    refuse(min(len(a.shape), len(b.shape)) < 2, "a product of vectors that depend on the input")
    shape = dimensions.product(a.shape, b.shape)
    rank = max(len(a.shape), len(b.shape))
    whole: list[Shape] = [(1,) * (rank - len(v.shape)) + v.shape for v in (a, b)]
    batched = rank > 2 and all(w[0] == 1 for w in whole)
    places = [build.at(v, w[1:] if batched else w) for v, w in zip((a, b), whole, strict=True)]
    return build.place(layers.matrix_product(build, *places), shape)


# --- softmax and normalisation --------------------------------------------------------------


def _softmax(build: Builder, call: Call) -> Value:
    value, logarithm = call.value(), call.kind == "LogSoftmax"
    rank = len(value.shape)
    if value.hidden is not None:
        default = -1 if call.opset >= 13 else 1
        axis = dimensions.axis_of(int(call.get("axis", default)), rank)
        return writing.softmax(build, value, axis, logarithm=logarithm)
    if call.opset < 13:  # over all dimensions from the axis on
        axis = dimensions.axis_of(int(call.get("axis", 1)), rank)
        rows = (math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))
        position = build.append(ops.Softmax(logarithm), build.at(value, rows))
        return build.place(position, value.shape)
    axis = dimensions.axis_of(int(call.get("axis", -1)), rank)
    order = [*(i for i in range(rank) if i != axis), axis]
    turned = onnx_shapes.permute(build, value, order)
    rows = (math.prod(turned.shape[:-1]), turned.shape[-1])
    position = build.append(ops.Softmax(logarithm), build.at(turned, rows))
    found = build.place(position, turned.shape)
    return onnx_shapes.permute(build, found, [order.index(i) for i in range(rank)])


def _scaled(build: Builder, x: Value, factor: Array | None, offset: Array | None) -> Value:
    """Multiply by a constant and add another; both broadcast onto the value."""
    position = x.position
    have = build.nodes[position].shape
    for constant, kind in ((factor, ops.Scale), (offset, ops.Shift)):
        if constant is not None:
            shape = dimensions.broadcast(x.shape, constant.shape)
            refuse(shape != x.shape, f"a constant of shape {constant.shape} for {x.shape}")
            full = np.broadcast_to(constant, shape)
            position = build.append(kind(build.tensor(full.reshape(have))), position)
    return build.place(position, x.shape)


def _layer_norm(build: Builder, call: Call) -> Value:
    value = call.value()
    axis = dimensions.axis_of(int(call.get("axis", -1)), len(value.shape))
    rows = (math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))
    epsilon = call.get("epsilon", _float32(1e-5))
    position = layers.standardized(build, value.position, rows, epsilon)
    return _scaled(build, build.place(position, value.shape), call.constant(1), call.constant(2))


def _rms_norm(build: Builder, call: Call) -> Value:
    value = call.value()
    axis = dimensions.axis_of(int(call.get("axis", -1)), len(value.shape))
    rows = (math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))
    epsilon = call.get("epsilon", _float32(1e-5))
    position = layers.standardized(build, value.position, rows, epsilon, center=False)
    return _scaled(build, build.place(position, value.shape), call.constant(1), None)


def _instance_norm(build: Builder, call: Call) -> Value:
    value = call.value()
    refuse(len(value.shape) < 3 or value.shape[0] != 1, f"an input of shape {value.shape}")
    return _grouped(build, call, value.shape[1], per_group=False)


def _group_norm(build: Builder, call: Call) -> Value:
    value = call.value()
    refuse(len(value.shape) < 2 or value.shape[0] != 1, f"an input of shape {value.shape}")
    return _grouped(build, call, int(call.get("num_groups", 1)), per_group=call.opset < 21)


def _grouped(build: Builder, call: Call, groups: int, *, per_group: bool) -> Value:
    value = call.value()
    channels = value.shape[1]
    refuse(groups < 1 or channels % groups != 0, f"{groups} groups of {channels} channels")
    rows = (groups, math.prod(value.shape) // groups)
    epsilon = call.get("epsilon", _float32(1e-5))
    position = layers.standardized(build, value.position, rows, epsilon)
    constants = [call.constant(1), call.constant(2)]
    for i, constant in enumerate(constants):
        if constant is not None:
            each = np.repeat(constant, channels // groups) if per_group else constant
            refuse(each.shape != (channels,), f"a constant of shape {constant.shape}")
            constants[i] = each.reshape(-1, *[1] * (len(value.shape) - 2))
    return _scaled(build, build.place(position, value.shape), *constants)


CONVERTERS: dict[str, Converter] = {
    "Exp": _function("exp"),
    "Log": _function("log"),
    "Sqrt": _function("sqrt"),
    "Reciprocal": _function("reciprocal"),
    "Sin": _function("sin"),
    "Cos": _function("cos"),
    "Erf": _function("erf"),
    "Atan": _function("atan"),
    "Sinh": _function("sinh"),
    "Cosh": _function("cosh"),
    "Softsign": _softsign,
    "LpNormalization": _normalized,
    "Mish": _function("mish"),
    "HardSwish": _function("hardswish"),
    "Gelu": _gelu,
    "Elu": lambda build, call: _elu(build, call.value(), call.get("alpha", 1.0), 1.0, 1.0),
    "Selu": _selu,
    "Celu": _celu,
    "Softplus": _softplus,
    "Pow": _pow,
    "Swish": _swish,
    "Tan": _tan,
    "RMSNormalization": _rms_norm,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "LayerNormalization": _layer_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
}
