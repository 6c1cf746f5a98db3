"""The attack used to judge networks: many restarts with different goals."""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.attacks.goals import CrossEntropy, Direction, Goal, Margin, Rows
from tightrope.attacks.pgd import Network, Steps, pgd
from tightrope.box import Box, flat

MILESTONES = (0.5, 0.8, 0.9)


def strong_attack(
    network: Network, box: Box, labels: Tensor, *, steps: int = 200, restarts: int = 5
) -> Tensor:
    """Return one point per box, misclassified where one was found.

    Restarts alternate between the worst margin and the cross-entropy, with steps of a quarter of
    the half-width that shrink towards the end. From the third on, they begin where the outputs
    have moved in a random direction (ODI), the first two at random points. Samples leave as
    soon as they are broken.
    """
    best = box.sample()
    alive = torch.arange(len(labels), device=labels.device)
    for restart in range(restarts):
        kind: type[Goal] = Margin if restart % 2 == 0 else CrossEntropy
        goal = kind(labels[alive])  # type: ignore[call-arg]
        starts = (diversified(network, box[alive]),) if restart >= 2 else ()
        points = pgd(
            network,
            box[alive],
            goal,
            steps=Steps(steps, milestones=MILESTONES),
            stop=True,
            starts=starts,
        )
        best[alive] = points
        with torch.no_grad():
            alive = alive[~goal.reached(network(points))]
        if not len(alive):
            break
    return best


def diversified(network: Network, box: Box, *, steps: int = 5) -> Tensor:
    """Return points whose outputs went a random way (output-diversified initialisation)."""
    start = box.sample()
    with torch.no_grad():
        outputs = flat(network(start))
    direction = Direction(torch.rand_like(outputs) * 2 - 1)
    return pgd(network, box, direction, steps=Steps(steps, size=0.5), keep="last", starts=(start,))


def attack_goal(
    network: Network, box: Box, goal: Rows, *, steps: int = 100, start: Tensor | None = None
) -> Tensor:
    """Return one point per box that comes nearest to its own goal."""
    if start is None:
        start = diversified(network, box)
    plan = Steps(steps, milestones=MILESTONES)
    return pgd(network, box, goal, steps=plan, stop=True, starts=(start,))
