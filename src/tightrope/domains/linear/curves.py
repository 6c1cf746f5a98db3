"""Lines below and above a function of one number, from its row in `graph/functions`.

A line of any slope s is below the function f on [l, u] if its intercept is at most the least value
of g(h) = f(h) - s h there. On a part where f is concave that is at one of the ends. Where it is
convex, g lies above its tangents: left of t1 above g(t1) if g falls there, right of t2 above g(t2)
if g rises there, and between them above the tangents at both. With `rounding`, computed values and
derivatives are off by a few units, and all of it is subtracted: intercepts hold in exact
arithmetic. Slopes are chosen so that the line is as high as possible in the middle of [l, u],
which is as much area as possible; none of what is done to find them matters for soundness.

Lines from above are those of -f from below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.domains.linear.lines import Lines
from tightrope.graph import ops
from tightrope.graph.functions import UNITS, Curve, curve, image

# Halvings of the interval in which a line touches a convex part.
HALVINGS = 24
# Points on each side of the middle that slopes are looked for among, and the same once more.
GRID, FINER = 6, 5
# Roundings of a line's value: of the function (UNITS), the product, the difference, and more.
VALUE, SLOPE = 2 * UNITS, 4 * UNITS


def function_lines(op: ops.Function, l: Tensor, u: Tensor, rounding: float) -> Lines:  # noqa: E741
    """Return the lines of a function on intervals."""
    shape = curve(op)
    l, u = l.clamp(min=op.least), u.clamp(min=op.least)  # noqa: E741
    least, greatest = image(shape, l, u, units=UNITS, rounding=rounding)
    low_slope, low = _below(_Side(shape, 1.0, l, u, rounding), least)
    high_slope, high = _below(_Side(shape, -1.0, l, u, rounding), -greatest)
    return Lines(low_slope, low, -high_slope, -high)


def parallel_lines(op: ops.Function, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: E741
    """Return one slope and the intercepts of lines below and above; a plain computation."""
    shape = curve(op)
    l, u = l.clamp(min=op.least), u.clamp(min=op.least)  # noqa: E741
    least, greatest = image(shape, l, u, units=UNITS, rounding=0.0)
    slope = (shape.value(u) - shape.value(l)) / (u - l)
    slope = torch.where(u > l, slope, 0.0)
    low = _Side(shape, 1.0, l, u, 0.0).clearance(slope)
    high = -_Side(shape, -1.0, l, u, 0.0).clearance(-slope)
    fits = shape.tame(l, u) & torch.isfinite(slope) & torch.isfinite(low) & torch.isfinite(high)
    return (
        torch.where(fits, slope, 0.0),
        torch.where(fits, low, least),
        torch.where(fits, high, greatest),
    )


@dataclass(frozen=True)
class _Side:
    """A function (or minus it) on intervals."""

    curve: Curve
    sign: float
    low: Tensor
    high: Tensor
    rounding: float

    def value(self, h: Tensor) -> Tensor:
        return self.sign * self.curve.value(h)

    def derivative(self, h: Tensor) -> Tensor:
        return self.sign * self.curve.derivative(h)

    def gap(self, slope: Tensor, h: Tensor) -> Tensor:
        """Return a lower bound of `f(h) - slope h` at points."""
        value = self.value(h)
        gap = value - slope * h
        if not self.rounding:
            return gap
        size = self.curve.size(h, value) + (slope * h).abs()
        return gap - VALUE * self.rounding * size - torch.finfo(h.dtype).tiny

    def tilt(self, slope: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivative of the gap, and by how much it may be off."""
        derivative = self.derivative(h)
        if not self.rounding:
            return derivative - slope, torch.zeros_like(slope)
        size = self.curve.steepness(h, derivative) + slope.abs()
        return derivative - slope, SLOPE * self.rounding * size + torch.finfo(h.dtype).tiny

    def clearance(self, slope: Tensor, touch: Tensor | None = None) -> Tensor:
        """Return a lower bound of the gap over the intervals; `touch` is a guess where it is."""
        # Every interval ends in parts whose ends are looked at.
        bound = torch.minimum(self.gap(slope, self.low), self.gap(slope, self.high))
        for a, b, sign in self.curve.pieces(self.low, self.high):
            if isinstance(sign, int) and self.sign * sign <= 0:
                part = torch.minimum(self.gap(slope, a), self.gap(slope, b))
            else:
                part = self._convex(slope, a, b, touch)
                if not isinstance(sign, int):
                    ends = torch.minimum(self.gap(slope, a), self.gap(slope, b))
                    part = torch.where(self.sign * sign > 0, part, ends)
            # Of a part that is a point, nothing but its value matters, and both ends have that.
            bound = torch.where(a < b, torch.minimum(bound, part), bound)
        return bound if not self.rounding else bound - 2 * self.curve.lacking(self.high)

    def _convex(self, slope: Tensor, a: Tensor, b: Tensor, touch: Tensor | None) -> Tensor:
        """Return a lower bound of the gap on parts where it is convex."""
        if touch is not None:
            t = torch.minimum(torch.maximum(touch, a), b)
            tilt, off = self.tilt(slope, t)
            down, up = (-tilt).clamp(min=0) + off, tilt.clamp(min=0) + off
            lost = torch.maximum(_times(down, b - t), _times(up, t - a))
            return self.gap(slope, t) - lost * (1 + 4 * self.rounding)
        low, high = a, b
        for _ in range(HALVINGS):
            middle = low / 2 + high / 2
            falls = self.derivative(middle) < slope
            low, high = torch.where(falls, middle, low), torch.where(falls, high, middle)
        width = (high - low) * (1 + 4 * self.rounding)
        (tilt, off), (rise, loose) = self.tilt(slope, low), self.tilt(slope, high)
        at_low, at_high = self.gap(slope, low), self.gap(slope, high)
        between = torch.fmax(
            at_low - _times((-tilt).clamp(min=0) + off, width),
            at_high - _times(rise.clamp(min=0) + loose, width),
        )
        # Left of `low` the gap falls and right of `high` it rises, but for what is off.
        left = at_low - _times(off, (low - a) * (1 + 4 * self.rounding))
        right = at_high - _times(loose, (b - high) * (1 + 4 * self.rounding))
        return torch.minimum(between, torch.minimum(left, right))


