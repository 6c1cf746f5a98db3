"""Products of two nodes in linear bounds: McCormick's planes, pulled back.

For x within r of p and y within s of q, `x y = q x + p y - p q + (x - p)(y - q)`, and the last
product is at most r s in absolute value. With p and q the middles of the boxes, these are the
means of McCormick's two planes from below and of his two from above: as high and as low in the
middle of the box as any of them, and the same whatever the sign of a coefficient, so that a
product of matrices is pulled back by two products of matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.rounding import growth, tiny
from tightrope.graph import ops
from tightrope.graph.evaluate import RULES as POINT_RULES

if TYPE_CHECKING:
    from tightrope.domains.linear.coefficients import Coefficients
    from tightrope.domains.linear.rules import Pass


def pull_product(op: ops.Op, a: Coefficients, i: int, state: Pass) -> tuple[Any, ...]:
    """Pull coefficients of a product back to both factors."""
    a = a.dense()
    node, rule = state.graph.nodes[i], POINT_RULES[type(op)]
    (p, r), (q, s) = (_middle(state.boxes[j], state.rounding) for j in node.inputs)
    inner = p.shape[-1] if isinstance(op, ops.MatMul) else 1
    rounding = state.rounding
    share = 2 * growth(inner + 2, rounding)
    offset, spread = rule(op, p, q), rule(op, r, s)
    if rounding:
        size = rule(op, p.abs(), q.abs())
        spread = (spread + share * size) * (1 + share) + inner * tiny(spread)
    state.add(a, -offset)
    state.add(a.like(-a.values.abs()), spread)
    smallest = min(p[0].numel(), q[0].numel())
    state.charge(a, i, inner * a.values[0].numel() // smallest)
    p, q = a.take(p), a.take(q)  # rows meet the middles of their own boxes
    if isinstance(op, ops.MatMul):
        pulled = a.values @ q.mT, p.mT @ a.values
    else:
        pulled = a.values * q, a.values * p
    shapes = (state.graph.nodes[j].shape for j in node.inputs)
    return tuple(a.like(_onto(t, shape)) for t, shape in zip(pulled, shapes, strict=True))


def _onto(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Add up what was repeated when a factor was broadcast."""
    repeated = [d for d, size in enumerate(shape, start=1) if values.shape[d] != size]
    return values.sum(repeated, keepdim=True) if repeated else values


def _middle(box: Box, rounding: float) -> tuple[Tensor, Tensor]:
    """Return numbers in the middle of boxes and how far these reach from them."""
    lower, upper = box.corners
    center = lower / 2 + upper / 2
    radius = torch.maximum(upper - center, center - lower)
    return center, radius * (1 + 4 * rounding) + (tiny(radius) if rounding else 0.0)
