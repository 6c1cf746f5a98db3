"""Lines below and above each activation function on an interval.

For pre-activations h in [l, u] an activation f is enclosed by two lines,
`lower_slope h + lower_intercept <= f(h) <= upper_slope h + upper_intercept`.

With `rounding` (as in `tightrope.domains.interval`) the slopes are taken as the numbers they are
and the intercepts are moved outward by more than their own rounding error, so that the lines
enclose f in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.curves import function_lines
from tightrope.domains.linear.lines import Lines as Lines
from tightrope.graph import ops


def lines(op: ops.Op, box: Box, *, rounding: float = 0.0) -> Lines:
    """Return the default lines of an activation: the adaptive choice for ReLU."""
    return RULES[type(op)](op, box.lower, box.upper, rounding)


def unstable(box: Box) -> Tensor:
    """Return where zero lies strictly inside: the neurons a ReLU bends."""
    return (box.lower < 0) & (box.upper > 0)


def kinked(op: ops.Op) -> bool:
    """Return whether any line through zero lies below, of a slope between those of the sides."""
    return isinstance(op, ops.Relu) or (isinstance(op, ops.LeakyRelu) and op.slope <= 1)


def free_slopes(op: ops.Op, box: Box) -> Tensor | None:
    """Return where the lower slope may be anything between the slopes of the two sides."""
    return unstable(box) if kinked(op) else None


def _bent(op: ops.Relu | ops.LeakyRelu, l: Tensor, u: Tensor, rounding: float) -> Lines:  # noqa: E741
    """ReLU and LeakyReLU: the chord on one side, a line through the origin on the other."""
    left = 0.0 if isinstance(op, ops.Relu) else op.slope
    bends = (l < 0) & (u > 0)
    # Tensors, because `where` would turn a pair of numbers into float32.
    one, low = l.new_tensor(1.0), l.new_tensor(left)
    # Where neither end decides (one of them is not a number) there is no line.
    stable = torch.where(l >= 0, one, torch.where(u <= 0, low, l.new_tensor(torch.nan)))
    width = torch.where(bends, u - l, 1.0)
    # A share of the width, so that neither product can overflow where the slope would not.
    chord = left + (1.0 - left) * (u / width)
    chord = chord.clamp(min(left, 1.0), max(left, 1.0))
    # The chord's line must clear both ends: (l, left l) and (u, u).
    ends = ((left - chord) * l, (1.0 - chord) * u)
    through_zero = torch.where(u > -l, one, low)  # the side that is wider
    zero = torch.zeros_like(l)
    slope = torch.where(bends, chord, stable)
    if left <= 1:
        peak = torch.maximum(*ends)
        if rounding:
            peak = peak + 8 * rounding * (l.abs() + u.abs()) + torch.finfo(l.dtype).tiny
        return Lines(
            torch.where(bends, through_zero, stable), zero, slope, torch.where(bends, peak, zero)
        )
    dip = torch.minimum(*ends)  # left > 1: the function is concave
    if rounding:
        dip = dip - 8 * rounding * left * (l.abs() + u.abs()) - torch.finfo(l.dtype).tiny
    return Lines(
        slope, torch.where(bends, dip, zero), torch.where(bends, through_zero, stable), zero
    )


class _Curve(NamedTuple):
    """An increasing odd-symmetric-like S: convex below zero, concave above."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    # Where below zero the derivative has a given value.
    touch: Callable[[Tensor], Tensor]


def _sigmoid_touch(slope: Tensor) -> Tensor:
    root = torch.sqrt((1 - 4 * slope).clamp(min=0.0))
    share = ((1 - root) / 2).clamp(min=torch.finfo(slope.dtype).tiny)
    return torch.log(share) - torch.log1p(-share)


_CURVES: dict[type[ops.Op], _Curve] = {
    ops.Sigmoid: _Curve(
        torch.sigmoid, lambda h: torch.sigmoid(h) * torch.sigmoid(-h), _sigmoid_touch
    ),
    ops.Tanh: _Curve(
        torch.tanh,
        lambda h: 1 / torch.cosh(h.clamp(-300, 300)) ** 2,
        lambda k: -torch.atanh(torch.sqrt((1 - k).clamp(0.0, 1.0)).clamp(max=1 - 1e-12)),
    ),
}


