"""Converters of sums and of piecewise linear functions, number by number; shapes broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import composed, layers, ops
from tightrope.graph.values import Composed, Masked, Value, apply, refuse

OfNodes = Callable[[Any, int, int], int]
OfConstant = Callable[[Any, int, Tensor], int]


def constant(value: Any) -> Tensor:
    """Return a constant as a tensor.

    A Python number is exact in its tensor and, having no dimension, never promotes a batch.
    """
    if isinstance(value, Tensor | int):
        return torch.as_tensor(value)
    return torch.tensor(float(value), dtype=torch.float64)


def aligned(given: Any, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return a constant, and what samples of that shape broadcast to with it."""
    tensor = constant(given)
    own = tuple(tensor.shape)
    if len(own) == len(shape) + 1 and own[0] == 1:
        own = own[1:]
    elif len(own) == len(shape) + 1 and bool((tensor == tensor[:1]).all()):
        with torch.enable_grad():  # what was made for a batch is the same for all of its samples
            tensor, own = tensor[0], own[1:]
    wide = _broadcast(shape, own)
    refuse(wide is None, f"a constant of shape {own} with samples of shape {shape}")
    assert wide is not None
    return tensor, wide


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the common shape of samples, unless it would reach into the batch."""
    try:
        shape = tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        return None
    return shape if len(shape) == len(a) else None


def combined(make: Any, x: int, other: Any, nodes: OfNodes, number: OfConstant) -> int:
    """Append a function of a node and another value or a constant, copied to a common shape."""
    shape = make.shape_of(x)
    if not isinstance(other, Value):
        tensor, fitting = aligned(other, shape)
        return number(make, composed.expanded(make, x, fitting), tensor)
    wide = _broadcast(shape, other.shape)
    fits = wide is not None and len(shape) == len(other.shape)
    refuse(not fits, f"samples of shapes {shape} and {other.shape}")
    assert wide is not None
    pair = (composed.expanded(make, position, wide) for position in (x, other.position))
    return nodes(make, *pair)


def _either(a: Any, b: Any, nodes: OfNodes, number: OfConstant, turned: OfConstant) -> Composed:
    """Return a function of two values, or of a value and a constant, which may come first."""
    if isinstance(a, Value):
        return Composed(lambda make: combined(make, a.position, b, nodes, number))
    return Composed(lambda make: combined(make, b.position, a, nodes, turned))


def _plus(make: Any, x: int, c: Tensor) -> int:
    return int(make.append(ops.Shift(c), x))


def _minus(make: Any, x: int, c: Tensor) -> int:
    return int(make.append(ops.Shift(c, subtract=True), x))


def _from(make: Any, x: int, c: Tensor) -> int:
    return int(make.append(ops.Shift(c), composed.negated(make, x)))


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if alpha != 1:
        return _with_alpha(a, b, alpha)
    hidden = _minus_infinity(a, b)
    if hidden is not None:
        return hidden
    return _either(a, b, lambda make, i, j: make.append(ops.Add(), i, j), _plus, _plus)


def _sub(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if alpha != 1:
        return _with_alpha(a, b, -alpha)
    ordinary = _either(a, b, lambda make, i, j: make.append(ops.Sub(), i, j), _minus, _from)
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return ordinary
    pairs = (a.position, b.position)
    return Composed(lambda make: layers.differences(make, *pairs) or ordinary.build(make))


def _with_alpha(a: Any, b: Any, alpha: float) -> Any:
    """`a + alpha b`."""
    refuse(not isinstance(b, Value), "alpha times a constant")

    def build(make: Any) -> Any:
        return make.call(torch.ops.aten.add, a, make.call(torch.ops.aten.mul, b, alpha)).position

    return Composed(build)


def _minus_infinity(a: Any, b: Any) -> Masked | None:
    """Return a value to which minus infinity is added at some places, and zero elsewhere."""
    value, other = (a, b) if isinstance(a, Value) else (b, a)
    if not isinstance(other, Tensor):
        return None
    hidden = other == -math.inf
    if not bool(hidden.any()) or other.dim() > len(value.shape) + 1:
        return None
    refuse(bool((~hidden & (other != 0)).any()), "minus infinity among other numbers")
    if hidden.dim() > len(value.shape):
        refuse(len(hidden) != 1, "a mask of each sample")
        hidden = hidden[0]
    return Masked(value, hidden.expand(value.shape))


def _rsub(a: Any, b: Any, alpha: float = 1) -> Any:
    return _sub(b, a, alpha=alpha)


def _neg(x: Value) -> Any:
    return Composed(lambda make: composed.negated(make, x.position))


def _times(make: Any, x: int, c: Tensor) -> int:
    return int(make.append(ops.Scale(c), x))


def _mul(a: Any, b: Any) -> Any:
    if isinstance(a, Value) and isinstance(b, Value):  # which need no copies
        return Composed(lambda make: layers.product(make, a.position, b.position))
    return _either(a, b, layers.product, _times, _times)


def _under(make: Any, x: int, c: Tensor) -> int:
    return _times(make, make.append(ops.Function("reciprocal"), x), c)


def _over(make: Any, x: int, c: Tensor) -> int:
    refuse(bool((c == 0).any()), "division by zero")
    return int(make.append(ops.Scale(c, divide=True), x))


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    refuse(rounding_mode is not None, f"rounding_mode={rounding_mode!r}")
    if isinstance(a, Value) and isinstance(b, Value):
        return Composed(lambda make: layers.quotient(make, a.position, b.position))
    return _either(a, b, layers.quotient, _over, _under)


# --- limits ---------------------------------------------------------------------------------


def _at_least(make: Any, x: int, low: Tensor) -> int:
    return x if _everywhere(low, -math.inf) else composed.at_least(make, x, low)


def _at_most(make: Any, x: int, high: Tensor) -> int:
    return x if _everywhere(high, math.inf) else composed.at_most(make, x, high)


def _everywhere(limit: Tensor, value: float) -> bool:
    refuse(bool(limit.isnan().any()), "a limit that is not a number")
    return bool((limit == value).all())


def maximum(a: Any, b: Any) -> Any:
    """The larger one of two numbers each."""
    return _either(a, b, composed.maximum, _at_least, _at_least)


def minimum(a: Any, b: Any) -> Any:
    """The smaller one of two numbers each."""
    return _either(a, b, composed.minimum, _at_most, _at_most)


def _clamp(x: Value, low: Any = None, high: Any = None, **limits: Any) -> Any:
    """The smaller one of the upper limit and the larger one of `x` and the lower limit."""
    low, high = limits.get("min", low), limits.get("max", high)

    def build(make: Any) -> int:
        position = x.position
        if low is not None:
            position = combined(make, position, low, composed.maximum, _at_least)
        if high is not None:
            position = combined(make, position, high, composed.minimum, _at_most)
        return position

    return Composed(build)


def _relu6(x: Value) -> Any:
    return _clamp(x, 0, 6)


def _hardtanh(x: Value, low: float = -1, high: float = 1) -> Any:
    return _clamp(x, low, high)


def _hardsigmoid(x: Value) -> Any:
    """`relu6(x + 3) / 6`."""

    def build(make: Any) -> int:
        position = composed.at_least(make, _plus(make, x.position, constant(3)), constant(0))
        return _over(make, composed.at_most(make, position, constant(6)), constant(6))

    return Composed(build)


# --- other bends ----------------------------------------------------------------------------


def _abs(x: Value) -> Any:
    return Composed(lambda make: composed.absolute(make, x.position))


def _leaky(x: Value, slope: float = 0.01) -> Any:
    refuse(not math.isfinite(slope), f"a negative slope of {slope}")
    if slope >= 0:
        return apply(x, ops.LeakyRelu(float(slope)))
    return Composed(lambda make: composed.leaky(make, x.position, constant(slope)))


def _prelu(x: Value, slopes: Tensor) -> Any:
    """One slope, or one for each channel: the first dimension of the samples."""
    refuse(isinstance(slopes, Value), "a slope that depends on the input")
    refuse(slopes.dim() > 1 or (slopes.numel() > 1 and not x.shape), "slopes of that shape")
    with torch.enable_grad():  # a view of the slopes, whatever the mode at present
        shape = (-1, *[1] * (len(x.shape) - 1)) if slopes.numel() > 1 else ()
        per_channel = slopes.reshape(shape)
    return Composed(lambda make: composed.leaky(make, x.position, per_channel))


def _softshrink(x: Value, width: float = 0.5) -> Any:
    return Composed(lambda make: composed.soft_shrunk(make, x.position, constant(width)))


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.add: _add,
    aten.sub: _sub,
    aten.rsub: _rsub,
    aten.neg: _neg,
    aten.mul: _mul,
    aten.div: _div,
    aten.maximum: maximum,
    aten.minimum: minimum,
    aten.fmax: maximum,
    aten.fmin: minimum,
    aten.clamp: _clamp,
    aten.clip: _clamp,
    aten.clamp_min: _clamp,
    aten.clamp_max: lambda x, high: _clamp(x, high=high),
    aten.relu6: _relu6,
    aten.hardtanh: _hardtanh,
    aten.hardsigmoid: _hardsigmoid,
    aten.abs: _abs,
    aten.leaky_relu: _leaky,
    aten.prelu: _prelu,
    aten.softshrink: _softshrink,
}
