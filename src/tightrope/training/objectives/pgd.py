"""Adversarial training (Madry et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified
from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Loss, require
from tightrope.training.objectives.regions import adversarial_points


@dataclass(frozen=True)
class PGD:
    """Cross-entropy at adversarial points: a lower bound of the worst-case loss.

    Good against attacks, but its networks can hardly be certified. `step_size` is relative to
    the half-width of the box; None means `max(0.25, 2 / steps)`.
    """

    name: ClassVar[str] = "pgd"
    summary: ClassVar[str] = "cross-entropy at adversarial points (lower bound)"
    propagates_boxes: ClassVar[bool] = False

    steps: int = 10
    restarts: int = 1
    step_size: float | None = None

    def __post_init__(self) -> None:
        counts = self.steps > 0 and self.restarts > 0
        require(counts, "pgd.steps and pgd.restarts must be at least 1")
        size = self.step_size
        text = f"pgd.step_size must be positive, got {size}"
        require(size is None or 0 < size < math.inf, text)

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
