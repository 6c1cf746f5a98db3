"""MART (Wang et al. 2020): misclassified samples weigh more in the regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified
from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Guarantee, Loss, Objective
from tightrope.training.objectives.regions import adversarial_points
from tightrope.training.parsing import setting

# As published: they keep logarithms of probabilities of 0 and 1 finite.
NOT_ZERO, ABOVE_ONE = 1e-12, 1.0001


@dataclass(frozen=True)
class MART(Objective):
    """Boosted cross-entropy under attack, and divergences that count more where clean inputs fail.

    An empirical defence: its networks can hardly be certified.
    """

    name: ClassVar[str] = "mart"
    summary: ClassVar[str] = "boosted adversarial loss, and divergences weighted by clean errors"
    guarantee: ClassVar[Guarantee] = Guarantee.NONE

    weight: float = setting(5.0, options.not_negative, "of the weighted divergence")
    steps: int = options.steps(10)
    restarts: int = options.restarts()
    step_size: float | None = options.step_size(None, options.HALF_WIDTHS)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `BCE(o(x')) + w mean(KL(p(x) || p(x')) (1 - p_y(x)))`."""
        points = adversarial_points(
            model,
            Box.ball(x, radius),
            y,
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
        )
        logits = model.graph(points)
        clean = model.logits.log_softmax(1)
        p, attacked = clean.exp(), logits.softmax(1)
        apart = (p * (clean - torch.log(attacked + NOT_ZERO))).sum(1)
        penalty = (apart * (1 - p.gather(1, y[:, None])[:, 0])).mean()
        value = boosted_loss(logits, y) + self.weight * penalty
        return Loss(value, ~misclassified(logits.detach(), y))


def boosted_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy, and that of the nearest wrong class being the right one."""
    wrong = logits.softmax(1).scatter(1, y[:, None], 0.0).amax(1)
    boost = -torch.log(ABOVE_ONE - wrong + NOT_ZERO).mean()
    return F.cross_entropy(logits, y) + boost
