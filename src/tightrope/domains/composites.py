"""Boxes of what is composed of functions and products: those of what they are made of."""

from __future__ import annotations

import torch

from tightrope.box import Box
from tightrope.domains.rounding import growth, outward, tiny
from tightrope.graph import ops
from tightrope.graph.functions import UNITS
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
    """Return the box of a softmax: each number is largest where it is and the others are least.

    It is `exp(-L)` with `L = log(sum_j exp(x_j - x_i))`, which does not overflow and is never
    negative. Differences d to the largest one are off by d u, their exponentials by as much of
    themselves, and d exp(-d) is at most 1; so L is off by some units for each term, and its own.
    """
    gaps = difference_box(ops.Differences(), box, rounding=rounding)
    low, high = (torch.logsumexp(t, -1) for t in gaps.corners)
    if rounding:
        share = growth(4 * box.lower.shape[-1] + 8 * UNITS, rounding)
        low, high = (t - s * share * (1 + t.abs()) for t, s in ((low, 1), (high, -1)))
    low = low.clamp(min=0)
    least, greatest = (-high, -low) if op.logarithm else (torch.exp(-high), torch.exp(-low))
    if rounding and not op.logarithm:
        slack = 2 * UNITS * rounding
        least = (least * (1 - slack) - tiny(least)).clamp(min=0)
        greatest = (greatest * (1 + slack) + tiny(greatest)).clamp(max=1)
        # Bounds that are not numbers say nothing that is not known.
        least, greatest = least.nan_to_num(nan=0.0), greatest.nan_to_num(nan=1.0)
    return Box(least, greatest)


def standardized_box(op: ops.Standardize, box: Box, *, rounding: float) -> Box:
    """Return the box of standardised numbers."""
    return _through_parts(op, box, rounding)