def _times(slope: Tensor, width: Tensor) -> Tensor:
    """Return a product that is zero where the width is, however steep it is."""
    return torch.where(width > 0, slope * width, 0.0)


def _below(side: _Side, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return slope and intercept of a good line from below; a constant where there is none."""
    middle = side.low / 2 + side.high / 2
    tangent = side.derivative(middle)
    width = side.high - side.low
    chord = (side.value(side.high) - side.value(side.low)) / width
    chord = torch.where(torch.isfinite(chord), chord, tangent)
    curvature = side.curve.curvature
    candidates: list[tuple[Tensor, Tensor | None]]
    if curvature and all(side.sign * sign > 0 for sign in curvature):
        candidates = [(tangent, middle)]
    elif curvature and all(side.sign * sign < 0 for sign in curvature):
        candidates = [(chord, None)]
    else:
        candidates = [(s, None) for s in (tangent, chord, _secant(side, middle))]
    tame = side.curve.tame(side.low, side.high)
    slope, best = torch.zeros_like(least), least
    for proposed, touch in candidates:
        bound = side.clearance(proposed, touch)
        fits = torch.isfinite(proposed) & torch.isfinite(bound) & tame
        better = fits & ~(proposed * middle + bound <= slope * middle + best)
        slope, best = torch.where(better, proposed, slope), torch.where(better, bound, best)
    return slope, best


def _secant(side: _Side, middle: Tensor) -> Tensor:
    """Return the slope of the line through two points of the graph that is lowest in the middle.

    That is the slope of the convex hull there, unless the hull touches the function in the middle.
    """
    marks = [side.low.new_tensor(bend) for bend in side.curve.bends]
    shares = torch.arange(GRID + 1, dtype=side.low.dtype, device=side.low.device) / GRID
    left = [side.low + share * (middle - side.low) for share in shares]
    right = [side.high - share * (side.high - middle) for share in shares]
    left += [torch.minimum(torch.maximum(mark, side.low), middle) for mark in marks]
    right += [torch.minimum(torch.maximum(mark, middle), side.high) for mark in marks]
    a, b = _lowest(side, torch.stack(left), torch.stack(right), middle)
    steps = torch.linspace(-1, 1, FINER, dtype=shares.dtype, device=shares.device)
    left = [a + s * (middle - side.low) / GRID for s in steps]
    right = [b + s * (side.high - middle) / GRID for s in steps]
    left = [torch.minimum(torch.maximum(x, side.low), middle) for x in (a, *left)]
    right = [torch.minimum(torch.maximum(x, middle), side.high) for x in (b, *right)]
    a, b = _lowest(side, torch.stack(left), torch.stack(right), middle)
    return (side.value(b) - side.value(a)) / (b - a)


def _lowest(side: _Side, left: Tensor, right: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two points, one of each side, whose secant is lowest in the middle."""
    first, last = side.value(left)[:, None], side.value(right)[None]
    share = (middle - left)[:, None] / (right[None] - left[:, None])
    height = first + share.nan_to_num(0.0) * (last - first)
    best = height.nan_to_num(torch.inf).flatten(0, 1).argmin(0, keepdim=True)
    count = len(right)
    return (
        left.gather(0, best // count)[0],
        right.gather(0, best % count)[0],
    )
