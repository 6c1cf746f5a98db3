"""SABR (Mueller et al. 2023): interval bounds over a small box around an adversarial point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Loss, require
from tightrope.training.objectives.propagation import interval_loss
from tightrope.training.objectives.regions import small_box


@dataclass(frozen=True)
class SABR:
    """IBP on a part of the ball: less regularisation than IBP, no longer sound.

    `ratio` is lambda = tau / epsilon; 1 is IBP. `step_size` of the attack is relative to the
    half-width and drops by `step_decay` after 50, 80 and 90 % of the steps. `shrink` below 1
    multiplies the upper bounds of ReLUs that cross zero (published for CIFAR-10, 2/255: 0.8).
    """

    name: ClassVar[str] = "sabr"
    summary: ClassVar[str] = "interval bounds over a small box around an adversarial point"
    propagates_boxes: ClassVar[bool] = True

    ratio: float = 0.4
    steps: int = 8
    restarts: int = 1
    step_size: float = 0.5
    step_decay: float = 0.1
    shrink: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"sabr.ratio must be above 0 and at most 1, got {self.ratio}")
        require(self.steps > 0 and self.restarts > 0, "sabr.steps and restarts must be at least 1")
        require(0 < self.step_size < math.inf, "sabr.step_size must be positive")
        require(0 < self.step_decay <= 1, "sabr.step_decay must be above 0 and at most 1")
        require(0 < self.shrink <= 1, f"sabr.shrink must be above 0 and at most 1: {self.shrink}")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the IBP loss of the small box."""
        box = small_box(
            model,
            x,
            y,
            radius,
            ratio=self.ratio,
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            step_decay=self.step_decay,
        )
        return interval_loss(model, box, y, shrink=self.shrink)
