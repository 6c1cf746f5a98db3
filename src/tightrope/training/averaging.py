"""Averages of the weights along the end of training: plain ones (SWA), or exponential (EMA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Optimiser steps between two weights that enter a plain average.
INTERVAL = 10


class WeightAverage:
    """The mean of the parameters from some epoch on: at every tenth step, or with a decay.

    With a `decay`, every step enters: `mean <- decay mean + (1 - decay) parameters`.
    """

    def __init__(self, module: nn.Module, start: int | None, decay: float | None = None) -> None:
        self.parameters = dict(module.named_parameters())
        self.start, self.decay = start, decay
        self.count = 0
        self.mean: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, epoch: int, iteration: int) -> None:
        """Take note of the parameters after a step."""
        if self.start is None or epoch < self.start:
            return
        if self.decay is None and iteration % INTERVAL:
            return
        self.count += 1
        share = 1 / self.count if self.decay is None else 1 - self.decay
        for name, parameter in self.parameters.items():
            if self.count == 1:
                self.mean[name] = parameter.detach().clone()
            else:
                self.mean[name].lerp_(parameter, share)

    @torch.no_grad()
    def apply(self) -> bool:
        """Put the average in place of the parameters; return whether there was one."""
        for name, mean in self.mean.items():
            self.parameters[name].copy_(mean)
        return bool(self.mean)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"count": self.count, "mean": self.mean}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; raises ValueError if it does not fit."""
        if not state:
            return
        shapes = {name: tensor.shape for name, tensor in state["mean"].items()}
        fits = {n: p.shape for n, p in self.parameters.items()} == shapes if shapes else True
        if not fits or not isinstance(state["count"], int):
            raise ValueError("the averaged weights do not fit")
        self.count = state["count"]
        self.mean = {n: t.to(self.parameters[n]) for n, t in state["mean"].items()}
