"""TAPS (Mao et al. 2023): interval bounds, then an attack inside the latent box."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from tightrope.attacks import attack_loss, attack_margins, latent_steps
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph
from tightrope.graph.graph import Rules
from tightrope.training.batchnorm import FixedModel
from tightrope.training.connector import connect
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.objectives.ibp import IBP
from tightrope.training.objectives.propagation import (
    estimated_margins,
    evaluation_batch,
    gradient_factors,
    interval_loss,
    interval_rules,
    margin_loss,
    scale_gradient,
)
from tightrope.training.objectives.sabr import SABR
from tightrope.training.parsing import choice, flag, setting


@dataclass(frozen=True)
class LatentAttack(Objective):
    """What TAPS and STAPS share: the product loss of a region of the input.

    Interval bounds go through the feature extractor, an attack searches their box for the worst
    point of each class, and the gradient connector joins the two.
    """

    propagates_boxes: ClassVar[bool] = True

    classifier_relus: int = setting(1, options.count_or_none, "ReLUs behind the split (0 is IBP)")
    weight: float = setting(
        5.0, options.weight, "w: the TAPS loss's gradient against the IBP loss's"
    )
    connector: float = setting(0.5, options.share, "c, from 0 (binary) to 1 (linear)")
    steps: int = options.steps(20, "the latent attack")
    restarts: int = options.restarts(1, "the latent attack")
    estimators: str = setting(
        "multi", choice("multi", "single"), "one latent point per wrong class, or one for all"
    )
    loss: str = setting(
        "product", choice("product", "taps", "ibp"), "the product, or one of its factors alone"
    )
    scale: str = setting("plain", choice("plain", "paper"), "plain, or as the paper's Eq. (6)")
    step_size: float | None = options.step_size(None, options.FULL_WIDTHS)
    step_decay: float = options.step_decay(0.1, "factor after 70 % of the steps")
    decay_from: int = setting(20, options.count, "fewest steps with a decay (CTBench: 10)")
    connected: bool = setting(True, flag, "whether gradients reach the extractor from the points")
    shrink: float = options.shrink()

    @property
    def rules(self) -> Rules:
        """Interval rules with ReLU shrinkage."""
        return interval_rules(self.shrink)

    def check(self, graph: Graph) -> None:
        """Refuse networks without the split."""
        graph.split(self.classifier_relus)

    def largest_batch(self, graph: Graph) -> int:
        """Return how many samples to evaluate at a time."""
        return evaluation_batch(graph.split(self.classifier_relus)[1])

    def region(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Box:
        """Return the input box that is propagated."""
        raise NotImplementedError

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `L_TAPS * L_IBP` with the gradient weights of Eq. (6)."""
        box = self.region(model, x, y, radius)
        if self.classifier_relus == 0 or self.loss == "ibp":
            return interval_loss(model, box, y, rules=self.rules)
        extractor, classifier = model.graph.split(self.classifier_relus)
        latent, _ = interval.bounds(extractor, box, rules=self.rules)
        margins = self.margins(classifier, latent, y)
        taps, robust = margin_loss(margins, y), certified(margins, y)
        if self.loss == "taps":
            return Loss(taps, robust)
        ibp = margin_loss(interval.margins(classifier, latent, y, rules=self.rules)[0], y)
        product = partial(weighted_product, factors=gradient_factors(self.weight, self.scale))
        return Loss.of(product, taps, ibp, robust=robust)

    def margins(self, classifier: Graph, latent: Box, y: Tensor) -> Tensor:
        """Return the margins at the worst latent points, joined to the bounds by the connector."""
        steps = latent_steps(self.steps, self.step_size, self.step_decay, self.decay_from)
        attack = attack_loss if self.estimators == "single" else attack_margins
        points = attack(classifier, latent, y, steps=steps, restarts=self.restarts)
        if self.connected:
            points = connect(latent, points, self.connector)
        return estimated_margins(classifier, points, y)


@dataclass(frozen=True)
class TAPS(LatentAttack):
    """The product of the TAPS loss and the IBP loss: precise, and still certifiable."""

    name: ClassVar[str] = "taps"
    summary: ClassVar[str] = "interval bounds, then a latent attack, joined by the connector"

    @property
    def annealing(self) -> Objective:
        """IBP, while the radius grows; with shrinkage, SABR's IBP over the whole ball."""
        return IBP() if self.shrink == 1 else SABR(ratio=1.0, shrink=self.shrink)

    def region(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Box:
        """The whole ball."""
        return Box.ball(x, radius)


def weighted_product(taps: Tensor, ibp: Tensor, *, factors: tuple[float, float]) -> Tensor:
    """Return `L_TAPS L_IBP` whose gradient is `a L_IBP dL_TAPS + b L_TAPS dL_IBP`."""
    return scale_gradient(taps, factors[0]) * scale_gradient(ibp, factors[1])
