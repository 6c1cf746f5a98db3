"""The attack used to judge networks: many restarts with different goals."""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.attacks.goals import Alternating, Direction, Rows
from tightrope.attacks.pgd import Network, Steps, pgd
from tightrope.box import Box, flat

MILESTONES = (0.5, 0.8, 0.9)
TOGETHER = 32  # points that take hardly longer than one


def strong_attack(
    network: Network, box: Box, labels: Tensor, *, steps: int = 200, restarts: int = 5
) -> Tensor:
    """Return one point per box, misclassified where one was found.

    Restarts alternate between the worst margin and the cross-entropy, with steps of a quarter of
    the half-width that shrink towards the end. From the third on, they begin where the outputs
    have moved in a random direction (ODI), the first two at random points. Samples leave as
    soon as they are broken. Of few samples several restarts go at once, which takes hardly longer.
    """
    best = box.sample()
    alive = torch.arange(len(labels), device=labels.device)
    done = 0
    while done < restarts and len(alive):
        count = max(1, min(restarts - done, TOGETHER // len(alive)))
        number = torch.arange(done, done + count, device=labels.device).repeat(len(alive))
        many = box[alive].repeat(count)
        goal = Alternating(labels[alive].repeat_interleave(count), number % 2 == 0)
        late = (number >= 2).nonzero()[:, 0]
        starts = many.sample()
        if len(late):
            starts[late] = diversified(network, many[late])
        plan = Steps(steps, milestones=MILESTONES)
        points = pgd(network, many, goal, steps=plan, stop=True, starts=(starts,))
        with torch.no_grad():
            reached = goal.reached(network(points)).view(-1, count)
        first = reached.int().argmax(1)
        best[alive] = points.unflatten(0, (-1, count))[
            torch.arange(len(alive), device=alive.device), first
        ]
        alive = alive[~reached.any(1)]
        done += count
    return best


def diversified(
    network: Network, box: Box, *, steps: int = 5, size: float = 0.5, single: bool = False
) -> Tensor:
    """Return points whose outputs went a random way (output-diversified initialisation).

    With `single`, one output went up, and the others wherever that took them.
    """
    start = box.sample()
    with torch.no_grad():
        outputs = flat(network(start))
    weights = torch.rand_like(outputs) * 2 - 1
    if single:
        weights = (weights == weights.amax(1, keepdim=True)).to(outputs.dtype)
    plan = Steps(steps, size=size)
    return pgd(network, box, Direction(weights), steps=plan, keep="last", starts=(start,))


def attack_goal(
    network: Network, box: Box, goal: Rows, *, steps: int = 100, start: Tensor | None = None
) -> Tensor:
    """Return one point per box that comes nearest to its own goal."""
    if start is None:
        start = diversified(network, box)
    plan = Steps(steps, milestones=MILESTONES)
    return pgd(network, box, goal, steps=plan, stop=True, starts=(start,))
