"""Adversarial training (Madry et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import CrossEntropy, Steps, misclassified, pgd
from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Loss


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
        if self.steps < 1 or self.restarts < 1:
            raise UserError("pgd.steps and pgd.restarts must be at least 1")
        if self.step_size is not None and not 0 < self.step_size < math.inf:
            raise UserError(f"pgd.step_size must be positive, got {self.step_size}")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `CE(f(x'), y)` at the point x' in the ball that PGD finds."""
        size = self.step_size or max(0.25, 2 / self.steps)
        adversarial = pgd(
            model.frozen,
            Box.ball(x, radius),
            CrossEntropy(y),
            steps=Steps(self.steps, size),
            restarts=self.restarts,
            # One restart trains on its last iterate (Madry et al.); several need comparing.
            keep="last" if self.restarts == 1 else "best",
        )
        logits = model.graph(adversarial)
        return Loss(F.cross_entropy(logits, y), ~misclassified(logits.detach(), y))
