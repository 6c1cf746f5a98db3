"""Gradients that look at weights around the present ones: Gaussian loss smoothing, and SAM.

Smoothing (Balauca et al. 2025) descends along the gradient of `E L(theta + sigma xi)`: tight bounds
make losses with jumps and kinks, whose slopes say little, and what is averaged over nearby weights
has none of these. Two estimates of it, both from antithetic pairs:

- RGS, randomised gradient smoothing, averages gradients at the weights drawn. Jumps in between
  have no slope and are missed.
- PGPE takes the losses alone: `mean (L(theta + d) - L(theta - d)) d / (2 sigma^2)`, which sees
  jumps, at a variance that grows with the number of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.devices import forked_random
from tightrope.training.batchnorm import Statistics, clean_pass, update_running
from tightrope.training.distributed import own_rows
from tightrope.training.parts import parameters_of
from tightrope.training.step import Step, StepResult


@dataclass(frozen=True)
class Smoothed:
    """A step whose gradient is that of the loss averaged over weights around the present ones.

    All draws see the same batch, and both of a pair the same random points. BatchNorm has the
    statistics of the batch at the present weights. The L1 term is not smoothed.
    """

    step: Step
    kind: str  # rgs or pgpe
    sigma: float
    pairs: int

    def __call__(self, x: Tensor, y: Tensor, radius: float, *, annealing: bool) -> StepResult:
        """Run the batch and leave the gradients in the parameters."""
        parameters = parameters_of(self.step.graph)
        step = replace(self.step, l1=0.0, statistics=self._statistics(x))
        total = [torch.zeros_like(p) for p in parameters]
        losses = 0.0

        def look(noise: Sequence[Tensor], sign: float) -> StepResult:
            with moved(parameters, noise, sign * self.sigma):
                if self.kind == "rgs":
                    result = step(x, y, radius, annealing=annealing)
                    _take_gradients(parameters, total, 1 / (2 * self.pairs))
                    return result
                with torch.no_grad():
                    return step(x, y, radius, annealing=annealing)

        for _ in range(self.pairs):
            noise = [torch.randn_like(p) for p in parameters]
            with forked_random(x.device):  # the other of the pair draws the same points
                up = look(noise, 1.0)
            down = look(noise, -1.0)
            losses += up.loss + down.loss
            if self.kind == "pgpe":
                rise = up.loss / up.samples - down.loss / down.samples
                for sum_, direction in zip(total, noise, strict=True):
                    sum_.add_(direction, alpha=rise / (2 * self.sigma * self.pairs))
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        self.step.add_l1()
        # Counts are those of the last weights: a mean of them need not be a whole number.
        return replace(down, loss=losses / (2 * self.pairs))

    def _statistics(self, x: Tensor) -> Statistics:
        """Return the batch's statistics at the present weights, which the running ones follow."""
        step = self.step
        with torch.no_grad(), own_rows(step.group, len(x)) as rows:
            statistics, _ = clean_pass(step.graph, x[rows.inside], step.group)
        update_running(step.graph, statistics, len(x))
        return statistics


@dataclass(frozen=True)
class SharpnessAware:
    """SAM (Foret et al. 2021): the gradient a step uphill from the present weights.

    Each parameter tensor goes up by `rho g / |g|`, with its own norm. The gradient that says where
    that is takes BatchNorm's running statistics.
    """

    step: Step
    rho: float

    def __call__(self, x: Tensor, y: Tensor, radius: float, *, annealing: bool) -> StepResult:
        """Run the batch twice and leave the second gradients in the parameters."""
        parameters = parameters_of(self.step.graph)
        replace(self.step, statistics={})(x, y, radius, annealing=annealing)
        uphill = [torch.zeros_like(p) for p in parameters]
        _take_gradients(parameters, uphill, 1.0)
        for direction in uphill:
            direction.div_(direction.norm().clamp(min=torch.finfo(direction.dtype).tiny))
        with moved(parameters, uphill, self.rho):
            return self.step(x, y, radius, annealing=annealing)


@contextmanager
def moved(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], length: float
) -> Iterator[None]:
    """Move parameters along directions, and put them back to where they were, bit for bit."""
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.add_(direction, alpha=length)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _take_gradients(parameters: Sequence[Tensor], sums: Sequence[Tensor], share: float) -> None:
    """Move the gradients, times a factor, from the parameters into sums."""
    for parameter, total in zip(parameters, sums, strict=True):
        if parameter.grad is not None:
            total.add_(parameter.grad, alpha=share)
        parameter.grad = None
