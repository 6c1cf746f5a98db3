"""IBP training (Gowal et al. 2018; Mirman et al. 2018; recipe of Shi et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Loss, Objective
from tightrope.training.objectives.propagation import interval_loss


@dataclass(frozen=True)
class IBP(Objective):
    """Cross-entropy of interval bounds: an upper bound of the worst-case loss.

    Sound, fast and easy to certify, at the price of natural accuracy.
    """

    name: ClassVar[str] = "ibp"
    summary: ClassVar[str] = "cross-entropy of interval bounds (sound upper bound)"
    propagates_boxes: ClassVar[bool] = True

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `L_IBP = ln(1 + sum_i exp(upper bound of o_i - o_y))`, the paper's Eq. (2)."""
        return interval_loss(model, Box.ball(x, radius), y)
