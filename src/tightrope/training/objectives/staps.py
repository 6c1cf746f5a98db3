"""STAPS (Mao et al. 2023): TAPS on SABR's small box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.sabr import SABR
from tightrope.training.objectives.taps import LatentAttack
from tightrope.training.parsing import setting

_SEARCH = "the search for the small box"


@dataclass(frozen=True)
class STAPS(LatentAttack):
    """TAPS with SABR's region: less regularisation than TAPS, tight where it matters."""

    name: ClassVar[str] = "staps"
    summary: ClassVar[str] = "TAPS over SABR's small box"

    ratio: float = setting(0.4, options.positive_share, "SABR's lambda = tau / epsilon")
    attack_steps: int = options.steps(10, _SEARCH)
    attack_restarts: int = options.restarts(1, _SEARCH)
    attack_step_size: float = options.step_size(0.2, f"step of {_SEARCH}, in half-widths")
    attack_step_decay: float = options.step_decay(1.0, f"decay of the steps of {_SEARCH}")
    attack_start: str = options.start(_SEARCH)

    @property
    def annealing(self) -> SABR:
        """SABR with the same region, while the radius grows."""
        return SABR(
            ratio=self.ratio,
            steps=self.attack_steps,
            restarts=self.attack_restarts,
            step_size=self.attack_step_size,
            step_decay=self.attack_step_decay,
            shrink=self.shrink,
            start=self.attack_start,
        )

    def region(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Box:
        """SABR's small box."""
        return self.annealing.region(model, x, y, radius)
