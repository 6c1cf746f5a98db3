"""TAPS (Mao et al. 2023): interval bounds, then an attack inside the latent box."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from tightrope.attacks import attack_loss, attack_margins, latent_steps
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph
from tightrope.training.batchnorm import FixedModel
from tightrope.training.connector import connect
from tightrope.training.objectives.base import Loss, Objective, require
from tightrope.training.objectives.ibp import IBP
from tightrope.training.objectives.propagation import (
    estimated_loss,
    estimated_margins,
    evaluation_batch,
    gradient_factors,
    interval_loss,
    interval_rules,
    margin_loss,
    scale_gradient,
)
from tightrope.training.objectives.sabr import SABR


@dataclass(frozen=True)
class TAPS:
    """The product of the TAPS loss and the IBP loss: precise, and still certifiable.

    Interval bounds go through the feature extractor, an attack searches their box for the worst
    point of each class, and the gradient connector joins the two. `classifier_relus` places the
    split (0 is IBP). `weight` is the paper's w: how much the TAPS loss's gradient counts against
    the IBP loss's, from 0 to inf. `connector` is c, from 0 (binary) to 1 (linear). `estimators`
    is multi (one latent point per wrong class) or single (one for all).

    `loss` is the product, or taps or ibp alone. `scale` is plain or paper, see
    `gradient_factors`. `step_size` is relative to the full width of the latent box, by default
    `max(0.2, 2 / steps)`; it drops by `step_decay` after 70 % of the steps if there are at least
    `decay_from` of them (CTBench: 0.2, from 10 on). `connected = false` cuts the gradient between
    the latent points and the extractor; `shrink` below 1 is SABR's ReLU shrinkage.
    """

    name: ClassVar[str] = "taps"
    summary: ClassVar[str] = "interval bounds, then a latent attack, joined by the connector"
    propagates_boxes: ClassVar[bool] = True

    classifier_relus: int = 1
    weight: float = 5.0
    connector: float = 0.5
    steps: int = 20
    restarts: int = 1
    estimators: str = "multi"
    loss: str = "product"
    scale: str = "plain"
    step_size: float | None = None
    step_decay: float = 0.1
    decay_from: int = 20
    connected: bool = True
    shrink: float = 1.0

    def __post_init__(self) -> None:
        relus, c, w = self.classifier_relus, self.connector, self.weight
        require(relus >= 0, f"{self.name}.classifier_relus must be at least 0, got {relus}")
        require(w >= 0, f"{self.name}.weight must be at least 0 (inf is allowed), got {w}")
        require(0 <= c <= 1, f"{self.name}.connector must be between 0 and 1, got {c}")
        for option in ("steps", "restarts", "decay_from"):
            require(getattr(self, option) > 0, f"{self.name}.{option} must be at least 1")
        choices = {
            "estimators": ("multi", "single"),
            "loss": ("product", "taps", "ibp"),
            "scale": ("plain", "paper"),
        }
        for option, words in choices.items():
            given = getattr(self, option)
            text = f"{self.name}.{option} must be one of {', '.join(words)}, got {given!r}"
            require(given in words, text)
        size = self.step_size
        sizes = (size is None or 0 < size < math.inf) and 0 < self.step_decay <= 1
        require(
            sizes, f"{self.name}.step_size and step_decay must be positive, the decay at most 1"
        )
        require(0 < self.shrink <= 1, f"{self.name}.shrink must be above 0 and at most 1")

    @property
    def annealing(self) -> Objective:
        """IBP, while the radius grows; with shrinkage, SABR's IBP over the whole ball."""
        return IBP() if self.shrink == 1 else SABR(ratio=1.0, shrink=self.shrink)

    def check(self, graph: Graph) -> None:
        """Refuse networks without the split."""
        graph.split(self.classifier_relus)

    def largest_batch(self, graph: Graph) -> int:
        """Return how many samples to evaluate at a time."""
        return evaluation_batch(graph.split(self.classifier_relus)[1])

    def region(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Box:
        """The input box: the whole ball."""
        return Box.ball(x, radius)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `L_TAPS * L_IBP` with the gradient weights of Eq. (6)."""
        box = self.region(model, x, y, radius)
        if self.classifier_relus == 0 or self.loss == "ibp":
            return interval_loss(model, box, y, shrink=self.shrink)
        extractor, classifier = model.graph.split(self.classifier_relus)
        rules = interval_rules(self.shrink)
        latent, _ = interval.bounds(extractor, box, rules=rules)
        points = self.latent_points(classifier, latent, y)
        margins = estimated_margins(classifier, points, y)
        robust = (margins.detach() <= 0).all(1)
        taps = estimated_loss(margins)
        if self.loss == "taps":
            return Loss(taps, robust)
        ibp = margin_loss(interval.margins(classifier, latent, y, rules=rules)[0], y)
        product = partial(weighted_product, factors=gradient_factors(self.weight, self.scale))
        return Loss.of(product, taps, ibp, robust=robust)

    def latent_points(self, classifier: Graph, latent: Box, y: Tensor) -> Tensor:
        """Return the worst latent points, joined to the bounds by the connector."""
        decay = self.step_decay, self.decay_from
        steps, restarts = latent_steps(self.steps, self.step_size, *decay), self.restarts
        if self.estimators == "single":
            points = attack_loss(classifier, latent, y, steps=steps, restarts=restarts)
        else:
            points = attack_margins(classifier, latent, y, steps=steps, restarts=restarts)
        return connect(latent, points, self.connector) if self.connected else points


def weighted_product(taps: Tensor, ibp: Tensor, *, factors: tuple[float, float]) -> Tensor:
    """Return `L_TAPS L_IBP` whose gradient is `a L_IBP dL_TAPS + b L_TAPS dL_IBP`."""
    return scale_gradient(taps, factors[0]) * scale_gradient(ibp, factors[1])
