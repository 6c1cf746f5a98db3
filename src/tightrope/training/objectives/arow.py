"""ARoW (Yang et al. 2023): anti-robust samples weigh more in the regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import Divergence, misclassified
from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Guarantee, Loss, Objective
from tightrope.training.objectives.regions import adversarial_points
from tightrope.training.parsing import setting


@dataclass(frozen=True)
class ARoW(Objective):
    """The clean loss with smoothed labels, and divergences that count more where robustness lacks.

    An empirical defence: its networks can hardly be certified.
    """

    name: ClassVar[str] = "arow"
    summary: ClassVar[str] = "clean loss, and divergences weighted by the lack of robustness"
    guarantee: ClassVar[Guarantee] = Guarantee.NONE

    weight: float = setting(7.0, options.not_negative, "of the weighted divergence")
    label_smoothing: float = setting(0.2, options.share, "share of all classes in the labels")
    steps: int = options.steps(10)
    restarts: int = options.restarts()
    step_size: float | None = options.step_size(None, options.HALF_WIDTHS)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `CE_s(o(x)) + w mean(KL(p(x) || p(x')) (1 - p_y(x')))`."""
        clean = model.logits
        points = adversarial_points(
            model,
            Box.ball(x, radius),
            y,
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            goal=Divergence(clean.detach()),
        )
        logits = model.graph(points)
        share = logits.softmax(1).gather(1, y[:, None])[:, 0]
        penalty = (Divergence(clean)(logits) * (1 - share)).mean()
        natural = F.cross_entropy(clean, y, label_smoothing=self.label_smoothing)
        return Loss(natural + self.weight * penalty, ~misclassified(logits.detach(), y))
