"""Boxes and parallel lines around functions of one number, from their rows in `graph/functions`."""

from __future__ import annotations

from tightrope.box import Box
from tightrope.graph import ops
from tightrope.graph.functions import UNITS, curve, image


def function_box(op: ops.Function, box: Box, *, rounding: float) -> Box:
    """Return the box of a function's values."""
    lower, upper = (t.clamp(min=op.least) for t in box.corners)
    return Box(*image(curve(op), lower, upper, units=UNITS, rounding=rounding))
