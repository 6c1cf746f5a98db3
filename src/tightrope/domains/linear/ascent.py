"""Projected gradient ascent on the free parameters of a bound, by Adam, keeping the best.

Any parameters within their limits give a sound bound, so the ascent may be as rough as it
likes. What it returns is the best bound each row had *and the parameters that gave it*.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


@dataclass
class Parameter:
    """One group of parameters, [rows, ...], with its limits and the size of its steps."""

    values: Tensor
    rate: float
    low: float | None = 0.0
    high: float | None = None


class Ascent(Generic[K]):
    """The state of Adam for some named parameters of a batch of rows."""

    def __init__(self, parameters: dict[K, Parameter], *, decay: float = 0.98) -> None:
        self.parameters = parameters
        self.first = {k: torch.zeros_like(p.values) for k, p in parameters.items()}
        self.second = {k: torch.zeros_like(p.values) for k, p in parameters.items()}
        self.count, self.decay, self.factor = 0, decay, 1.0
        rows = next(iter(parameters.values())).values
        self.bound = rows.new_full((len(rows),), -torch.inf)
        self.best = {k: p.values.clone() for k, p in parameters.items()}

    def record(self, bound: Tensor) -> None:
        """Keep the present parameters of the rows whose bound is their best so far."""
        better = bound > self.bound
        if better.all():
            for k, p in self.parameters.items():
                self.best[k].copy_(p.values)
            self.bound = bound
            return
        self.bound = torch.where(better, bound, self.bound)
        for k, p in self.parameters.items():
            self.best[k][better] = p.values[better]

    def step(self, gradients: Mapping[K, Tensor]) -> None:
        """Move all parameters uphill and back into their limits."""
        self.count += 1
        correction = (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count)
        for k, p in self.parameters.items():
            g, m, v = gradients[k], self.first[k], self.second[k]
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            size = p.rate * self.factor * correction
            p.values.addcdiv_(m, v.sqrt().add_(1e-8), value=size)
            p.values.clamp_(p.low, p.high)
        self.factor *= self.decay

    def select(self, rows: Tensor) -> None:
        """Go on with some of the rows; read `best` of the others before."""
        for k, p in self.parameters.items():
            p.values = p.values[rows]
            for held in (self.first, self.second, self.best):
                held[k] = held[k][rows]
        self.bound = self.bound[rows]
