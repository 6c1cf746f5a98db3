"""FAB-T (Croce and Hein 2020): a small perturbation across the boundary to one class.

Each step linearises the difference of two logits and projects onto the plane where it is zero, both
from the present point and from the input, within the domain; a point beyond the boundary is drawn
back towards the input. So the nearest adversarial point is sought, whatever the radius.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.attacks.apgd import Ball
from tightrope.attacks.pgd import Network
from tightrope.box import flat
from tightrope.deadline import check_time

STEPS = 100
MOST_BIAS = 0.1  # alpha_max: how much the input may draw
BEYOND = 1.05  # eta: how far steps go beyond the plane
BACK = 0.9  # beta: how much is left of a perturbation that went across


def fab(network: Network, ball: Ball, targets: Tensor, *, steps: int = STEPS) -> Tensor:
    """Return the nearest misclassified point found of each sample, or the sample itself."""
    low, high = ball.domain
    x = points = found = ball.x
    nearest = flat(x).new_full((len(x),), torch.inf)
    each = (-1, *(1 for _ in x.shape[1:]))
    for _ in range(steps):
        check_time()
        gap, slope = _difference(network, points, ball.labels, targets)
        # The plane is `slope . z = level`.
        level = (flat(slope) * flat(points)).sum(1) - gap
        to_plane, from_input = (
            project_plane(flat(t), flat(slope), level, low, high).view_as(x) for t in (points, x)
        )
        own, other = (flat(t.abs()).amax(1).clamp(min=1e-8) for t in (to_plane, from_input))
        bias = (own / (own + other)).clamp(0, MOST_BIAS).view(each)
        moved = (points + BEYOND * to_plane) * (1 - bias) + (x + BEYOND * from_input) * bias
        points = moved.clamp(low, high)
        with torch.no_grad():
            misled = ball.misled(network(points))
        distance = flat((points - x).abs()).amax(1)
        better = misled & (distance < nearest)
        found = torch.where(better.view(each), points, found)
        nearest = torch.where(better, distance, nearest)
        points = torch.where(misled.view(each), x + BACK * (points - x), points)
    return found


def _difference(
    network: Network, points: Tensor, labels: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `z_t - z_y` and its gradient."""
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        pair = network(points).gather(1, torch.stack((targets, labels), 1))
        gap = pair[:, 0] - pair[:, 1]
        (slope,) = torch.autograd.grad(gap.sum(), points)
    return gap.detach(), slope


def project_plane(x: Tensor, w: Tensor, level: Tensor, low: float, high: float) -> Tensor:
    """Return the smallest move in the l-infinity norm onto `w . z = level` within [low, high].

    All are [batch, inputs]. With moves of at most r each input i can change the sum by
    `|w_i| min(r, room_i)`, room being how far it is from the side it goes to. The sum of that is
    piecewise linear in r, and its pieces begin at the rooms. Where all rooms together do not reach
    the plane, all of them are used up.
    """
    excess = (w * x).sum(1) - level
    way = -(w * torch.where(excess >= 0, 1.0, -1.0)[:, None]).sign()
    room = torch.where(way > 0, high - x, x - low)
    ranked, order = room.sort(1)
    size = w.abs().gather(1, order)
    used = torch.where(size > 0, size * ranked, 0).cumsum(1)  # by those that have no more room
    left = size.sum(1, keepdim=True) - size.cumsum(1)
    reach = torch.where(left > 0, ranked * left, 0) + used  # with r at each room
    need = excess.abs()[:, None]
    place = torch.searchsorted(reach, need)  # pieces that lie below
    index = place.clamp(max=reach.shape[1] - 1)
    spent = torch.where(place > 0, used.gather(1, (index - 1).clamp(min=0)), 0)
    rest = torch.where(
        index > 0, left.gather(1, (index - 1).clamp(min=0)), size.sum(1, keepdim=True)
    )
    within = (need - spent) / rest.clamp(min=torch.finfo(x.dtype).tiny)
    radius = torch.where(place < reach.shape[1], within, ranked[:, -1:])
    return torch.where(way == 0, 0, way * torch.minimum(radius, room))
