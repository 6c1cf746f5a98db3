"""What is to be proved, exactly: which inputs are allowed and which outputs are not.

The inputs of a robustness property are a ball whose radius is a rational number: the set of all
real x' with `|x' - x| <= eps` and `0 <= x' <= 1`, for the float32
input x. Floating-point boxes can only approximate it, from outside for proofs and from inside
for counterexamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.attacks.goals import Rows
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


@dataclass(frozen=True)
class Unsafe:
    """Outputs that must not occur: those with all rows of some group at or below zero.

    Rows are `matrix @ output + offset`, in float64 with the offset rounded down: what is proved
    of them holds for the exact rows.
    """

    matrix: Tensor  # [rows, outputs]
    offset: Tensor  # [rows]
    group: Tensor  # [rows]

    @classmethod
    def misclassification(cls, label: int, classes: int, device: torch.device) -> Unsafe:
        """Return what robustness forbids: a class i with `o_y - o_i <= 0`."""
        others = torch.arange(classes, device=device)
        others = others[others != label]
        matrix = -torch.eye(classes, dtype=torch.float64, device=device)[others]
        matrix[:, label] = 1.0
        return cls(matrix, matrix.new_zeros(len(others)), torch.arange(len(others), device=device))

    def goal(self, groups: Tensor, dtype: torch.dtype) -> Rows:
        """Return what an attack on each of those groups has to reach."""
        members = [(self.group == g).nonzero()[:, 0] for g in groups.unique().tolist()]
        widest = max(len(rows) for rows in members)
        padded = torch.stack([rows[torch.arange(widest) % len(rows)] for rows in members])
        rows = padded[groups.unique(return_inverse=True)[1]]
        return Rows(self.matrix[rows].to(dtype), self.offset[rows].to(dtype))


@dataclass(frozen=True)
class Samples:
    """A batch of samples to be certified, and what earlier stages found out about them.

    `bounds` are boxes of some nodes by position, per sample, in float64 and proved.
    """

    ball: Ball
    labels: Tensor
    bounds: tuple[Mapping[int, Box] | None, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor) -> Samples:
        """Return some of the samples, by positions or by a mask."""
        if index.dtype == torch.bool:
            index = index.nonzero()[:, 0]
        bounds = tuple(self.bounds[i] for i in index.tolist()) if self.bounds else ()
        return Samples(self.ball.select(index), self.labels[index], bounds)


def _float_above(value: Fraction) -> float:
    """Return a float that is at least `value`."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _step(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, towards))
