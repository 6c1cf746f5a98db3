"""Training under Gaussian noise (Lecuyer et al. 2019; Cohen et al. 2019), for smoothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.draws import normal_like
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Guarantee, Loss, Objective
from tightrope.training.parsing import setting


@dataclass(frozen=True)
class Noise(Objective):
    """Cross-entropy at noisy inputs: the network whose majority vote `tightrope smooth` certifies.

    The radius of the settings plays no part in it.
    """

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "cross-entropy under Gaussian noise, for randomised smoothing"
    guarantee: ClassVar[Guarantee] = Guarantee.PROBABILISTIC

    sigma: float = setting(0.25, options.positive, "deviation of the noise, inputs in [0, 1]")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `CE(o(x + sigma xi))` with one standard normal xi for each input."""
        return Loss(F.cross_entropy(model.graph(x + self.sigma * normal_like(x)), y))
