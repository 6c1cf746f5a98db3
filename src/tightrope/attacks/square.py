"""Square Attack (Andriushchenko et al. 2020): random search that needs no gradients.

It begins with vertical stripes at the ends of the ball. Each query after that moves a square of
pixels to one of the ends and keeps it if the margin falls. The squares shrink.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tightrope.attacks.apgd import Ball
from tightrope.attacks.goals import worst_margin
from tightrope.attacks.pgd import Network
from tightrope.deadline import check_time

QUERIES = 5000
SHARE = 0.8  # of the pixels that a square covers at first
HALVED = (10, 50, 200, 500, 1000, 2000, 4000)  # after how many queries it is halved


def share_at(query: int) -> float:
    """Return the share of the pixels in the square of a query, counted from zero."""
    return SHARE / 2 ** sum(query > halved for halved in HALVED)


def sides(shape: tuple[int, int], share: float) -> tuple[int, int]:
    """Return the height and the width of a square, or of a segment where there is one row."""
    height, width = shape
    if height == 1:
        return 1, max(1, round(share * width))
    side = max(1, round(math.sqrt(share * height * width)))
    return min(side, height), min(side, width)


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, rows and columns; what is no image is one row."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, 1, math.prod(shape))


@torch.no_grad()
def square(network: Network, ball: Ball, *, queries: int = QUERIES) -> Tensor:
    """Return the point with the lowest margin of each sample; those misclassified leave at once."""
    box, radius, labels = ball.box.detach(), ball.radius, ball.labels
    x = ball.x
    channels, height, width = _image(tuple(x.shape[1:]))

    def signs(count: int, *size: int) -> Tensor:
        return torch.randint(0, 2, (count, *size), device=x.device).to(x.dtype) * 2 - 1

    stripes = signs(len(x), channels, 1, width).expand(-1, -1, height, -1).reshape_as(x)
    best = box.project(x + radius * stripes)
    margin = worst_margin(network(best), labels)
    for query in range(queries):
        check_time()
        alive = (margin > 0).nonzero()[:, 0]
        if not len(alive):
            break
        tall, wide = sides((height, width), share_at(query))
        top, left = (
            torch.randint(0, whole - part + 1, (len(alive), 1), device=x.device)
            for whole, part in ((height, tall), (width, wide))
        )
        rows, columns = (
            (torch.arange(whole, device=x.device) >= start)
            & (torch.arange(whole, device=x.device) < start + part)
            for whole, start, part in ((height, top, tall), (width, left, wide))
        )
        inside = (rows[:, None, :, None] & columns[:, None, None, :]).to(x.dtype)
        change = (inside * signs(len(alive), channels, 1, 1)).reshape_as(x[alive])
        points = box[alive].project(best[alive] + 2 * radius[alive] * change)
        found = worst_margin(network(points), labels[alive])
        better = found < margin[alive]
        best[alive[better]] = points[better]
        margin[alive[better]] = found[better]
    return best
