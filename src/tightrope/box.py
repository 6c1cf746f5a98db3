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

    def __repr__(self) -> str:
        held = self._middle if self._corners is None else self._corners
        assert held is not None
        first = held[0]
        text = f"Box(shape={tuple(first.shape)}, dtype={str(first.dtype).removeprefix('torch.')}"
        if not first.numel() or first.is_meta:
            return f"{text})"
        lower, upper = (t.detach() for t in self.corners)
        width = upper - lower
        return (
            f"{text}, from {float(lower.amin()):.4g} to {float(upper.amax()):.4g}, "
            f"widths {float(width.amin()):.4g} to {float(width.amax()):.4g})"
        )

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

    def repeat(self, count: int) -> Box:
        """Return each box `count` times in a row."""
        return self.map(lambda t: spread(t, count).flatten(0, 1))

    def detach(self) -> Box:
        """Return the box without its gradients."""
        return self.map(torch.Tensor.detach)

    def project(self, points: Tensor) -> Tensor:
        """Return the nearest points inside the box."""
        return torch.clamp(points, self.lower, self.upper)

    def sample(self, count: int | None = None) -> Tensor:
        """Draw one uniform point from each box, or `count` of them: [batch, count, ...]."""
        lower, upper = self.corners
        if count is not None:
            lower, upper = (spread(t, count) for t in self.corners)
        random = torch.rand_like(lower)  # in the same memory order: mixing orders is slow
        # Rounding may lead out of the box by a unit in the last place.
        return torch.clamp(random.mul_(upper - lower).add_(lower), lower, upper)

    def contains(self, points: Tensor) -> Tensor:
        """Return which batch elements lie inside the box entirely."""
        inside = (points >= self.lower) & (points <= self.upper)
        return flat(inside).all(1)


def spread(t: Tensor, count: int) -> Tensor:
    """Repeat each batch element `count` times, [batch, count, ...], keeping the memory order."""
    if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        last = t.permute(0, 2, 3, 1).unsqueeze(1).repeat(1, count, 1, 1, 1)
        return last.permute(0, 1, 4, 2, 3)
    return t.unsqueeze(1).repeat(1, count, *(1 for _ in t.shape[1:]))


def flat(t: Tensor) -> Tensor:
    """Return each batch element as one row; samples may have no dimensions at all."""
    return t.flatten(1) if t.dim() > 1 else t.unsqueeze(1)
