"""Points spread over a box of few inputs, and moves that need no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.attacks.goals import Rows
from tightrope.attacks.pgd import Network
from tightrope.box import Box, flat

# Up to so many inputs, all corners of the box are among the points.
CORNERS = 10


def spread_points(box: Box, count: int) -> Tensor:
    """Return the middle, the corners if they are few, and a Sobol sequence of a box (batch 1)."""
    lower, upper = (flat(t) for t in box.corners)
    varying = (upper > lower)[0].nonzero()[:, 0]
    shares = lower.new_full((1, len(varying)), 0.5)
    if len(varying) <= CORNERS:
        bits = torch.arange(1 << len(varying), device=lower.device)
        places = torch.arange(len(varying), device=lower.device)
        shares = torch.cat((shares, (bits[:, None] >> places & 1).to(lower)))
    if 0 < len(varying) <= torch.quasirandom.SobolEngine.MAXDIM:
        seed = int(torch.randint(1 << 30, ()))
        engine = torch.quasirandom.SobolEngine(len(varying), scramble=True, seed=seed)
        # By default they would be of torch's default type, which may be one it cannot draw.
        shares = torch.cat((shares, engine.draw(count, dtype=torch.float32).to(lower)))
    points = lower.repeat(len(shares), 1)
    width = (upper - lower)[:, varying]
    points[:, varying] += shares * width
    return box.project(points.view(-1, *box.lower.shape[1:]))


def search_pattern(
    network: Network, box: Box, goal: Rows, points: Tensor, *, moves: int
) -> tuple[Tensor, Tensor]:
    """Improve points by steps along single coordinates; return them with their scores.

    Where no step of a point leads up, its steps become shorter. This works where gradients vanish.
    """
    lower, upper = (flat(t) for t in box.corners)
    varying = (upper > lower)[0].nonzero()[:, 0]
    shape = points.shape[1:]
    points = flat(points).clone()
    score = goal(network(points.view(-1, *shape)))
    units = torch.zeros(2 * len(varying), points.shape[1], dtype=lower.dtype, device=lower.device)
    places = torch.arange(len(varying), device=lower.device)
    units[places, varying] = (upper - lower)[0, varying]
    units[places + len(varying), varying] = -(upper - lower)[0, varying]
    numbers = torch.arange(len(points), device=lower.device)
    many = goal.select(numbers.repeat_interleave(len(units)))
    length = points.new_full((len(points),), 0.25)
    for _ in range(moves if len(units) else 0):
        tries = points[:, None] + length[:, None, None] * units
        tries = torch.clamp(tries, lower, upper)
        values = many(network(tries.flatten(0, 1).view(-1, *shape))).view(len(points), -1)
        best = values.nan_to_num(-torch.inf).max(1)
        better = best.values > score
        points = torch.where(better[:, None], tries[numbers, best.indices], points)
        score = torch.where(better, best.values, score)
        length = torch.where(better, length, length / 2)
        if bool((score >= 0).any()):
            break
    return points.view(-1, *shape), score
