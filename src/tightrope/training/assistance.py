"""What can be put around the step of any method: smoothing, SAM, EDAC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel
from tightrope.training.nearby import SharpnessAware, Smoothed
from tightrope.training.objectives import Loss, Objective
from tightrope.training.objectives.regions import adversarial_points
from tightrope.training.settings import Settings
from tightrope.training.step import Step, StepResult

EDAC_STEPS = 10  # of its attack


class Stepper(Protocol):
    """Whatever leaves the gradients of a batch in the parameters."""

    def __call__(self, x: Tensor, y: Tensor, radius: float, *, annealing: bool) -> StepResult:
        """Run the batch."""


def assisted(step: Step, settings: Settings, optimizer: torch.optim.Optimizer) -> Stepper:
    """Return a step with everything around it that the settings ask for."""
    whole: Stepper = step
    if settings.smoothing is not None:
        sigma, pairs = settings.smoothing_sigma, settings.smoothing_pairs
        whole = Smoothed(step, settings.smoothing, sigma, pairs)
    elif settings.sam_rho:
        whole = SharpnessAware(step, settings.sam_rho)
    if settings.edac_weight:
        objective = AdversarialCertainty(settings.edac_weight)
        whole = LessCertain(whole, edac_step(step, objective), optimizer)
    return whole


@dataclass(frozen=True)
class AdversarialCertainty(Objective):
    """How certain a network is of adversarial inputs: how far apart their logits are."""

    name: ClassVar[str] = "edac"
    summary: ClassVar[str] = "deviation of the logits of adversarial inputs"

    weight: float

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `weight mean std_k o_k(x')`, with the unbiased deviation over the classes."""
        points = adversarial_points(model, Box.ball(x, radius), y, steps=EDAC_STEPS)
        return Loss(self.weight * model.graph(points).std(1).mean())


def edac_step(step: Step, objective: Objective) -> Step:
    """Return the step towards less certainty: nothing else is in its loss."""
    return replace(
        step,
        objective=objective,
        regularizer_weight=0.0,
        l1=0.0,
        natural_weight=0.0,
        tightness_weight=0.0,
    )


@dataclass(frozen=True)
class LessCertain:
    """EDAC (Zhang et al. 2024): each step begins with one towards less adversarial certainty.

    Attacks then find more. It is a step of the same optimiser, not clipped, and everything after it
    is computed anew.
    """

    step: Stepper
    before: Step
    optimizer: torch.optim.Optimizer

    def __call__(self, x: Tensor, y: Tensor, radius: float, *, annealing: bool) -> StepResult:
        """Take one step of the optimiser, then leave the gradients of the next."""
        if radius > 0:
            self.before(x, y, radius, annealing=False)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return self.step(x, y, radius, annealing=annealing)
