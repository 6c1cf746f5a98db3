"""Functions of one number, one row each: what all domains need to know of them.

A row says how a function is computed and how well, where it bends the other way and where it
turns. Boxes follow from the values at turning points and ends (`image`), lines from the bends
(`tightrope.domains.linear.curves`).

Bends and turns that are no floats are the nearest ones. That costs nothing: within half a unit u
of such a point the curvature, or the slope, is some u, and what follows is off by its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import ops

# Units in the last place that PyTorch's functions in float64 may be off.
UNITS = 8

Number = float | Tensor
Map = Callable[[Tensor], Tensor]
Piece = tuple[Tensor, Tensor, Any]


@dataclass(frozen=True)
class Curve:
    """A function on the line.

    `curvature` has a sign for each part of the line between `bends`: 1 convex, -1 concave, 0
    straight; the derivative at a bend is that of a part that is not straight. `turns` are the
    places where it stops rising or falling. `size` is what the error of a computed value is
    measured by, `steepness` the same for derivatives. Nothing is known of a box that has a number
    below `floor` or that contains the `pole`. The network's own function may be off by `defect`
    from this one for numbers above `defect_from`.
    """

    value: Map
    derivative: Map
    curvature: tuple[int, ...] = (1,)
    bends: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    size: Callable[[Tensor, Tensor], Tensor] = lambda x, value: value.abs()
    steepness: Callable[[Tensor, Tensor], Tensor] = lambda x, slope: slope.abs()
    limits: tuple[float, float] = (-math.inf, math.inf)
    floor: float = -math.inf
    pole: float | None = None
    defect: float = 0.0
    defect_from: float = math.inf

    def defined(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return where something is known of a box."""
        known = (lower >= self.floor) & (upper >= lower)
        if self.pole is not None:
            known = known & ((lower > self.pole) | (upper < self.pole))
        return known

    def tame(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return where `pieces` holds."""
        return self.defined(lower, upper)

    def turning_points(self, lower: Tensor, upper: Tensor) -> list[Tensor]:
        """Return where the function may take its extreme values, apart from the ends."""
        return [lower.new_tensor(t).expand_as(lower) for t in self.turns]

    def pieces(self, lower: Tensor, upper: Tensor) -> list[Piece]:
        """Return the parts of boxes on which the curvature has one sign; some may be empty."""
        points = [-math.inf, *self.bends, math.inf]
        return [
            (lower.clamp(a, b), upper.clamp(a, b), sign)
            for a, b, sign in zip(points[:-1], points[1:], self.curvature, strict=True)
        ]

    def lacking(self, upper: Tensor) -> Tensor | float:
        """Return how far the network's own function may be off on a box."""
        if not self.defect:
            return 0.0
        return torch.where(upper > self.defect_from, self.defect, 0.0).to(upper)


@dataclass(frozen=True)
class Wave(Curve):
    """A sine: it bends at the multiples of pi after `phase`, and turns between them."""

    phase: float = 0.0

    def tame(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return where `pieces` holds: it has three bends, which large numbers do not tell."""
        near = torch.maximum(lower.abs(), upper.abs()) < 1e6
        return near & (upper - lower < 2 * math.pi)

    def turning_points(self, lower: Tensor, upper: Tensor) -> list[Tensor]:
        """Return the first three; where there may be more, its limits are known."""
        first = torch.floor((lower - self.phase) / math.pi - 0.5)
        return [(first + (k + 0.5)) * math.pi + self.phase for k in range(4)]

    def pieces(self, lower: Tensor, upper: Tensor) -> list[Piece]:
        """Return the parts up to the fourth multiple of pi."""
        first = torch.floor((lower - self.phase) / math.pi)
        found: list[Piece] = []
        for k in range(4):
            a, b = ((first + n) * math.pi + self.phase for n in (k, k + 1))
            start = lower if k == 0 else torch.minimum(torch.maximum(lower, a), upper)
            end = upper if k == 3 else torch.minimum(torch.maximum(lower, b), upper)
            found.append((start, end, torch.where((first + k) % 2 == 0, -1, 1)))
        return found


def curve(op: ops.Function) -> Curve:
    """Return the row of a function."""
    return FUNCTIONS[op.name](*op.parameters)


def image(
    shape: Curve, lower: Tensor, upper: Tensor, *, units: float, rounding: float
) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value on boxes.

    With `rounding`, values may be off by so many `units`, and results hold nevertheless.
    """
    places: list[tuple[Tensor, Tensor | None]] = [(lower, None), (upper, None)]
    for turn in shape.turning_points(lower, upper):
        places.append((turn, (lower < turn) & (turn < upper)))
    least = lower.new_full((), math.inf).expand_as(lower)
    greatest = -least
    for place, inside in places:
        value = shape.value(place)
        low = high = value
        if rounding:
            low, high = _around(shape, place, value, units * rounding, shape.lacking(upper))
        if inside is not None:
            low, high = torch.where(inside, low, least), torch.where(inside, high, greatest)
        least, greatest = torch.minimum(least, low), torch.maximum(greatest, high)
    if isinstance(shape, Wave):
        tame = shape.tame(lower, upper)
        least, greatest = torch.where(tame, least, -1.0), torch.where(tame, greatest, 1.0)
    least, greatest = least.clamp(*shape.limits), greatest.clamp(*shape.limits)
    known = shape.defined(lower, upper)
    return torch.where(known, least, -math.inf), torch.where(known, greatest, math.inf)


def _around(
    shape: Curve, place: Tensor, value: Tensor, share: float, lacking: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return what a computed value may be in truth."""
    info = torch.finfo(value.dtype)
    error = share * shape.size(place, value) + info.tiny + lacking
    error = torch.where(value.isfinite(), error, 0.0)
    # What has overflowed, perhaps on its way to the result, is among the largest numbers.
    return (
        (value - error).nan_to_num(nan=-math.inf, posinf=info.max / 16, neginf=-math.inf),
        (value + error).nan_to_num(nan=math.inf, posinf=math.inf, neginf=info.min / 16),
    )


# --- rows -------------------------------------------------------------------------------------


def _exp() -> Curve:
    return Curve(torch.exp, torch.exp, limits=(0.0, math.inf))


def _log() -> Curve:
    # Near 1 a value is as good as its argument.
    return Curve(torch.log, torch.reciprocal, (-1,), floor=0.0)


def _sqrt() -> Curve:
    slope = lambda x: 0.5 / torch.sqrt(x)  # noqa: E731
    return Curve(torch.sqrt, slope, (-1,), floor=0.0, limits=(0.0, math.inf))


def _reciprocal() -> Curve:
    slope = lambda x: -1 / (x * x)  # noqa: E731
    return Curve(torch.reciprocal, slope, (-1, 1), (0.0,), pole=0.0)


def _power(exponent: float) -> Curve:
    """Any power but 0 and 1; of numbers from zero on unless the exponent is an integer."""
    p = exponent
    value: Map = lambda x: torch.pow(x, p)  # noqa: E731
    slope: Map = lambda x: p * torch.pow(x, p - 1)  # noqa: E731
    pole = 0.0 if p < 0 else None
    if p != int(p):
        sign = -1 if 0 < p < 1 else 1
        return Curve(value, slope, (sign,), floor=0.0, pole=pole, limits=(0.0, math.inf))
    if p % 2:
        return Curve(value, slope, (-1, 1), (0.0,), pole=pole)
    if p < 0:
        return Curve(value, slope, (1, 1), (0.0,), pole=pole, limits=(0.0, math.inf))
    return Curve(value, slope, turns=(0.0,), limits=(0.0, math.inf))


def _one(x: Tensor, slope: Tensor) -> Tensor:
    return 1 + slope.abs()


def _wave(value: Map, slope: Map, phase: float) -> Curve:
    size = lambda x, v: 1 + 0 * v  # noqa: E731
    return Wave(value, slope, (), size=size, steepness=_one, limits=(-1.0, 1.0), phase=phase)


def _gelu() -> Curve:
    """`x Phi(x)`, whose second derivative is `(2 - x^2) phi(x)`."""

    def slope(x: Tensor) -> Tensor:
        return torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    bend = math.sqrt(2)
    return Curve(
        *(F.gelu, slope, (-1, 1, -1), (-bend, bend), (-0.7517915246935645,)),
        # Where it is computed by a sum that nearly cancels.
        size=lambda x, value: x.abs(),
        steepness=_one,
        limits=(-0.17, math.inf),
    )


def _gelu_tanh() -> Curve:
    """`x / 2 (1 + tanh(b (x + k x^3)))`."""
    b, k = math.sqrt(2 / math.pi), 0.044715

    def slope(x: Tensor) -> Tensor:
        t = torch.tanh(b * (x + k * x * x * x))
        rest = (1 - t) * (1 + t) * b * (1 + 3 * k * x * x)
        # Far out the square may overflow where the other factor is zero.
        return (1 + t) / 2 + x / 2 * torch.where(t.abs() == 1, 0.0, rest)

    bend = 1.4185040087908284
    return Curve(
        *(lambda x: F.gelu(x, approximate="tanh"), slope, (-1, 1, -1), (-bend, bend)),
        turns=(-0.7524614220710163,),
        size=lambda x, value: x.abs(),
        steepness=lambda x, s: 8 + s.abs(),
        limits=(-0.1701, math.inf),
    )


def _silu() -> Curve:
    def slope(x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return s + torch.where(s == 0, 0.0, x) * s * torch.sigmoid(-x)

    bend = 2.399357280515468
    return Curve(
        *(F.silu, slope, (-1, 1, -1), (-bend, bend), (-1.2784645427610738,)),
        steepness=_one,
        limits=(-0.2785, math.inf),
    )


def _mish() -> Curve:
    def slope(x: Tensor) -> Tensor:
        t, s = torch.tanh(F.softplus(x)), torch.sigmoid(x)
        return t + torch.where(s == 0, 0.0, x) * s * (1 - t) * (1 + t)

    return Curve(
        *(F.mish, slope, (-1, 1, -1), (-2.256376396360793, 1.4905711794854285)),
        turns=(-1.1924312145154952,),
        # PyTorch takes x for softplus(x) above 20, where it makes no difference to the tanh.
        steepness=lambda x, s: 4 + s.abs(),
        limits=(-0.3089, math.inf),
    )


def _elu(alpha: float, scale: float, factor: float) -> Curve:
    """`scale x` above zero, `scale alpha (exp(factor x) - 1)` below."""
    low = alpha * scale
    return Curve(
        lambda x: torch.ops.aten.elu(x, alpha, scale, factor),
        lambda x: torch.where(x > 0, scale, low * factor * torch.exp(factor * x.clamp(max=0))),
        (1, 0),
        (0.0,),
        size=lambda x, value: value.abs() + low * (x < 0),
        steepness=lambda x, s: s.abs() + low * factor,
    )


def _softplus(beta: float, threshold: float) -> Curve:
    """`log(1 + exp(beta x)) / beta`, for which PyTorch takes x above the threshold."""
    return Curve(
        lambda x: F.softplus(x, beta, threshold),
        lambda x: torch.sigmoid(beta * x),
        # The exponential is off by as much as its argument.
        size=lambda x, value: value.abs() * (1 + beta * x.abs()),
        steepness=lambda x, s: 1 + s.abs() * (1 + beta * x.abs()),
        limits=(0.0, math.inf),
        defect=math.log1p(math.exp(-threshold)) / beta * (1 + 1e-9),
        defect_from=threshold / beta * (1 - 1e-9),
    )


def _hardswish() -> Curve:
    """`x min(max(x + 3, 0), 6) / 6`."""
    return Curve(
        F.hardswish,
        lambda x: torch.where(x < -3, 0.0, torch.where(x > 3, 1.0, (2 * x + 3) / 6)),
        (0, 1, 0),
        (-3.0, 3.0),
        (-1.5,),
        size=lambda x, value: 3 * x.abs(),
        steepness=_one,
        limits=(-0.376, math.inf),
    )


def _erf() -> Curve:
    return Curve(
        torch.erf,
        lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x),
        (1, -1),
        (0.0,),
        steepness=lambda x, s: 2 + s.abs(),
        limits=(-1.0, 1.0),
    )


def _atan() -> Curve:
    return Curve(
        torch.atan,
        lambda x: 1 / (1 + x * x),
        (1, -1),
        (0.0,),
        limits=(-math.pi / 2 * (1 + 1e-15), math.pi / 2 * (1 + 1e-15)),
    )


def _exponential(base: float) -> Curve:
    """A power of a positive number that is not 1."""
    rate = math.log(base)
    value: Map = lambda x: torch.pow(base, x)  # noqa: E731
    return Curve(value, lambda x: rate * torch.pow(base, x), limits=(0.0, math.inf))


def _sinh() -> Curve:
    return Curve(torch.sinh, torch.cosh, (-1, 1), (0.0,))


def _cosh() -> Curve:
    return Curve(torch.cosh, torch.sinh, turns=(0.0,), limits=(1.0, math.inf))


FUNCTIONS: dict[str, Callable[..., Curve]] = {
    "exp": _exp,
    "exponential": _exponential,
    "sinh": _sinh,
    "cosh": _cosh,
    "log": _log,
    "sqrt": _sqrt,
    "reciprocal": _reciprocal,
    "power": _power,
    "sin": lambda: _wave(torch.sin, torch.cos, 0.0),
    "cos": lambda: _wave(torch.cos, lambda x: -torch.sin(x), -math.pi / 2),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "mish": _mish,
    "elu": _elu,
    "softplus": _softplus,
    "hardswish": _hardswish,
    "erf": _erf,
    "atan": _atan,
}
