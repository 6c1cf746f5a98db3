"""STAPS (Mao et al. 2023): TAPS on SABR's small box."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Objective, require
from tightrope.training.objectives.regions import small_box
from tightrope.training.objectives.sabr import SABR
from tightrope.training.objectives.taps import TAPS


@dataclass(frozen=True)
class STAPS(TAPS):
    """TAPS with SABR's region: less regularisation than TAPS, tight where it matters.

    The options of TAPS; and `ratio` (SABR's lambda) with the `attack_` options of the search for
    the small box.
    """

    name: ClassVar[str] = "staps"
    summary: ClassVar[str] = "TAPS over SABR's small box"

    ratio: float = 0.4
    attack_steps: int = 10
    attack_restarts: int = 1
    attack_step_size: float = 0.2
    attack_step_decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = self.ratio
        require(0 < ratio <= 1, f"staps.ratio must be above 0 and at most 1, got {ratio}")
        counts = self.attack_steps > 0 and self.attack_restarts > 0
        require(counts, "staps.attack_steps and attack_restarts must be at least 1")
        require(0 < self.attack_step_size < math.inf, "staps.attack_step_size must be positive")
        decay = self.attack_step_decay
        require(0 < decay <= 1, "staps.attack_step_decay must be above 0 and at most 1")

    @property
    def annealing(self) -> Objective:
        """SABR with the same region, while the radius grows."""
        return SABR(
            self.ratio,
            self.attack_steps,
            self.attack_restarts,
            self.attack_step_size,
            self.attack_step_decay,
            self.shrink,
        )

    def region(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Box:
        """SABR's small box."""
        return small_box(
            model,
            x,
            y,
            radius,
            ratio=self.ratio,
            steps=self.attack_steps,
            restarts=self.attack_restarts,
            step_size=self.attack_step_size,
            step_decay=self.attack_step_decay,
        )
