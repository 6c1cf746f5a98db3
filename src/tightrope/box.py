"""Axis-aligned boxes: the one region type of Tightrope."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.draws import uniform_like
from tightrope.errors import UserError


class Box:
    """The set `lower <= x <= upper`, elementwise, one box per batch element.

    A box is made from either pair, `Box(lower, upper)` or `Box.around(center, radius)`; the
    other pair is computed when asked for.
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        if not (isinstance(lower, Tensor) and isinstance(upper, Tensor)):
            kinds = f"{type(lower).__name__} and {type(upper).__name__}"
            raise UserError(f"a Box is made of two torch tensors, got {kinds}")
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

    def step(self, points: Tensor, gradient: Tensor, size: float) -> Tensor:
        """Return the points moved by a share of the half-widths, the way each coordinate rises."""
        moved = torch.addcmul(points, gradient.sign(), self.radius, value=size)
        return torch.clamp(moved, self.lower, self.upper, out=moved)

    def sample(self, count: int | None = None) -> Tensor:
        """Draw one uniform point from each box, or `count` of them: [batch, count, ...]."""
        lower, upper = self.corners
        if count is not None:
            lower, upper = (spread(t, count) for t in self.corners)
        random = uniform_like(lower)  # in the same memory order: mixing orders is slow
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


def joined(boxes: Sequence[Box]) -> Box:
    """Return several boxes as one batch; balls must be of one norm and radius."""
    first = boxes[0]
    if len(boxes) == 1:
        return first
    lower, upper = (torch.cat(corner) for corner in zip(*(b.corners for b in boxes), strict=True))
    if not any(isinstance(box, BallBox) for box in boxes):
        return Box(lower, upper)
    balls = [box for box in boxes if isinstance(box, BallBox)]
    if len({(ball.eps, ball.norm) for ball in balls}) > 1 or len(balls) < len(boxes):
        raise ValueError("balls of different norms or radii are no batch")
    return BallBox(lower, upper, torch.cat([b.point for b in balls]), balls[0].eps, balls[0].norm)


class BallBox(Box):
    """The points of a box that lie within `eps` of `point` in the l1 or l2 norm.

    Whoever knows boxes only takes it for the box, which contains it: bounds stay true and become
    wider. `point` lies in the box, and `reach` is a float that is at least `eps`.
    """

    def __init__(
        self, lower: Tensor, upper: Tensor, point: Tensor, eps: Fraction, norm: int
    ) -> None:
        super().__init__(lower, upper)
        self.point, self.eps, self.norm = point, eps, norm
        nearest = float(eps)
        self.reach = nearest if Fraction(nearest) >= eps else math.nextafter(nearest, math.inf)

    def map(self, function: Callable[[Tensor], Tensor]) -> BallBox:
        """Apply a rearrangement, which leaves norms as they are, or makes them smaller."""
        corners = (function(self.lower), function(self.upper))
        return BallBox(*corners, function(self.point), self.eps, self.norm)

    def project(self, points: Tensor) -> Tensor:
        """Return near points inside, rounded so that they mostly are; `contains` knows."""
        point, low, high = self.point.double(), self.lower, self.upper
        found = torch.clamp(points, low, high)
        for shrink in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
            # Moving towards the middle, and into the box, makes every coordinate smaller.
            moved = shortened(found.double() - point, self.reach * (1 - shrink), self.norm)
            nearer = torch.clamp((point + moved).to(points), low, high)
            outside = length(found.double() - point, self.norm) > self.reach * (1 - 1e-12)
            if not bool(outside.any()):
                break
            found = torch.where(_wide(outside, found), nearer, found)
        return found

    def step(self, points: Tensor, gradient: Tensor, size: float) -> Tensor:
        """Return the points moved along the gradient by a share of the radius, and brought back."""
        way = flat(gradient).clone()
        stuck = (flat(points) >= flat(self.upper)) & (way > 0)
        way[stuck | ((flat(points) <= flat(self.lower)) & (way < 0))] = 0.0
        if self.norm == 1:  # a few coordinates count most
            few = max(1, way.shape[1] // SPARSE)
            best = way.abs().topk(few, 1)
            way = torch.zeros_like(way).scatter(1, best.indices, way.gather(1, best.indices).sign())
        long = length(way.double(), self.norm).clamp(min=torch.finfo(torch.float64).tiny)
        way = (way.double() * (size * self.reach / long)[:, None]).to(points)
        return self.project(points + way.view_as(points))

    def sample(self, count: int | None = None) -> Tensor:
        """Draw points, more of them near the edge than a uniform draw would."""
        points = super().sample(count)
        if count is None:
            return self.project(points)
        many = self.repeat(count)
        return many.project(points.flatten(0, 1)).view_as(points)

    def contains(self, points: Tensor) -> Tensor:
        """Return which batch elements lie inside, decided exactly."""
        inside = super().contains(points)
        middle = flat(self.point.expand_as(points)).double().tolist()
        limit = self.eps**self.norm
        for i in inside.nonzero()[:, 0].tolist():
            pairs = zip(flat(points)[i].double().tolist(), middle[i], strict=True)
            terms = (abs(Fraction(a) - Fraction(b)) for a, b in pairs if a != b)
            inside[i] = sum(t**self.norm for t in terms) <= limit
        return inside


SPARSE = 20  # of so many coordinates, a step in the l1 norm moves one


def length(x: Tensor, norm: int) -> Tensor:
    """Return the norm of each batch element."""
    rows = flat(x)
    return rows.abs().sum(1) if norm == 1 else torch.linalg.vector_norm(rows, dim=1)


def shortened(x: Tensor, most: float, norm: int) -> Tensor:
    """Return the nearest vectors of at most that norm, up to rounding."""
    rows = flat(x)
    long = length(rows, norm)
    if norm == 2:
        return (rows * (most / long.clamp(min=most))[:, None]).view_as(x)
    sizes = rows.abs().sort(1, descending=True).values
    excess = sizes.cumsum(1) - most
    counts = torch.arange(1, rows.shape[1] + 1, device=x.device)
    kept = (sizes * counts > excess).sum(1, keepdim=True).clamp(min=1)
    threshold = (excess.gather(1, kept - 1) / kept).clamp(min=0)
    less = rows.sign() * (rows.abs() - threshold).clamp(min=0)
    return torch.where((long > most)[:, None], less, rows).view_as(x)


def _wide(chosen: Tensor, like: Tensor) -> Tensor:
    """Return a choice of batch elements as one of all their numbers."""
    return chosen.view(-1, *(1 for _ in like.shape[1:]))
