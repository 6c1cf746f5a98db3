"""Boxes of distance neurons: exact, neuron by neuron, and no wider than their inputs' boxes."""

from __future__ import annotations

from tightrope.box import Box
from tightrope.domains.rounding import down, growth, tiny, up
from tightrope.graph import ops
from tightrope.graph.distance import neurons


def distance_box(op: ops.Distance, box: Box, *, rounding: float) -> Box:
    """Return the box of distances.

    On `[l, u]`, `|x - w|` takes all values from `max(l - w, w - u, 0)` to `max(u - w, w - l)`, and
    a neuron rises with each of them: its least value is that of all the least ones. If every radius
    is r, the upper bound is the value at the middle plus r (times the sum of the shares), and the
    lower one at least that less r.
    """
    lower, upper = box.corners
    low = neurons(lower, upper, op.weight, op.shares)
    high = neurons(upper, lower, op.weight, op.shares)
    if not rounding:
        return Box(low, high)
    # Each difference is rounded once, and then a sum of few products.
    share = growth(len(op.shares) + 1, rounding)
    low, high = low - share * low - tiny(low), high + share * high + tiny(high)
    return Box(down(low).clamp(min=0), up(high))
