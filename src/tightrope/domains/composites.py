"""Boxes of what is composed of functions and products: those of what they are made of."""

from __future__ import annotations

import torch

from tightrope.box import Box
from tightrope.domains.rounding import outward
from tightrope.graph import ops
from tightrope.graph.lowering import lowered_op


def _through_parts(op: ops.Op, box: Box, rounding: float) -> Box:
    from tightrope.domains import interval  # which lists these rules

    lower = box.lower
    return interval.bounds(lowered_op(op, tuple(lower.shape[1:]), lower), box, rounding=rounding)[0]


def difference_box(op: ops.Differences, box: Box, *, rounding: float) -> Box:
    """Return the box of differences; those of a number and itself are zero."""
    lower, upper = box.corners
    least = lower.unsqueeze(-2) - upper.unsqueeze(-1)
    greatest = upper.unsqueeze(-2) - lower.unsqueeze(-1)
    itself = torch.eye(lower.shape[-1], dtype=torch.bool, device=lower.device)
    found = outward(least, greatest, rounding)
    return Box(*(t.masked_fill(itself, 0.0) for t in found.corners))


def softmax_box(op: ops.Softmax, box: Box, *, rounding: float) -> Box:
    """Return the box of a softmax: each number is largest where it is and the others are least."""
    return _through_parts(op, box, rounding)


def standardized_box(op: ops.Standardize, box: Box, *, rounding: float) -> Box:
    """Return the box of standardised numbers."""
    return _through_parts(op, box, rounding)
