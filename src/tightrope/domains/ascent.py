"""Projected gradient ascent on the free parameters of a bound, by Adam, keeping the best.

Any parameters within their limits give a sound bound, so the ascent may be as rough as it
likes. What it returns is the best bound each row had *and the parameters that gave it*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Parameter:
    """One group of parameters, [rows, ...], with its limits and the size of its steps."""

    values: Tensor
    rate: float
    low: float | None = 0.0
    high: float | None = None


class Ascent:
    """The state of Adam for some parameters of a batch of rows."""

    def __init__(self, parameters: Sequence[Parameter], *, decay: float = 0.98) -> None:
        self.parameters = parameters
        self.first = [torch.zeros_like(p.values) for p in parameters]
        self.second = [torch.zeros_like(p.values) for p in parameters]
        self.count, self.decay, self.factor = 0, decay, 1.0
        rows = parameters[0].values
        self.bound = rows.new_full((len(rows),), -torch.inf)
        self.best = [p.values.clone() for p in parameters]

    def record(self, bound: Tensor) -> None:
        """Keep the present parameters of the rows whose bound is their best so far."""
        better = bound > self.bound
        if better.all():
            for best, p in zip(self.best, self.parameters, strict=True):
                best.copy_(p.values)
            self.bound = bound
            return
        self.bound = torch.where(better, bound, self.bound)
        for best, p in zip(self.best, self.parameters, strict=True):
            best[better] = p.values[better]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Move all parameters uphill and back into their limits."""
        self.count += 1
        correction = (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count)
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            size = p.rate * self.factor * correction
            p.values.addcdiv_(m, v.sqrt().add_(1e-8), value=size)
            p.values.clamp_(p.low, p.high)
        self.factor *= self.decay

    def select(self, rows: Tensor) -> None:
        """Go on with some of the rows; call `best` for the others before."""
        for p in self.parameters:
            p.values = p.values[rows]
        self.first = [t[rows] for t in self.first]
        self.second = [t[rows] for t in self.second]
        self.best = [t[rows] for t in self.best]
        self.bound = self.bound[rows]
