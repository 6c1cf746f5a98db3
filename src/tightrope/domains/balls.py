"""Linear functions on l1 and l2 balls: how far below its value at the middle one can fall.

On the ball of radius r around c, `a . x >= a . c - r |a|` with the dual norm of a: the largest
coefficient for l1, the l2 norm for l2. Within a box, a coordinate that cannot move the way that
lowers the function adds nothing, so its coefficient does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.box import BallBox, flat


def fall(box: BallBox, a: Tensor, point: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return by how much functions fall, one per row of coefficients [rows, ...].

    The middle and the corners are those that each row sees. What is rounded is less than a few
    steps more than there are coefficients, relative to the result.
    """
    rows = flat(_free(a, point, lower, upper))
    largest = rows.abs().amax(1)
    if box.norm == 1:
        return box.reach * largest
    # Scaled, so that squares neither overflow nor vanish.
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    return box.reach * (scale * (rows / scale[:, None]).square().sum(1).sqrt())


def lowest_point(box: BallBox, a: Tensor, point: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return where in the ball that is, moved into the box, one point per row."""
    free = _free(a, point, lower, upper)
    rows = flat(free)
    if box.norm == 1:
        best = rows.abs().argmax(1, keepdim=True)
        way = torch.zeros_like(rows).scatter(1, best, rows.gather(1, best).sign())
    else:
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        way = rows / norms.clamp(min=torch.finfo(a.dtype).tiny)
    moved = point - box.reach * way.view_as(free)
    return torch.clamp(moved, lower, upper)


def _free(a: Tensor, point: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the coefficients of coordinates that can move so that the function falls."""
    stuck = ((a > 0) & (point <= lower)) | ((a < 0) & (point >= upper))
    return torch.where(stuck, torch.zeros_like(a), a)
