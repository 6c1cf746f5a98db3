"""Rounding outward: what makes a bound that was computed hold in exact arithmetic.

With unit roundoff u, a sum of n products computed in any order is off by at most
`g = n u / (1 - n u)` times the sum of the products' absolute values. `rounding` is
`torch.finfo(dtype).eps` = 2 u for bounds that must hold, and 0 where none is needed (training).
(`tightrope.graph.rounding` is about two computations of one value; it has a `growth` of its own.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.box import BallBox, Box


def growth(terms: int, rounding: float) -> float:
    """Return the relative error of a sum of so many products, and some more around it."""
    steps = (terms + 8) * rounding
    return steps / (1 - steps)


def tiny(x: Tensor) -> float:
    """Return the smallest normal number: what covers an underflow."""
    return torch.finfo(x.dtype).tiny


def down(x: Tensor) -> Tensor:
    """Return the next floats below."""
    return torch.nextafter(x, torch.full_like(x, -torch.inf))


def up(x: Tensor) -> Tensor:
    """Return the next floats above."""
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def outward(lower: Tensor, upper: Tensor, rounding: float) -> Box:
    """Return the box of two corners that were rounded once each."""
    return Box(down(lower), up(upper)) if rounding else Box(lower, upper)


def summed(first: Box, second: Box, rounding: float) -> Box:
    """Return the box of a sum. Sums of whole numbers are exact: steps that are compared stay so."""
    ends = [(first.lower, second.lower), (first.upper, second.upper)]
    lower, upper = (a + b for a, b in ends)
    if not rounding:
        return Box(lower, upper)
    exact = [_whole(a) & _whole(b) for a, b in ends]
    return Box(torch.where(exact[0], lower, down(lower)), torch.where(exact[1], upper, up(upper)))


def _whole(x: Tensor) -> Tensor:
    """Return where numbers are whole, and so small that floats hold the sum of any two."""
    return (x.frac() == 0) & (x.abs() < 1 / torch.finfo(x.dtype).eps)


def around(center: Tensor, radius: Tensor, rounding: float) -> Box:
    """Return the box around a centre; as corners if it has to hold."""
    if not rounding:
        return Box.around(center, radius)
    return Box(down(center - radius), up(center + radius))


def cornered(box: Box, rounding: float) -> Box:
    """Return a box held as corners; the true ones may lie between floating-point numbers."""
    if rounding and box.centered:
        return around(*box.middle, rounding)
    return box if isinstance(box, BallBox) else Box(*box.corners)