def _curved(op: ops.Sigmoid | ops.Tanh, l: Tensor, u: Tensor, rounding: float) -> Lines:  # noqa: E741
    """Sigmoid and tanh: chords and tangents, the same construction from both sides."""
    curve = _CURVES[type(op)]
    mirrored = _mirror(op, curve)
    lower_slope = _slope_below(curve, l, u)
    upper_slope = _slope_below(mirrored, -u, -l)
    lower = _clearance(curve, lower_slope, l, u, rounding)
    upper = -_clearance(mirrored, upper_slope, -u, -l, rounding)
    return Lines(lower_slope, lower, upper_slope, upper)


def _mirror(op: ops.Op, curve: _Curve) -> _Curve:
    """Return `-f(-h)`: its lines from below are those of f from above."""
    return _Curve(
        lambda h: -curve.value(-h), curve.derivative, curve.touch
    )  # the derivative is even and both bend at zero


def _slope_below(curve: _Curve, l: Tensor, u: Tensor) -> Tensor:  # noqa: E741
    """Return the slope of a good line from below: the chord or a tangent on the convex side.

    Any slope is sound, because its intercept is computed from it.
    """
    width = (u - l).clamp(min=torch.finfo(l.dtype).tiny)
    chord = (curve.value(u) - curve.value(l)) / width
    chord = torch.where(u - l > 1e-6, chord, curve.derivative((l + u) / 2))
    tangent = curve.derivative((l + u) / 2)
    # Mixed interval: the tangent through the upper end, found by bisection on its touch point.
    low, high = l, torch.minimum(u, torch.zeros_like(u))
    for _ in range(40):
        middle = (low + high) / 2
        above = curve.value(middle) + curve.derivative(middle) * (u - middle) > curve.value(u)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    through_end = curve.derivative(low)
    mixed = torch.where(chord <= curve.derivative(l), chord, through_end)
    slope = torch.where(u <= 0, tangent, torch.where(l >= 0, chord, mixed))
    return torch.where(torch.isfinite(slope), slope, torch.zeros_like(slope)).clamp(min=0.0)


def _clearance(
    curve: _Curve,
    slope: Tensor,
    l: Tensor,  # noqa: E741
    u: Tensor,
    rounding: float,
) -> Tensor:
    """Return a lower bound on `f(h) - slope h` over [l, u].

    On the concave side the minimum is at an end: the right one, or the left one if the interval
    has no convex side. On the convex side, up to zero, the function lies above its tangent at
    any point t, so `g(t) - |g'(t)| (u - l)` is a bound for every t there; at the touch point g'
    is as good as zero.
    """
    ends = torch.minimum(_gap(curve, slope, l), _gap(curve, slope, u))
    right = u.clamp(max=0.0)  # the end of the convex side
    touch = curve.touch(slope)
    touch = torch.where(torch.isfinite(touch), touch, l)
    at = torch.maximum(torch.minimum(touch, right), l)
    tilt = curve.derivative(at) - slope
    inside = (at > l) & (at < right)
    # At an end, the tangent leads up into the interval or the end itself is the minimum.
    dip = torch.where(inside, tilt.abs(), torch.where(at <= l, (-tilt).clamp(min=0), tilt.clamp(0)))
    dip = dip + 16 * (rounding or 0.0) * (slope.abs() + 1)
    convex = _gap(curve, slope, at) - dip * (right - l).clamp(min=0.0)
    bound = torch.where(l < 0, torch.minimum(ends, convex), ends)
    if rounding:
        size = 1 + slope.abs() * torch.maximum(l.abs(), u.abs())
        bound = bound - 32 * rounding * size
    return bound


def _gap(curve: _Curve, slope: Tensor, h: Tensor) -> Tensor:
    return curve.value(h) - slope * h


RULES: dict[type[ops.Op], Callable[[Any, Tensor, Tensor, float], Lines]] = {
    ops.Relu: _bent,
    ops.LeakyRelu: _bent,
    ops.Sigmoid: _curved,
    ops.Tanh: _curved,
    ops.Function: function_lines,
}
