"""SABR (Mueller et al. 2023): interval bounds over a small box around an adversarial point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.graph.graph import Rules
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective
from tightrope.training.objectives.propagation import interval_loss, interval_rules
from tightrope.training.objectives.regions import SmallBox
from tightrope.training.parsing import setting


@dataclass(frozen=True)
class SABR(Objective):
    """IBP on a part of the ball: less regularisation than IBP, no longer sound."""

    name: ClassVar[str] = "sabr"
    summary: ClassVar[str] = "interval bounds over a small box around an adversarial point"
    propagates_boxes: ClassVar[bool] = True

    ratio: float = setting(0.4, options.positive_share, "lambda = tau / epsilon; 1 is IBP")
    steps: int = options.steps(8)
    restarts: int = options.restarts()
    step_size: float = options.step_size(0.5, "step in half-widths of the ball")
    step_decay: float = options.step_decay(0.1, "factor after 50, 80 and 90 % of the steps")
    shrink: float = options.shrink()
    start: str = options.start()

    @property
    def rules(self) -> Rules:
        """Interval rules with ReLU shrinkage."""
        return interval_rules(self.shrink)

    @property
    def region(self) -> SmallBox:
        """Where in the ball the bounds are taken."""
        attack = (self.steps, self.restarts, self.step_size, self.step_decay, self.start)
        return SmallBox(self.ratio, *attack)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the IBP loss of the small box."""
        return interval_loss(model, self.region(model, x, y, radius), y, rules=self.rules)
