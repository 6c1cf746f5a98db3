"""Boxes of step functions: constant where the order of their inputs is proved, else their range.

They round nothing: with inputs that hold in exact arithmetic, so do these.
"""

from __future__ import annotations

import torch

from tightrope.box import Box
from tightrope.graph import ops, steps


def step_box(op: ops.Step, box: Box, *, rounding: float) -> Box:
    """Return the values of a step function between two ends."""
    return Box(*steps.image(op, *box.corners))


def choice_box(op: ops.Where, condition: Box, a: Box, b: Box, *, rounding: float) -> Box:
    """Return the box of the chosen value, or the smallest one around both."""
    low, high = condition.corners
    first = (low > 0) | (high < 0)
    second = (low == 0) & (high == 0)
    lower = torch.where(
        first, a.lower, torch.where(second, b.lower, torch.minimum(a.lower, b.lower))
    )
    upper = torch.where(
        first, a.upper, torch.where(second, b.upper, torch.maximum(a.upper, b.upper))
    )
    return Box(lower, upper)


def place_box(op: ops.ArgMax, box: Box, *, rounding: float) -> Box:
    """Return the first and the last place that can hold the largest number."""
    return Box(*steps.possible_places(op, *box.corners))
