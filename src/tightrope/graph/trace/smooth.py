"""Converters of smooth functions, products of two values, and the layers made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import layers, masks, ops
from tightrope.graph.trace import contractions
from tightrope.graph.values import Composed, Masked, Value, apply, refuse

# --- functions ------------------------------------------------------------------------------


def _function(name: str, *parameters: float) -> Callable[..., Any]:
    return lambda x: apply(x, ops.Function(name, parameters))


def _pow(x: Any, exponent: Any) -> Any:
    refuse(isinstance(exponent, Value | Tensor), "an exponent that is not one number")
    return Composed(lambda make: layers.power(make, x.position, float(exponent)))


def _gelu(x: Value, *, approximate: str = "none") -> Any:
    return apply(x, ops.Function("gelu_tanh" if approximate == "tanh" else "gelu"))


def _elu(x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    fits = 0 < alpha < math.inf and 0 < scale < math.inf and 0 < input_scale < math.inf
    refuse(not fits, f"alpha {alpha}, scale {scale}, input_scale {input_scale}")
    return apply(x, ops.Function("elu", (float(alpha), float(scale), float(input_scale))))


def _celu(x: Value, alpha: float = 1.0) -> Any:
    refuse(not 0 < alpha < math.inf, f"alpha {alpha}")
    return _elu(x, alpha, 1.0, 1.0 / alpha)


def _softplus(x: Value, beta: float = 1.0, threshold: float = 20.0) -> Any:
    fits = 0 < beta < math.inf and 0 < threshold < math.inf
    refuse(not fits, f"beta {beta}, threshold {threshold}")
    return apply(x, ops.Function("softplus", (float(beta), float(threshold))))


def _log_sigmoid(x: Value) -> Any:
    """`-log(1 + exp(-x))`, of which numbers above 40 are no threshold that matters."""
    minus = ops.Scale(torch.tensor(-1.0))
    return apply(x, minus, ops.Function("softplus", (1.0, 40.0)), minus)


def _shifted(name: str, before: float, after: float) -> Callable[..., Any]:
    steps = [(torch.tensor(t, dtype=torch.float64)) for t in (before, after)]

    def convert(x: Value) -> Any:
        inside = [ops.Shift(steps[0])] if before else []
        outside = [ops.Shift(steps[1])] if after else []
        return apply(x, *inside, ops.Function(name), *outside)

    return convert


# --- products -------------------------------------------------------------------------------


def _matmul(a: Any, b: Any) -> Any:
    if isinstance(a, Value) and isinstance(b, Value):
        return Composed(lambda make: layers.matrix_product(make, a.position, b.position))
    constant = b if isinstance(a, Value) else a
    if constant.dim() > 2:
        return contractions.matrices(a, b)
    refuse(constant.dim() != 2, f"a product with a constant of shape {tuple(constant.shape)}")
    if isinstance(a, Value):
        return apply(a, ops.Linear(constant.mT, None))
    refuse(len(b.shape) < 2, "a product with a constant that mixes the samples of a batch")

    def build(make: Any) -> int:
        turned = make.append(ops.Linear(constant, None), layers.transposed(make, b.position))
        return layers.transposed(make, turned)

    return Composed(build)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    refuse(isinstance(mask, Value), "a mask that depends on the input")
    refuse(dropout != 0, "its result is random, in evaluation mode, too")
    refuse(enable_gqa, "enable_gqa")
    refuse(not all(isinstance(v, Value) for v in (query, key, value)), "a constant among them")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    places = (query.position, key.position, value.position)
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2]).tril().bool()

    def build(make: Any) -> int:
        scores = layers.scores(make, *places[:2], factor)
        weights = make.call(aten.softmax, _masked(make, scores, mask), -1)
        return layers.matrix_product(make, weights.position, places[2])

    return Composed(build)


def _masked(make: Any, scores: int, mask: Tensor | None) -> Any:
    """Return scores to which a mask is added, or that are left out where it is not set."""
    value = Value(scores, make.shape_of(scores))
    if mask is None:
        return value
    if mask.dtype == torch.bool:
        return make.call(aten.where, mask, value, -math.inf)
    return make.call(aten.add, value, mask)


# --- softmax and normalisation --------------------------------------------------------------


def _softmax(logarithm: bool) -> Callable[..., Any]:
    def convert(x: Any, dim: int, half_to_float: bool = False, dtype: Any = None) -> Any:
        if isinstance(x, Masked):
            value = x.value
            last = dim % (len(value.shape) + 1) == len(value.shape)
            refuse(not last, "minus infinity, not along the last dimension")
            return Composed(
                lambda make: masks.masked_softmax(
                    make, value.position, x.hidden, logarithm=logarithm
                )
            )
        axis = dim % (len(x.shape) + 1) - 1
        refuse(axis < 0, "a softmax over the batch")
        return Composed(lambda make: layers.softmax(make, x.position, axis, logarithm=logarithm))

    return convert


def _scaled(make: Any, x: int, weight: Tensor | None, bias: Tensor | None) -> int:
    if weight is not None:
        x = make.append(ops.Scale(weight), x)
    return x if bias is None else make.append(ops.Shift(bias), x)


def _layer_norm(
    x: Value,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    *backend: bool,
) -> Any:
    rows = layers.rows_of(x.shape, len(x.shape) - len(shape))

    def build(make: Any) -> int:
        standard = layers.standardized(make, x.position, rows, epsilon)
        return _scaled(make, standard, weight, bias)

    return Composed(build)


def _rms_norm(
    x: Value, shape: Sequence[int], weight: Tensor | None = None, epsilon: float | None = None
) -> Any:
    rows = layers.rows_of(x.shape, len(x.shape) - len(shape))

    def build(make: Any) -> int:
        least = torch.finfo(make.probe.dtype).eps if epsilon is None else epsilon
        standard = layers.standardized(make, x.position, rows, least, center=False)
        return _scaled(make, standard, weight, None)

    return Composed(build)


def _group_norm(
    x: Value,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    *backend: bool,
) -> Any:
    per_channel = (-1, *[1] * (len(x.shape) - 1))
    numbers = (None if t is None else t.view(per_channel) for t in (weight, bias))
    factor, offset = numbers
    rows = (groups, math.prod(x.shape) // groups)

    def build(make: Any) -> int:
        standard = layers.standardized(make, x.position, rows, epsilon)
        return _scaled(make, standard, factor, offset)

    return Composed(build)


def _instance_norm(
    x: Value,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    of_input: bool,
    momentum: float,
    epsilon: float,
    *backend: bool,
) -> Any:
    if of_input:
        return _group_norm(x, x.shape[0], weight, bias, epsilon)
    assert mean is not None and variance is not None
    return apply(x, ops.BatchNorm(weight, bias, mean, variance, epsilon, momentum, None))


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.exp: _function("exp"),
    aten.expm1: _shifted("exp", 0.0, -1.0),
    aten.log: _function("log"),
    aten.log1p: _shifted("log", 1.0, 0.0),
    aten.sqrt: _function("sqrt"),
    aten.rsqrt: _function("power", -0.5),
    aten.reciprocal: _function("reciprocal"),
    aten.square: _function("power", 2.0),
    aten.pow: _pow,
    aten.sin: _function("sin"),
    aten.cos: _function("cos"),
    aten.erf: _function("erf"),
    aten.atan: _function("atan"),
    aten.sinh: _function("sinh"),
    aten.cosh: _function("cosh"),
    aten.exp2: _function("exponential", 2.0),
    aten.gelu: _gelu,
    aten.silu: _function("silu"),
    aten.mish: _function("mish"),
    aten.elu: _elu,
    aten.selu: _function("elu", 1.6732632423543772, 1.0507009873554805, 1.0),
    aten.celu: _celu,
    aten.softplus: _softplus,
    aten.log_sigmoid: _log_sigmoid,
    aten.hardswish: _function("hardswish"),
    aten.matmul: _matmul,
    aten.bmm: _matmul,
    aten.scaled_dot_product_attention: _attention,
    aten.softmax: _softmax(False),
    aten._softmax: _softmax(False),
    aten.log_softmax: _softmax(True),
    aten._log_softmax: _softmax(True),
    aten.layer_norm: _layer_norm,
    aten.rms_norm: _rms_norm,
    aten.group_norm: _group_norm,
    aten.instance_norm: _instance_norm,
}
