"""Boxes and parallel lines around functions of one number, from their rows in `graph/functions`."""

from __future__ import annotations

import torch

from tightrope.box import Box
from tightrope.graph import ops
from tightrope.graph.functions import UNITS, curve, image


def function_box(op: ops.Function, box: Box, *, rounding: float) -> Box:
    """Return the box of a function's values."""
    lower, upper = box.corners
    if rounding:  # bounds that are not numbers say nothing
        lower = torch.where(lower.isnan(), -torch.inf, lower)
        upper = torch.where(upper.isnan(), torch.inf, upper)
    lower, upper = lower.clamp(min=op.least), upper.clamp(min=op.least)
    return Box(*image(curve(op), lower, upper, units=UNITS, rounding=rounding))
