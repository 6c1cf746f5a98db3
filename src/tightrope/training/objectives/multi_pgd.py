"""Multi-estimator adversarial training: TAPS with the whole network as classifier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.attacks import attack_margins, latent_steps
from tightrope.box import Box
from tightrope.graph import Graph
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Loss, require
from tightrope.training.objectives.propagation import (
    estimated_loss,
    estimated_margins,
    evaluation_batch,
)


@dataclass(frozen=True)
class MultiPGD:
    """The worst point of each class in the input box: a lower bound, tighter than PGD's.

    `step_size` is relative to the full width, by default `max(0.2, 2 / steps)`.
    """

    name: ClassVar[str] = "multi-pgd"
    summary: ClassVar[str] = "the worst point of each class in the input box (lower bound)"
    propagates_boxes: ClassVar[bool] = False

    steps: int = 10
    restarts: int = 1
    step_size: float | None = None

    def __post_init__(self) -> None:
        counts = self.steps > 0 and self.restarts > 0
        require(counts, "multi-pgd.steps and multi-pgd.restarts must be at least 1")
        size = self.step_size
        require(size is None or 0 < size < math.inf, "multi-pgd.step_size must be positive")

    def largest_batch(self, graph: Graph) -> int:
        """Return how many samples to evaluate at a time."""
        return evaluation_batch(graph)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `ln(1 + sum_i exp(o_i - o_y))`, each margin at its own worst point."""
        steps = latent_steps(self.steps, self.step_size)
        ball = Box.ball(x, radius)
        points = attack_margins(model.graph, ball, y, steps=steps, restarts=self.restarts)
        margins = estimated_margins(model.graph, points, y)
        return Loss(estimated_loss(margins), (margins.detach() <= 0).all(1))
