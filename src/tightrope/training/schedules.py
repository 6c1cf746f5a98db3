"""What changes during training: the perturbation radius and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Annealing = Literal["smooth", "linear", "constant"]


@dataclass(frozen=True)
class RadiusSchedule:
    """The radius at each iteration: zero until `start`, `target` from `end` on.

    `smooth` (Shi et al. 2021) rises with the fourth power over the first part of the ramp, up to
    `middle` (a quarter of it), and linearly after it, with a continuous slope; `linear` is a
    straight line; `constant` jumps to the target at `start`.
    """

    target: float
    start: int
    end: int
    kind: Annealing = "smooth"
    middle: float = 0.25

    def __call__(self, iteration: int) -> float:
        """Return the radius at an iteration, counted from zero."""
        if self.kind == "constant":
            return self.target if iteration >= self.start else 0.0
        if iteration >= self.end:
            return self.target
        if iteration <= self.start:
            return 0.0
        if self.kind == "linear":
            return self.target * (iteration - self.start) / (self.end - self.start)
        return self._smooth(iteration)

    def _smooth(self, iteration: int) -> float:
        curved = int(self.middle * (self.end - self.start))
        middle = self.start + curved
        # The height at `middle` is A q^4 and the slope 4 A q^3; both sides meet the target.
        scale = self.target / ((self.end - middle) * 4 * curved**3 + curved**4 or 1)
        if iteration <= middle:
            return scale * (iteration - self.start) ** 4
        height = scale * curved**4
        return height + (self.target - height) * (iteration - middle) / (self.end - middle)


def learning_rate(base: float, epoch: int, decay_epochs: Sequence[int], factor: float) -> float:
    """Return the learning rate of an epoch: multiplied by `factor` at each decay epoch."""
    return base * factor ** sum(epoch >= decay for decay in decay_epochs)


def cosine(base: float, time: float) -> float:
    """Return the learning rate when that part of a training is done: it falls to zero."""
    return base * (1 + math.cos(math.pi * time)) / 2
