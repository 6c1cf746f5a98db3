"""Standard training: the baseline without any robustness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Guarantee, Loss, Objective


@dataclass(frozen=True)
class Standard(Objective):
    """Cross-entropy on the clean inputs.

    Use it as the upper end of natural accuracy; its networks have no robustness to speak of.
    """

    name: ClassVar[str] = "standard"
    summary: ClassVar[str] = "cross-entropy on clean inputs"
    guarantee: ClassVar[Guarantee] = Guarantee.NONE

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the cross-entropy of the clean batch."""
        return Loss(F.cross_entropy(model.logits, y))
