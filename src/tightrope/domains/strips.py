"""Strips around ReLUs: `slope * x + middle ± radius` between two parallel lines.

DiffAI (Mirman et al. 2018) has four of them for a neuron that crosses zero, l < 0 < u. They differ
by the slope alone, which says how much of what is known of x is kept; the strip is then the
narrowest one that holds max(x, 0) on [l, u]. "smooth" goes from one slope to the other without a
jump, in a wider strip. What lies on one side of zero is scaled exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tightrope.box import Box

SMOOTH = 1e-4  # keeps the share of "smooth" from 0 / 0


class Strip(NamedTuple):
    """`slope * x + middle ± radius`, per neuron; of a ReLU, `middle` and `radius` are one (mu)."""

    slope: Tensor
    middle: Tensor
    radius: Tensor


Slope = Callable[[Tensor, Tensor], Tensor]


def deepz_slope(lower: Tensor, upper: Tensor) -> Tensor:
    """`u / (u - l)`, the chord's: the smallest area (Singh et al. 2018; DiffAI's NIPS)."""
    return upper / (upper - lower)


def box_slope(lower: Tensor, upper: Tensor) -> Tensor:
    """0: all that is left is [0, u]."""
    return torch.zeros_like(lower)


def switch_slope(lower: Tensor, upper: Tensor) -> Tensor:
    """0 where more than half of [l, u] is negative, else 1: the narrower of the two."""
    return (-lower <= upper).to(lower.dtype)


def smooth_slope(lower: Tensor, upper: Tensor) -> Tensor:
    """`u / (u - l)` but for a little: the share of the strip of slope 1."""
    return 1 + lower / (upper - lower + SMOOTH)


SLOPES: dict[str, Slope] = {
    "deepz": deepz_slope,
    "box": box_slope,
    "switch": switch_slope,
    "smooth": smooth_slope,
}


def strip(relu: str, box: Box, *, negative: float = 0.0) -> Strip:
    """Return the strip of that name around a ReLU, or a LeakyReLU of that slope below zero."""
    lower, upper = box.corners
    crossing = (lower < 0) & (upper > 0)
    # Neurons that do not cross zero take no quotient, which would have a gradient.
    low, high = torch.where(crossing, lower, -1.0), torch.where(crossing, upper, 1.0)
    kept = SLOPES[relu](low, high)
    slope = negative + (1 - negative) * kept
    if relu == "smooth":  # the same shares of both strips
        mu = (high - kept * (low + high)) / 2
        return _fitted(box, negative, slope, (1 - negative) * mu, abs(1 - negative) * mu)
    return around(box, slope, negative=negative)


def around(box: Box, slope: Tensor, *, negative: float = 0.0) -> Strip:
    """Return the narrowest strip of a slope around a ReLU or LeakyReLU."""
    lower, upper = box.corners
    # The gap to a line of that slope is piecewise linear: extreme at an end or at the kink.
    gaps = torch.stack(((negative - slope) * lower, torch.zeros_like(lower), upper - slope * upper))
    highest, lowest = gaps.amax(0), gaps.amin(0)
    return _fitted(box, negative, slope, (highest + lowest) / 2, (highest - lowest) / 2)


def _fitted(box: Box, negative: float, slope: Tensor, middle: Tensor, radius: Tensor) -> Strip:
    """Keep the strip where a neuron crosses zero; elsewhere the activation is a line."""
    lower, upper = box.corners
    crossing = (lower < 0) & (upper > 0)
    exact = torch.where(lower >= 0, torch.ones_like(lower), negative)
    return Strip(
        torch.where(crossing, slope, exact),
        torch.where(crossing, middle, 0.0),
        torch.where(crossing, radius, 0.0),
    )
