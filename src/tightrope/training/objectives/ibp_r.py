"""IBP-R (De Palma et al. 2022): adversarial training with small IBP relaxations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.objectives.regions import adversarial_points
from tightrope.training.parsing import flag, setting


@dataclass(frozen=True)
class IBPR(Objective):
    """Adversarial training plus the area of the ReLU relaxations under IBP bounds.

    The radius to train at (`train_eps`) is published as 2.1 (CIFAR-10, 2/255) and
    1.7 (8/255) times the radius to certify; it grows over three quarters of the epochs.
    """

    name: ClassVar[str] = "ibp-r"
    summary: ClassVar[str] = "adversarial loss plus the area of ReLU relaxations under IBP bounds"
    annealing_share: ClassVar[float | None] = 0.75

    area_weight: float = setting(
        1e-4, options.not_negative, "weight of the area: the published rho"
    )
    masked: bool = setting(False, flag, "count only samples that are classified correctly")
    steps: int = options.steps(8)
    restarts: int = options.restarts()
    step_size: float | None = options.step_size(None, options.HALF_WIDTHS)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `(1 - k) CE(x) + k CE(x') + k R`, with k the share of the final radius."""
        k, ball = model.progress, Box.ball(x, radius)
        points = adversarial_points(
            model,
            ball,
            y,
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            last=True,
        )
        adversarial = F.cross_entropy(model.graph(points), y)
        relu_inputs = (model.graph.nodes[i].inputs[0] for i in model.graph.relus)
        bounded = (*relu_inputs, len(model.graph.nodes) - 1)
        margins, boxes = interval.margins(model.graph, ball, y, keep=bounded)
        area = torch.stack([relaxation_area(boxes[i]) for i in bounded]).mean(0)
        if self.masked:
            area = area * ~misclassified(model.logits.detach(), y)
        natural = F.cross_entropy(model.logits, y)
        value = (1 - k) * natural + k * adversarial + k * self.area_weight * area.mean()
        return Loss(value, certified(margins, y))


def relaxation_area(box: Box) -> Tensor:
    """Return the sum over neurons of `max(-l, 0) max(u, 0)`, per sample."""
    lower, upper = box.corners
    return ((-lower).relu() * upper.relu()).flatten(1).sum(1)
