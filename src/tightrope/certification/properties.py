"""What is to be proved, exactly: which inputs are allowed and which outputs are not.

The inputs of a robustness property are a ball whose radius is a rational number: the set of all
real x' with `|x' - x| <= eps` that lie in the domain, by default `0 <= x' <= 1`, for the float32
input x. Floating-point boxes can only approximate it, from outside for proofs and from inside
for counterexamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.attacks.goals import Rows
from tightrope.box import BallBox, Box
from tightrope.certification.arguments import check_tensor
from tightrope.domains.rounding import down, up
from tightrope.errors import UserError, shorten
from tightrope.radius import Radius, parse_radius

GOAL_ENTRIES = 1 << 24  # of the goals that are attacked together


# The values that an input can have at all; None: any.
Domain = tuple[float, float] | None
PIXELS = (0.0, 1.0)
NORMS = {"linf": math.inf, "l2": 2.0, "l1": 1.0}


def parse_domain(domain: Domain) -> Domain:
    """Return the range of values that inputs can have, as floats."""
    if domain is None:
        return None
    try:
        low, high = (float(limit) for limit in domain)
    except (TypeError, ValueError, OverflowError):
        low, high = math.nan, math.nan
    if not low < high:
        raise UserError(f"domain must be a pair (lower, upper) or None, got {shorten(domain)}")
    return low, high


def parse_norm(norm: float | str) -> float:
    """Return 1, 2 or infinity, also of their names: l1, l2, linf."""
    try:
        number = NORMS[norm] if isinstance(norm, str) and norm in NORMS else float(norm)
    except (TypeError, ValueError):
        number = math.nan
    if number not in NORMS.values():
        raise UserError(f"norm must be linf, l2 or l1 (inf, 2 or 1), got {shorten(norm)}")
    return number


def norm_setting(norm: float) -> dict[str, str]:
    """Return what a folder notes of a norm: its name, nothing of the usual one."""
    return {} if norm == math.inf else {"norm": f"l{int(norm)}"}


def radius_limit(domain: Domain, norm: float) -> int | None:
    """Return the largest radius that makes sense: more than 1 if pixels do not bound it.

    In the other norms the changes of many pixels add up.
    """
    return 1 if domain == PIXELS and norm == math.inf else None


def parse_ball(
    x: Tensor, eps: Radius | Tensor, domain: Domain, norm: float | str = math.inf
) -> Ball:
    """Return the balls around inputs, the batch first, that must lie in the domain."""
    domain = parse_domain(domain)
    x = check_tensor(x, "x")
    number = parse_norm(norm)
    if number != math.inf and isinstance(eps, Tensor):
        raise UserError("radii by feature go with norm=inf; an l1 or l2 ball has one radius")
    ball = Ball(x, _radius(x, eps, domain, number), domain, number)
    exact = x.double()  # float32 would round the limits
    if not bool(((exact >= ball._low) & (exact <= ball._high) & exact.isfinite()).all()):
        low, high = PIXELS if domain is None else domain
        where = "be finite" if domain is None else f"lie in [{low:g}, {high:g}]"
        raise UserError(
            f"x must {where}; give domain=(lower, upper) for inputs of another range, or "
            "domain=None for none"
        )
    return ball


def _radius(x: Tensor, eps: Radius | Tensor, domain: Domain, norm: float) -> Fraction | Tensor:
    """Return the radius, or one for each feature, whose floats are taken as they are."""
    if not isinstance(eps, Tensor):
        return parse_radius(eps, largest=radius_limit(domain, norm))
    radii = check_tensor(eps, "eps").double().to(x.device)
    if radii.dim() and radii.shape not in (x.shape[1:], x.shape):
        raise UserError(
            f"eps has shape {tuple(radii.shape)}: give one radius, or one for each feature of an "
            f"input of shape {tuple(x.shape[1:])}"
        )
    if not bool(((radii >= 0) & radii.isfinite()).all()):
        raise UserError("eps must be finite radii, 0 or more, one for each feature")
    return radii.expand_as(x)


@dataclass(frozen=True)
class Ball:
    """The ball around each input of a batch, within the domain of inputs.

    `eps` is one radius for all, or, in the l-infinity norm, a tensor with that of each feature of
    each input.
    """

    x: Tensor
    eps: Fraction | Tensor
    domain: Domain = PIXELS
    norm: float = math.inf

    def __getitem__(self, index: slice) -> Ball:
        """Select inputs."""
        eps = self.eps[index] if isinstance(self.eps, Tensor) else self.eps
        return Ball(self.x[index], eps, self.domain, self.norm)

    def outer(self) -> Box:
        """Return a float64 box that contains the exact ball."""
        radius = self.eps if isinstance(self.eps, Tensor) else _float_above(self.eps)
        x = self.x.double()
        lower, upper = down(x - radius), up(x + radius)
        return self._round(Box(lower.clamp(min=self._low), upper.clamp(max=self._high)), x)

    def inner(self) -> Box:
        """Return a box in the input's own dtype that lies inside the exact ball."""
        radius = self.eps if isinstance(self.eps, Tensor) else -_float_above(-self.eps)
        x = self.x.double()
        lower = up(x - radius).clamp(min=self._low)
        upper = down(x + radius).clamp(max=self._high)
        inside = rounded_inward(Box(lower, upper), self.x.dtype)
        # The input itself belongs to every ball, however small.
        box = Box(torch.minimum(inside.lower, self.x), torch.maximum(inside.upper, self.x))
        return self._round(box, self.x)

    def _round(self, box: Box, x: Tensor) -> Box:
        """Return the part of the box of an l1 or l2 ball that lies in the ball."""
        if self.norm == math.inf:
            return box
        assert isinstance(self.eps, Fraction)
        return BallBox(*box.corners, x, self.eps, int(self.norm))

    def select(self, index: Tensor) -> Ball:
        """Return the balls of some samples."""
        eps = self.eps[index] if isinstance(self.eps, Tensor) else self.eps
        return Ball(self.x[index], eps, self.domain, self.norm)

    @property
    def _low(self) -> float:
        return -math.inf if self.domain is None else self.domain[0]

    @property
    def _high(self) -> float:
        return math.inf if self.domain is None else self.domain[1]


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

    def to(self, device: torch.device) -> Unsafe:
        """Return the same on another device."""
        return Unsafe(*(t.to(device) for t in (self.matrix, self.offset, self.group)))

    def goal(self, groups: Tensor, dtype: torch.dtype) -> Rows:
        """Return what an attack on each of those groups has to reach."""
        order = self.group.argsort(stable=True)
        ordered = self.group[order]
        first = torch.searchsorted(ordered, groups)
        size = torch.searchsorted(ordered, groups, right=True) - first
        # Groups that are smaller than others repeat their rows.
        place = torch.arange(int(size.max()), device=groups.device) % size[:, None]
        rows = order[first[:, None] + place]
        return Rows(self.matrix[rows].to(dtype), self.offset[rows].to(dtype))

    def parts(self, groups: Tensor, samples: int) -> Iterator[Tensor]:
        """Split groups so that their goals, and the points that go with them, fit into memory.

        No part has more than `samples` groups.
        """
        sizes = self.group.bincount(minlength=int(groups.max()) + 1)[groups]
        part: list[int] = []
        widest = 0
        for group, size in zip(groups.tolist(), sizes.tolist(), strict=True):
            widest = max(widest, size)
            entries = (len(part) + 1) * widest * self.matrix.shape[1]
            if part and (entries > GOAL_ENTRIES or len(part) >= samples):
                yield groups.new_tensor(part)
                part, widest = [], size
            part.append(group)
        yield groups.new_tensor(part)


def rounded_inward(box: Box, dtype: torch.dtype) -> Box:
    """Return the largest box of floats of a type inside a box of float64; it may be empty."""
    lower, upper = (corner.to(dtype) for corner in box.corners)
    return Box(
        torch.where(lower.double() < box.lower, up(lower), lower),
        torch.where(upper.double() > box.upper, down(upper), upper),
    )


def _float_above(value: Fraction) -> float:
    """Return a float that is at least `value`."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)
