"""Bounds by Lipschitz constants: a point, and how far the images of a box can be from it.

Distance layers change no output by more than the largest change of an input (times the sum of
their shares), so that one number per sample says it all: the radius, and what is rounded on the
way, which does not grow either. Where other operations come, the box around the point goes on by
intervals; so does the box before the first distance layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.rounding import down, growth, tiny, up
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES


class Spread(Box):
    """The box of all points within `reach`, one number per sample, of `point`."""

    def __init__(self, point: Tensor, reach: Tensor) -> None:
        wide = reach.view(-1, *[1] * (point.dim() - 1))
        super().__init__(down(point - wide), up(point + wide))
        self.point, self.reach = point, reach


def applies(graph: Graph) -> bool:
    """Return whether there is a layer that this is about."""
    return any(isinstance(node.op, ops.Distance) for node in graph.nodes)


def spread_of(box: Box) -> Spread:
    """Return the smallest such set, up to rounding, around a box."""
    if isinstance(box, Spread):
        return box
    lower, upper = box.corners
    point = lower + (upper - lower) / 2
    half = torch.maximum(up(upper - point), up(point - lower))
    return Spread(point, half.flatten(1).amax(1))


def _moved(op: ops.Op, spread: Spread, factor: Tensor, roundings: float) -> Spread:
    """Apply an operation with that Lipschitz constant, which rounds so many units of its result."""
    point: Tensor = POINT_RULES[type(op)](op, spread.point)
    largest = point.abs().flatten(1).amax(1)
    reach = spread.reach * factor + roundings * largest
    # Three more roundings, and what underflows.
    eps = torch.finfo(point.dtype).eps
    return Spread(point, reach * (1 + 8 * eps) + 4 * tiny(point) * (1 + factor))


def _distance(op: ops.Distance, box: Box, *, rounding: float) -> Spread:
    share = growth(len(op.shares) + 1, rounding)
    return _moved(op, spread_of(box), op.shares.sum() * (1 + share), share)


def _shift(op: ops.Shift, box: Box, *, rounding: float) -> Box:
    if not isinstance(box, Spread):
        return interval.RULES[ops.Shift](op, box, rounding=rounding)
    return _moved(op, box, op.offset.new_ones(()), rounding)


def _scale(op: ops.Scale, box: Box, *, rounding: float) -> Box:
    if not isinstance(box, Spread):
        return interval.RULES[ops.Scale](op, box, rounding=rounding)
    factor = op.factor.abs()
    most = 1 / factor.min() * (1 + 2 * rounding) if op.divide else factor.max()
    return _moved(op, box, most, rounding)


RULES: dict[type[ops.Op], Callable[..., Box]] = {
    **interval.RULES,
    ops.Distance: _distance,
    ops.Shift: _shift,
    ops.Scale: _scale,
}
