"""The gradient connector: how latent adversarial points pass gradients on to their box.

A latent attack picks points inside the box of the feature extractor. Its search has no useful
derivative, so the connector imposes one (the paper's Section 3.2): a point near the upper bound
moves with the upper bound, one near the lower bound with the lower bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.budget import memory_budget, rows_at_once
from tightrope.devices import launches

# Widths (times c) below this count as this: without any width both bounds carry one half.
DEGENERATE = 1e-5
PIECE = 2 << 20  # bytes
TEMPORARIES = 8  # of the size of the points, while their gradients are made


def connect(box: Box, points: Tensor, slack: float = 0.5) -> Tensor:
    """Return `points` ([batch, estimators, ...]) with pseudo-gradients to the bounds of `box`.

    `slack` is the paper's c: the share of the width over which a bound loses its influence.
    0 is the binary connector (only points on a bound count), 1 the linear one. The gradients of
    all estimators of a sample add up on the bounds that they share; the points get none.
    """
    output: Tensor = _Connector.apply(box.lower, box.upper, points.detach(), slack)
    return output


def pseudo_gradients(
    lower: Tensor, upper: Tensor, points: Tensor, slack: float
) -> tuple[Tensor, Tensor]:
    """Return `d point / d lower` and `d point / d upper` of the rectified linear connector.

    The paper's `max(0, 1 - (z - l) / (c (u - l)))`, and the same from above; 1/2 and 1/2 where
    the box has no width.
    """
    width = upper - lower
    if slack == 0:
        empty = 0.5 * (width < DEGENERATE)
        on_lower, on_upper = points <= lower, points >= upper
        return torch.where(empty > 0, empty, on_lower), torch.where(empty > 0, empty, on_upper)
    reach = slack * width
    scale = reach.clamp(min=DEGENERATE)
    to_lower, to_upper = lower + reach - points, points - (upper - reach)
    return _share(to_lower, scale), _share(to_upper, scale)


def _share(overlap: Tensor, scale: Tensor) -> Tensor:
    outside = overlap < 0
    return overlap.clamp_(min=DEGENERATE / 2).div_(scale).masked_fill_(outside, 0.0)


def _samples_at_once(points: Tensor) -> int:
    """Return the samples of a piece: this is many passes over little data.

    On a processor it stays in the cache. Where each pass is a launch, one piece is the fastest.
    """
    each = points[0].numel() * points.element_size() if len(points) else 1
    if launches(points):
        return rows_at_once(memory_budget(points.device), TEMPORARIES * each)
    return max(1, PIECE // max(each, 1))


class _Connector(torch.autograd.Function):
    """The identity on the points, with gradients to the bounds instead."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, upper: Tensor, points: Tensor, slack: float) -> Tensor:
        ctx.save_for_backward(lower, upper, points)
        ctx.slack = slack
        return points.view_as(points)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        lower, upper, points = ctx.saved_tensors
        to_lower, to_upper = torch.empty_like(lower), torch.empty_like(upper)
        for piece in torch.arange(len(points)).split(_samples_at_once(points)):
            rows = slice(int(piece[0]), int(piece[-1]) + 1)
            low, high = lower[rows].unsqueeze(1), upper[rows].unsqueeze(1)
            slopes = pseudo_gradients(low, high, points[rows], ctx.slack)
            for slope, result in zip(slopes, (to_lower, to_upper), strict=True):
                torch.sum(slope * grads[0][rows], 1, out=result[rows])
        return to_lower, to_upper, None, None
