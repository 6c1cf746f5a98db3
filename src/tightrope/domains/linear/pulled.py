"""Rows that were pulled back to the input, and how low they get there.

On a box that is exact. On a ball two bounds are known, that of the box around it and that of the
dual norm, and the better one holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.box import BallBox, Box
from tightrope.domains.balls import fall, lowest_point
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.rounding import growth


@dataclass(frozen=True)
class Form:
    """One linear function of the input per row, below the row's value on the box.

    `slack` is by how much rounding errors may have moved it. `passed` are the coefficients that
    arrived at each activation's output. `largest` is the most that a row had on the way, `work` the
    most that it took to pull it through one operation.
    """

    coefficients: Coefficients
    constant: Tensor
    slack: Tensor
    passed: dict[int, Coefficients]
    largest: int
    work: int = 0

    def minimum(self, box: Box, *, rounding: float = 0.0) -> Tensor:
        """Return the smallest value over the box, one per row; on a ball, at most that."""
        a = self.coefficients
        if isinstance(box, BallBox):
            # Where one of the two is not a number, the other one still holds.
            whole = self.minimum(Box(*box.corners), rounding=rounding)
            return torch.fmax(whole, self._ball_minimum(box, rounding))
        if not rounding:
            center, radius = box.middle
            return a.dot(center) - a.like(a.values.abs()).dot(radius) + self.constant
        below = a.like(a.values.clamp(min=0)).dot(box.lower)
        above = a.like(a.values.clamp(max=0)).dot(box.upper)
        size = a.reach(torch.maximum(box.lower.abs(), box.upper.abs()))
        size = size + self.constant.abs() + self.slack
        loose = self.slack + growth(a.values[0].numel() + 4, rounding) * size
        return below + above + self.constant - loose - torch.finfo(size.dtype).tiny

    def _ball_minimum(self, box: BallBox, rounding: float) -> Tensor:
        """Return a lower bound over the ball, one per row."""
        a = self.coefficients
        seen = (a.take(t) for t in (box.point, *box.corners))
        falls = fall(box, a.values, *seen)
        value = a.dot(box.point) - falls + self.constant
        if not rounding:
            return value
        room = a.like(a.values.abs()).dot(box.point.abs()) + falls
        room = room + self.constant.abs() + self.slack
        lost = self.slack + growth(a.values[0].numel() + 8, rounding) * room
        return value - lost - torch.finfo(room.dtype).tiny

    def minimizer(self, box: Box) -> Tensor:
        """Return where in the box that is, one point per row (dense coefficients only)."""
        a = self.coefficients
        corner = torch.where(a.values > 0, a.take(box.lower), a.take(box.upper))
        if not isinstance(box, BallBox):
            return corner
        inside = lowest_point(box, a.values, *(a.take(t) for t in (box.point, *box.corners)))
        by_ball = self._ball_minimum(box, 0.0) > self.minimum(Box(*box.corners))
        return torch.where(by_ball.view(-1, *(1 for _ in corner.shape[1:])), inside, corner)
