"""DiffAI (Mirman et al. 2018, 2019): hybrid zonotopes, of the ball or of a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import CrossEntropy, Steps, misclassified, pgd
from tightrope.box import Box
from tightrope.domains.error_terms import Errors
from tightrope.domains.strips import SLOPES
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.objectives.zonotopes import (
    check_memory,
    sample_bytes,
    worst_logits,
    worst_loss,
)
from tightrope.training.parsing import choice, number, setting, within

_RAMP = "share of the time in which the radius grows"
_not_all = within(number(0, maximum=0.999), "at least 0 and below 1")


@dataclass(frozen=True)
class DiffAI(Objective):
    """Bounds by hybrid zonotopes, mixed with an attack's loss.

    `(1 - w) L_attack + w L_bounds`, where the bounds are of the ball, or of a smaller ball inside
    it around a random point (InSamp) or an attacked one (AdvInclusion). The radius, the share of
    the smaller ball and w grow from `delay` on; the attacked ball is whole at `attack_ready`.
    """

    name: ClassVar[str] = "diffai"
    summary: ClassVar[str] = "hybrid zonotopes of the ball or a part of it, and an attack"
    annealing_share: ClassVar[float | None] = 3 / 7

    domain: str = setting(
        "box", choice("box", "h", "hrand", "z"), "what shares error terms: nothing, inputs, all"
    )
    relu: str = setting("box", choice(*SLOPES), "strip around unstable ReLUs")
    correlated: int = setting(50, options.count, "inputs with an error term, for domain = hrand")
    loss: str = setting(
        "outputs",
        choice("outputs", "margins", "worst"),
        "bounds of outputs, of margins (elided), or the worst margin alone",
    )
    center: str = setting(
        "input", choice("input", "random", "attack"), "of the bounded ball: x, InSamp, AdvInclusion"
    )
    start_ratio: float = setting(1.0, options.share, "first radius of that ball, in the whole's")
    end_ratio: float = setting(1.0, options.share, "its share at the full radius")
    start_weight: float = setting(1.0, options.share, "first weight of the bounds' loss")
    end_weight: float = setting(1.0, options.share, "its weight at the full radius")
    steps: int = options.steps(3)
    delay: float = setting(0.0, _not_all, f"{_RAMP} before bounds begin")
    attack_ready: float = setting(
        1.0, options.positive_share, f"{_RAMP} until the attack's ball is whole"
    )

    def __post_init__(self) -> None:
        """Refuse options that would say nothing."""
        super().__post_init__()
        if self.domain == "box" and self.relu != "box":
            raise UserError(
                f"diffai.relu = {self.relu} needs error terms, of which diffai.domain = box has "
                "none: set diffai.domain = h, hrand or z, or diffai.relu = box"
            )
        if self.center == "input" and self.start_ratio + self.end_ratio < 2:
            raise UserError(
                "diffai.start_ratio and end_ratio are those of a ball inside the ball: "
                "set diffai.center = random or attack"
            )

    def check(self, graph: Graph) -> None:
        """Refuse networks that are too large for the domain."""
        advice = "use diffai.domain = hrand or box, or a smaller network"
        if self.domain != "box":
            check_memory(sample_bytes(graph, self.errors), f"diffai.domain = {self.domain}", advice)

    @property
    def errors(self) -> Errors:
        """What becomes of errors in this domain."""
        inputs = {"box": 0, "hrand": self.correlated}.get(self.domain)
        return Errors(self.relu, fresh=self.domain == "z", inputs=inputs)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `(1 - w) CE(o(x')) + w CE(worst logits)`."""
        progress = model.progress
        whole = radius / progress
        grown = max(0.0, progress - self.delay) / (1 - self.delay)
        weight = self.start_weight + grown * (self.end_weight - self.start_weight)
        terms, robust = [], None
        if weight < 1:
            ball = Box.ball(x, whole * min(1.0, progress / self.attack_ready))
            logits = model.graph(self._attacked(model, ball, x, y))
            terms.append((1 - weight) * F.cross_entropy(logits, y))
            robust = ~misclassified(logits.detach(), y)
        if weight > 0:
            ratio = self.start_ratio + grown * (self.end_ratio - self.start_ratio)
            region = self._region(model, Box.ball(x, whole * grown), x, y, ratio)
            elided = self.loss != "outputs"
            worst = worst_logits(model, region, y, self.errors, elided=elided)
            terms.append(weight * worst_loss(worst, y, self.loss))
            robust = certified(worst.gather(1, y[:, None]) - worst, y)
        return Loss(sum(terms[1:], start=terms[0]), robust)

    def _region(self, model: FixedModel, ball: Box, x: Tensor, y: Tensor, ratio: float) -> Box:
        """Return a ball of that share of the whole, per pixel, that lies inside it."""
        if self.center == "input" or ratio == 1:
            return ball
        half = ratio * ball.radius
        centers = Box(ball.lower + half, ball.upper - half)
        inside = centers.sample() if self.center == "random" else None
        return Box.around(self._attacked(model, centers, x, y) if inside is None else inside, half)

    def _attacked(self, model: FixedModel, box: Box, x: Tensor, y: Tensor) -> Tensor:
        """Take k sign steps of 1 / k of the half-widths from the input, the iterated FGSM."""
        steps = Steps(self.steps, 1 / self.steps)
        return pgd(model.frozen, box, CrossEntropy(y), steps=steps, keep="last", starts=[x])
