"""Adversarial training (Madry et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified
from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Guarantee, Loss, Objective
from tightrope.training.objectives.regions import adversarial_points


@dataclass(frozen=True)
class PGD(Objective):
    """Cross-entropy at adversarial points: a lower bound of the worst-case loss.

    Good against attacks, but its networks can hardly be certified.
    """

    name: ClassVar[str] = "pgd"
    summary: ClassVar[str] = "cross-entropy at adversarial points (lower bound)"
    guarantee: ClassVar[Guarantee] = Guarantee.NONE

    steps: int = options.steps(10)
    restarts: int = options.restarts()
    step_size: float | None = options.step_size(None, options.HALF_WIDTHS)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `CE(f(x'), y)` at the point x' in the ball that PGD finds."""
        adversarial = adversarial_points(
            model,
            Box.ball(x, radius),
            y,
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            # One restart trains on its last iterate (Madry et al.); several need comparing.
            last=True,
        )
        logits = model.graph(adversarial)
        return Loss(F.cross_entropy(logits, y), ~misclassified(logits.detach(), y))
