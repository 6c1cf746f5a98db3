"""What is to be proved, exactly: robustness on a ball whose radius is a rational number.

The ball is the set of all real x' with `|x' - x| <= eps` and `0 <= x' <= 1`, for the float32
input x. Floating-point boxes can only approximate it, from outside for proofs and from inside
for counterexamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.box import Box


class Verdict(StrEnum):
    """What certification can say of a sample; there is nothing else."""

    VERIFIED = "verified"
    FALSIFIED = "falsified"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Ball:
    """The l-infinity ball around each input of a batch, within the range of pixels."""

    x: Tensor
    eps: Fraction

    def outer(self) -> Box:
        """Return a float64 box that contains the exact ball."""
        radius = _float_above(self.eps)
        x = self.x.double()
        lower, upper = _step(x - radius, -math.inf), _step(x + radius, math.inf)
        return Box(lower.clamp(min=0.0), upper.clamp(max=1.0))

    def inner(self) -> Box:
        """Return a box in the input's own dtype that lies inside the exact ball."""
        radius = -_float_above(-self.eps)
        x = self.x.double()
        lower = _step(x - radius, math.inf).clamp(min=0.0)
        upper = _step(x + radius, -math.inf).clamp(max=1.0)
        rounded_lower, rounded_upper = lower.to(self.x.dtype), upper.to(self.x.dtype)
        rounded_lower = torch.where(
            rounded_lower.double() < lower, _step(rounded_lower, math.inf), rounded_lower
        )
        rounded_upper = torch.where(
            rounded_upper.double() > upper, _step(rounded_upper, -math.inf), rounded_upper
        )
        # The input itself belongs to every ball, however small.
        return Box(torch.minimum(rounded_lower, self.x), torch.maximum(rounded_upper, self.x))

    def select(self, index: Tensor) -> Ball:
        """Return the balls of some samples."""
        return Ball(self.x[index], self.eps)


def _float_above(value: Fraction) -> float:
    """Return a float that is at least `value`."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _step(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, towards))
