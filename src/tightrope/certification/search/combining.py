"""Rows of a group put together: where no row is positive alone, a combination may be.

If `sum_r w_r row_r > 0` with weights that are not negative, some row is positive. So the best
combination of linear lower bounds is a bound of the group's largest row. It is looked for by going
from the best row towards each of the others, to the best point on the way: between two linear
functions, the smallest value on a box is concave with one kink for each input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.domains.boxes.bounding import RowBounds, smallest_values
from tightrope.precision import ROUNDING

SWEEPS = 2
NUMBERS = 1 << 24  # that are held at once


@dataclass(frozen=True)
class _Lines:
    """One linear function for each of some boxes, with what its looseness is due to."""

    slope: Tensor  # [count, inputs]
    constant: Tensor  # [count]
    blame: Tensor  # [count, inputs]


def combine(
    bounds: RowBounds, lower: Tensor, upper: Tensor, still: Tensor, members: Tensor
) -> RowBounds:
    """Return the bounds with one more row for each group: the best combination found.

    Where a group is not open (`still`, [boxes, groups]) that row says nothing.
    """
    count, _, inputs = bounds.slope.shape
    groups = len(members)
    box, group = still.nonzero(as_tuple=True)
    parts = []
    size = max(1, NUMBERS // (max(1, inputs) * (inputs + 2)))
    for b, g in zip(box.split(size), group.split(size), strict=True):
        parts.append(_best(bounds, lower[b], upper[b], b, members[g]))
    extra = RowBounds(
        bounds.slope.new_zeros(count, groups, inputs),
        bounds.constant.new_full((count, groups), -torch.inf),
        bounds.lower.new_full((count, groups), -torch.inf),
        bounds.blame.new_zeros(count, groups, inputs),
        bounds.bent,
    )
    if parts:
        slope, constant, blame = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("slope", "constant", "blame")
        )
        extra.slope[box, group], extra.constant[box, group] = slope, constant
        extra.blame[box, group] = blame
        least = smallest_values(slope[:, None], constant[:, None], lower[box], upper[box])
        extra.lower[box, group] = least[:, 0]
    return RowBounds(
        torch.cat((bounds.slope, extra.slope), 1),
        torch.cat((bounds.constant, extra.constant), 1),
        torch.cat((bounds.lower, extra.lower), 1),
        torch.cat((bounds.blame, extra.blame), 1),
        bounds.bent,
    )


def _best(bounds: RowBounds, lower: Tensor, upper: Tensor, box: Tensor, members: Tensor) -> _Lines:
    """Return the best combination found of some rows on each box, `members` [boxes, rows]."""

    def row(index: Tensor) -> _Lines:
        chosen = (box, index)
        return _Lines(bounds.slope[chosen], bounds.constant[chosen], bounds.blame[chosen])

    first = bounds.lower[box[:, None], members].argmax(1, keepdim=True)
    found = row(members.gather(1, first)[:, 0])
    for _ in range(SWEEPS):
        for place in range(members.shape[1]):
            found = _between(found, row(members[:, place]), lower, upper)
    return found


def _between(a: _Lines, b: _Lines, lower: Tensor, upper: Tensor) -> _Lines:
    """Return the best function on the way from one to another."""
    kink = a.slope / (a.slope - b.slope)
    kink = torch.where((kink > 0) & (kink < 1), kink, 0.0)  # what is not a number is no kink
    share = torch.cat((kink, kink.new_zeros(len(kink), 1)), 1)
    slope = torch.lerp(a.slope[:, None], b.slope[:, None], share[:, :, None])
    constant = torch.lerp(a.constant[:, None], b.constant[:, None], share)
    least = (slope.clamp(min=0) * lower[:, None] + slope.clamp(max=0) * upper[:, None]).sum(2)
    value = (least + constant).nan_to_num(-torch.inf)
    t = share.gather(1, value.argmax(1, keepdim=True))
    mixed = a.slope * (1 - t) + b.slope * t
    # Slopes are taken as the numbers they are: what was rounded goes into the constant.
    reach = torch.maximum(lower.abs(), upper.abs())
    size = ((a.slope.abs() + b.slope.abs()) * reach).sum(1) + a.constant.abs() + b.constant.abs()
    offset = a.constant * (1 - t[:, 0]) + b.constant * t[:, 0]
    lost = 8 * ROUNDING * size * (1 + 1e-9) + torch.finfo(size.dtype).tiny * (1 + reach.sum(1))
    new = _Lines(mixed, offset - lost, a.blame * (1 - t) + b.blame * t)
    # Without a kink it stays as it was, without another loss.
    moved = (t[:, 0] > 0) & torch.isfinite(offset)
    return _Lines(
        torch.where(moved[:, None], new.slope, a.slope),
        torch.where(moved, new.constant, a.constant),
        torch.where(moved[:, None], new.blame, a.blame),
    )
