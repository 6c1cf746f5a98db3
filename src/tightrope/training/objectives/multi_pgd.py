"""Multi-estimator adversarial training: TAPS with the whole network as classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightrope.attacks import attack_margins, latent_steps
from tightrope.box import Box
from tightrope.graph import Graph
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Guarantee, Loss, Objective, certified
from tightrope.training.objectives.propagation import (
    estimated_margins,
    evaluation_batch,
    margin_loss,
)


@dataclass(frozen=True)
class MultiPGD(Objective):
    """The worst point of each class in the input box: a lower bound, tighter than PGD's."""

    name: ClassVar[str] = "multi-pgd"
    summary: ClassVar[str] = "the worst point of each class in the input box (lower bound)"
    guarantee: ClassVar[Guarantee] = Guarantee.NONE

    steps: int = options.steps(10)
    restarts: int = options.restarts()
    step_size: float | None = options.step_size(None, options.FULL_WIDTHS)

    def largest_batch(self, graph: Graph) -> int:
        """Return how many samples to evaluate at a time."""
        return evaluation_batch(graph)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `ln(1 + sum_i exp(o_i - o_y))`, each margin at its own worst point."""
        steps = latent_steps(self.steps, self.step_size)
        ball = Box.ball(x, radius)
        points = attack_margins(model.graph, ball, y, steps=steps, restarts=self.restarts)
        margins = estimated_margins(model.graph, points, y)
        return Loss(margin_loss(margins, y), certified(margins, y))
