"""Expressive losses (De Palma et al. 2024): between an attack's loss and the IBP loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from tightrope.attacks import Goal
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.objectives.propagation import margin_loss
from tightrope.training.objectives.regions import adversarial_points
from tightrope.training.parsing import setting


@dataclass(frozen=True)
class Interpolated(Objective):
    """The options and the two ends that losses between an attack's and IBP's share."""

    propagates_boxes: ClassVar[bool] = True

    alpha: float = setting(0.5, options.share, "from 0 (adversarial) to 1 (IBP)")
    steps: int = options.steps(8)
    restarts: int = options.restarts()
    step_size: float | None = options.step_size(None, options.HALF_WIDTHS)
    attack_scale: float = setting(
        1.0, options.positive, "size of the attacked ball, in those of the bounded one"
    )

    def points(
        self, model: FixedModel, x: Tensor, y: Tensor, radius: float, goal: Goal | None = None
    ) -> Tensor:
        """Return the adversarial points."""
        return adversarial_points(
            model,
            Box.ball(x, self.attack_scale * radius),
            y,
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            last=self.steps == 1,  # a single step is taken, whether it helps or not
            goal=goal,
        )

    def margins(
        self, model: FixedModel, x: Tensor, y: Tensor, radius: float
    ) -> tuple[Tensor, Tensor, Mapping[int, Box]]:
        """Return `o_y - o_i` at the adversarial point, IBP's lower bounds of it, and boxes."""
        adversarial = own_margins(model.graph(self.points(model, x, y, radius)), y)
        bound, boxes = interval.margins(model.graph, Box.ball(x, radius), y, keep=model.watched)
        return adversarial, bound, boxes

    def robust(self, adversarial: Tensor, bound: Tensor, y: Tensor) -> Tensor:
        """Return which samples the interpolated margins call robust."""
        return certified(self.alpha * bound + (1 - self.alpha) * adversarial, y)


@dataclass(frozen=True)
class MTLIBP(Interpolated):
    """A weighted sum of the adversarial and the IBP loss."""

    name: ClassVar[str] = "mtl-ibp"
    section: ClassVar[str] = "mtl"
    summary: ClassVar[str] = "weighted sum of the adversarial and the IBP loss"

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `alpha L_IBP + (1 - alpha) L_adv`."""
        adversarial, bound, boxes = self.margins(model, x, y, radius)
        value = self.alpha * margin_loss(bound, y) + (1 - self.alpha) * margin_loss(adversarial, y)
        return Loss(value, self.robust(adversarial, bound, y), boxes=boxes)


@dataclass(frozen=True)
class CCIBP(Interpolated):
    """Cross-entropy of convex combinations of adversarial and IBP margins."""

    name: ClassVar[str] = "cc-ibp"
    section: ClassVar[str] = "cc"
    summary: ClassVar[str] = "cross-entropy of convex combinations of margins"

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the cross-entropy of `alpha m_IBP + (1 - alpha) m_adv`."""
        adversarial, bound, boxes = self.margins(model, x, y, radius)
        combined = self.alpha * bound + (1 - self.alpha) * adversarial
        return Loss(margin_loss(combined, y), certified(combined, y), boxes=boxes)


@dataclass(frozen=True)
class EXPIBP(Interpolated):
    """The geometric mean of the adversarial and the IBP loss."""

    name: ClassVar[str] = "exp-ibp"
    section: ClassVar[str] = "exp"
    summary: ClassVar[str] = "geometric mean of the adversarial and the IBP loss"

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `L_IBP^alpha L_adv^(1 - alpha)`, of the batch's means."""
        adversarial, bound, boxes = self.margins(model, x, y, radius)
        robust = self.robust(adversarial, bound, y)
        combine = partial(geometric_mean, alpha=self.alpha)
        losses = margin_loss(bound, y), margin_loss(adversarial, y)
        return Loss.of(combine, *losses, robust=robust, boxes=boxes)


def own_margins(logits: Tensor, y: Tensor) -> Tensor:
    """Return `o_y - o_i` for each class i, with 0 for the true class."""
    return logits.gather(1, y[:, None]) - logits


def geometric_mean(bound: Tensor, adversarial: Tensor, *, alpha: float) -> Tensor:
    """Return `bound^alpha adversarial^(1 - alpha)`."""
    tiny = torch.finfo(bound.dtype).tiny  # at 0 the powers have no slope
    mean = bound.clamp(min=tiny) ** alpha * adversarial.clamp(min=tiny) ** (1 - alpha)
    return mean * (torch.minimum(bound, adversarial) > 0)
