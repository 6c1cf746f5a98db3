"""Boxes cut down to where counterexamples can be, and cut in two; both in exact arithmetic.

A counterexample of a group makes all of its rows nonpositive, and so every linear function that
lies below one of them. With all other coordinates where they help most, that limits each coordinate
by itself. Limits are rounded outwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.domains.boxes.bounding import RowBounds
from tightrope.domains.linear.rules import growth
from tightrope.precision import ROUNDING

# Points are cut off only where some row is larger than this: a bound that the proof can state.
KEPT = 1e-9
# Boxes with more open groups than that stay as they are.
MOST_GROUPS = 16


@dataclass(frozen=True)
class Boxes:
    """Boxes of inputs, [boxes, inputs], and which groups of rows are open on each."""

    lower: Tensor
    upper: Tensor
    open: Tensor  # [boxes, groups]

    def __len__(self) -> int:
        return len(self.lower)

    def __getitem__(self, index: Tensor | slice) -> Boxes:
        return Boxes(self.lower[index], self.upper[index], self.open[index])


def join_boxes(parts: list[Boxes]) -> Boxes:
    """Put boxes together."""
    return Boxes(*(torch.cat(p) for p in zip(*(vars(b).values() for b in parts), strict=True)))


def clip(boxes: Boxes, bounds: RowBounds, members: Tensor) -> Boxes:
    """Return the parts of boxes that can hold counterexamples; groups without any are closed.

    `members` are the rows of each group, [groups, most], repeated where a group has fewer.
    """
    few = boxes.open.sum(1) <= MOST_GROUPS
    box, group = (boxes.open & few[:, None]).nonzero(as_tuple=True)
    lower, upper = boxes.lower[box], boxes.upper[box]
    for place in range(members.shape[1]):
        row = members[group, place]
        lower, upper = _cut(bounds.slope[box, row], bounds.constant[box, row], lower, upper)
    left = (lower <= upper).all(1)
    still = boxes.open.clone()
    still[box, group] = left
    # A box that serves several groups is as large as all of them need.
    index = box[left, None].expand(-1, lower.shape[1])
    hull = [
        torch.full_like(side, fill).scatter_reduce(0, index, new[left], how)
        for side, new, fill, how in (
            (boxes.lower, lower, torch.inf, "amin"),
            (boxes.upper, upper, -torch.inf, "amax"),
        )
    ]
    some = (few & still.any(1))[:, None]
    return Boxes(
        torch.where(some, hull[0], boxes.lower), torch.where(some, hull[1], boxes.upper), still
    )


def _cut(slope: Tensor, constant: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Limit each coordinate to where `slope . x + constant <= KEPT` is possible."""
    least = torch.where(slope > 0, slope * lower, slope * upper)
    size = (slope.abs() * torch.maximum(lower.abs(), upper.abs())).sum(1) + constant.abs() + KEPT
    lost = growth(slope.shape[1] + 8, ROUNDING) * size * (1 + 1e-9) + torch.finfo(size.dtype).tiny
    room = KEPT - constant - least.sum(1) + lost  # at least what all coordinates share
    limit = (room[:, None] + least) / slope
    loose = 8 * ROUNDING * limit.abs() + torch.finfo(size.dtype).tiny
    above, below = limit + loose, limit - loose
    # Whatever is not a number compares as false and cuts nothing.
    return (
        torch.where((slope < 0) & (below > lower), below, lower),
        torch.where((slope > 0) & (above < upper), above, upper),
    )


def shrinkage(before: Boxes, after: Boxes) -> Tensor:
    """Return what share of their volume is left of boxes, of the coordinates that varied."""
    width = before.upper - before.lower
    share = (after.upper - after.lower) / width
    return torch.where(width > 0, share, 1.0).prod(1)


def halve(boxes: Boxes, coordinate: Tensor) -> Boxes:
    """Cut each box in two at the middle of one coordinate; the halves share that face."""
    place = coordinate[:, None]
    lower, upper = boxes.lower.gather(1, place), boxes.upper.gather(1, place)
    middle = middles(lower, upper)
    first = Boxes(boxes.lower, boxes.upper.scatter(1, place, middle), boxes.open)
    second = Boxes(boxes.lower.scatter(1, place, middle), boxes.upper, boxes.open)
    return join_boxes([first, second])


def middles(lower: Tensor, upper: Tensor) -> Tensor:
    """Return points between two ends; they are ends themselves if nothing lies in between."""
    return torch.minimum(torch.maximum(lower / 2 + upper / 2, lower), upper)


def divisible(boxes: Boxes) -> Tensor:
    """Return which coordinates of boxes can be cut in two, [boxes, inputs]."""
    middle = middles(boxes.lower, boxes.upper)
    return (middle > boxes.lower) & (middle < boxes.upper)
