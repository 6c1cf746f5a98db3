"""Axis-aligned boxes: the one region type of Tightrope."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Box:
    """The set `lower <= x <= upper`, elementwise, one box per batch element.

    A box is made from either pair, `Box(lower, upper)` or `Box.around(center, radius)`; the
    other pair is computed when asked for.
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self._corners: tuple[Tensor, Tensor] | None = (lower, upper)
        self._middle: tuple[Tensor, Tensor] | None = None

    @classmethod
    def around(cls, center: Tensor, radius: Tensor) -> Box:
        """Return the box of all points within `radius` of `center`."""
        box = cls.__new__(cls)
        box._corners, box._middle = None, (center, radius)
        return box

    @classmethod
    def ball(cls, x: Tensor, radius: float | Tensor, *, low: float = 0.0, high: float = 1.0) -> Box:
        """Return the l-infinity ball around `x`, clipped to the valid range of inputs."""
        return cls((x - radius).clamp(min=low), (x + radius).clamp(max=high))

    @property
    def corners(self) -> tuple[Tensor, Tensor]:
        """`(lower, upper)`."""
        if self._corners is None:
            assert self._middle is not None
            center, radius = self._middle
            self._corners = (center - radius, center + radius)
        return self._corners

    @property
    def middle(self) -> tuple[Tensor, Tensor]:
        """`(center, radius)`."""
        if self._middle is None:
            assert self._corners is not None
            lower, upper = self._corners
            self._middle = ((lower + upper) / 2, (upper - lower) / 2)
        return self._middle

    @property
    def lower(self) -> Tensor:
        """Lower corner."""
        return self.corners[0]

    @property
    def upper(self) -> Tensor:
        """Upper corner."""
        return self.corners[1]

    @property
    def center(self) -> Tensor:
        """Midpoint."""
        return self.middle[0]

    @property
    def radius(self) -> Tensor:
        """Half of the width."""
        return self.middle[1]

    @property
    def centered(self) -> bool:
        """Whether the box is held as centre and radius."""
        return self._corners is None

    def __getitem__(self, index: Tensor | slice) -> Box:
        """Select batch elements."""
        return self.map(lambda t: t[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> Box:
        """Apply a rearrangement (a reshape, an index) to the pair the box is held as."""
        if self.centered:
            return Box.around(function(self.center), function(self.radius))
        return Box(function(self.lower), function(self.upper))

    def detach(self) -> Box:
        """Return the box without its gradients."""
        return self.map(torch.Tensor.detach)

    def project(self, points: Tensor) -> Tensor:
        """Return the nearest points inside the box."""
        return torch.minimum(torch.maximum(points, self.lower), self.upper)

    def sample(self) -> Tensor:
        """Draw one uniform point from each box."""
        width = self.upper - self.lower
        return self.project(self.lower + torch.rand_like(width) * width)

    def contains(self, points: Tensor) -> Tensor:
        """Return which batch elements lie inside the box entirely."""
        inside = (points >= self.lower) & (points <= self.upper)
        return inside.flatten(1).all(1)
