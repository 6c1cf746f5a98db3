"""Boxes of products of two nodes, number by number or as matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.rounding import growth, outward, tiny
from tightrope.graph import ops

# Products of two numbers that are held at a time; larger matrices are bounded less tightly.
MOST_PRODUCTS = 1 << 24


def product_box(op: ops.Mul, a: Box, b: Box, *, rounding: float) -> Box:
    """Return the box of products: extreme at corners. Zero times infinity is anything."""
    least, greatest = _corner_products(a, b)
    return outward(least.clamp(-op.limit, op.limit), greatest.clamp(-op.limit, op.limit), rounding)


def _corner_products(a: Box, b: Box) -> tuple[Tensor, Tensor]:
    products = [x * y for x in a.corners for y in b.corners]
    least = torch.minimum(torch.minimum(*products[:2]), torch.minimum(*products[2:]))
    greatest = torch.maximum(torch.maximum(*products[:2]), torch.maximum(*products[2:]))
    return _known(least, greatest)


def _known(least: Tensor, greatest: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds without those that are not numbers, which say nothing."""
    ends = {"posinf": torch.inf, "neginf": -torch.inf}
    return least.nan_to_num(nan=-torch.inf, **ends), greatest.nan_to_num(nan=torch.inf, **ends)


def matmul_box(op: ops.MatMul, a: Box, b: Box, *, rounding: float) -> Box:
    """Return the box of a product of matrices: sums of extreme products, or around the centres."""
    inner = a.lower.shape[-1]
    share = growth(inner, rounding)
    if a.lower.numel() * b.lower.shape[-1] <= MOST_PRODUCTS:
        left, right = (Box(*(t.unsqueeze(d) for t in box.corners)) for box, d in ((a, -1), (b, -3)))
        least, greatest = _corner_products(left, right)
        size = torch.maximum(least.abs(), greatest.abs()).sum(-2)
        least, greatest = least.sum(-2), greatest.sum(-2)
    else:
        (ca, ra), (cb, rb) = a.middle, b.middle
        if rounding:  # of the middles
            ra, rb = (
                r * (1 + 4 * rounding) + 4 * rounding * c.abs() for c, r in ((ca, ra), (cb, rb))
            )
        center = ca @ cb
        size = (ca.abs() + ra) @ (cb.abs() + rb)
        spread = ca.abs() @ rb + ra @ (cb.abs() + rb)
        least, greatest = center - spread, center + spread
    if rounding:
        slack = 4 * share * size * (1 + share) + inner * tiny(size)
        least, greatest = least - slack, greatest + slack
    return outward(*_known(least, greatest), rounding)
