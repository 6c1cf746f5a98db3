"""The attack used to judge networks: many restarts with different goals."""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.attacks.goals import CrossEntropy, Goal, Margin
from tightrope.attacks.pgd import Network, Steps, pgd
from tightrope.box import Box

MILESTONES = (0.5, 0.8, 0.9)


def strong_attack(
    network: Network, box: Box, labels: Tensor, *, steps: int = 200, restarts: int = 5
) -> Tensor:
    """Return one point per box, misclassified where one was found.

    Restarts alternate between the worst margin and the cross-entropy; each begins at a random
    point, with steps of a quarter of the half-width that shrink towards the end. Samples leave
    as soon as they are broken.
    """
    best = box.sample()
    alive = torch.arange(len(labels), device=labels.device)
    for restart in range(restarts):
        kind: type[Goal] = Margin if restart % 2 == 0 else CrossEntropy
        goal = kind(labels[alive])  # type: ignore[call-arg]
        points = pgd(
            network, box[alive], goal, steps=Steps(steps, milestones=MILESTONES), stop=True
        )
        best[alive] = points
        with torch.no_grad():
            alive = alive[~goal.reached(network(points))]
        if not len(alive):
            break
    return best
