"""The inputs that a question of `tr.verify` is about: around an input, or in any box."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.certification.arguments import check_tensor
from tightrope.certification.properties import Domain, parse_ball, rounded_inward
from tightrope.errors import UserError, shorten
from tightrope.radius import Radius


@dataclass(frozen=True)
class Region:
    """A set of inputs, of batch size 1, between two boxes.

    `outer` contains it (float64), `inner` lies in it (the network's type); `center` is an input in
    it to begin with, if there is one; `fixed` counts inputs between whose bounds no float lies.
    """

    outer: Box
    inner: Box
    center: Tensor | None = None
    fixed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.outer.lower.shape[1:])

    def note(self) -> str:
        """Say how the question was read, where that is not plain."""
        if not self.fixed:
            return ""
        what = "input was" if self.fixed == 1 else "inputs were"
        name = str(self.inner.lower.dtype).removeprefix("torch.")
        return (
            f"{self.fixed} {what} fixed at the nearest {name}, since none lies between the bounds; "
            "what is proved holds for that value and for all between the bounds"
        )


def around(x: Tensor, eps: Radius | Tensor, domain: Domain, norm: float | str = math.inf) -> Region:
    """Return the inputs within a radius of one input, without a batch dimension."""
    ball = parse_ball(check_tensor(x, "x")[None], eps, domain, norm)
    return Region(ball.outer(), ball.inner(), ball.x[0])


def corners(box: Any) -> Box:
    """Return the corners of a box, or of a pair of tensors, as they are; they make sense."""
    pair = box.corners if isinstance(box, Box) else box
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(f"box must be a Box or a pair (lower, upper), got {shorten(box)}")
    lower, upper = (
        check_tensor(t, f"box: {n}") for t, n in zip(pair, ("lower", "upper"), strict=True)
    )
    if lower.shape != upper.shape:
        raise UserError(f"box: lower has shape {tuple(lower.shape)}, upper {tuple(upper.shape)}")
    if not bool((lower.isfinite() & upper.isfinite()).all()):
        raise UserError("the box is not bounded: its corners must be finite numbers")
    if not bool((lower <= upper).all()):
        raise UserError("the box is empty: a lower corner lies above the upper one")
    return Box(lower, upper)


def inside(box: Box, dtype: torch.dtype) -> Region:
    """Return all inputs in a box (without a batch dimension) for a network of that type.

    An input between whose bounds no float of the type lies has the value of the nearest one:
    proofs are over the hull of it and the bounds, so that there can never be both verdicts.
    """
    lower, upper = (t.double()[None] for t in box.corners)
    inner = rounded_inward(Box(lower, upper), dtype)
    thin = inner.lower > inner.upper
    below, above = inner.upper, inner.lower
    middle = lower / 2 + upper / 2
    near = torch.where(above.double() - middle < middle - below.double(), above, below)
    if not bool(near[thin].isfinite().all()):
        raise UserError(f"the box lies beyond the numbers of the network's {dtype}")
    inner = Box(torch.where(thin, near, inner.lower), torch.where(thin, near, inner.upper))
    outer = Box(
        torch.minimum(lower, inner.lower.double()), torch.maximum(upper, inner.upper.double())
    )
    return Region(outer, inner, fixed=int(thin.sum()))


def distance(x: Tensor, point: Tensor, norm: float = math.inf) -> Fraction:
    """Return the exact distance of two inputs; in the l2 norm, a float that is not below it."""
    a, b = x.double().flatten(), point.double().flatten()
    if norm != math.inf:
        pairs = zip(a.tolist(), b.tolist(), strict=True)
        total = sum((abs(Fraction(p) - Fraction(q)) ** int(norm) for p, q in pairs), Fraction(0))
        return total if norm == 1 else _root_above(total)
    rough = (a - b).abs()
    far = (rough >= rough.max() * (1 - 1e-9)).nonzero()[:, 0]  # differences are rounded, too
    pairs = zip(a[far].tolist(), b[far].tolist(), strict=True)
    return max(abs(Fraction(p) - Fraction(q)) for p, q in pairs)


def _root_above(square: Fraction) -> Fraction:
    """Return a float that is at least the root of a number."""
    root = Fraction(math.sqrt(square))
    while root * root < square:
        root = Fraction(math.nextafter(float(root), math.inf))
    return root
