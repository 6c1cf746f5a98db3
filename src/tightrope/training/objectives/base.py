"""What every training objective is: a function of the network and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from tightrope.box import Box
from tightrope.training.batchnorm import FixedModel


@dataclass(frozen=True)
class Loss:
    """What an objective returns for a batch.

    `value` is differentiable; `robust` says which samples the method itself considers robust
    (None if it makes no such claim); `parts` are named numbers for the log; `boxes` holds the
    bounds at the positions in `model.watched`, for the regularisers.
    """

    value: Tensor
    robust: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    boxes: Mapping[int, Box] = field(default_factory=dict)


class Objective(Protocol):
    """A training method. Its fields are its hyperparameters, with their defaults.

    A method is a frozen dataclass with a `name` and a `__call__`; nothing needs to be
    inherited. `propagates_boxes` says that it bounds the network, so that Shi et al.'s
    initialisation, annealing and regularisers are its defaults. `radius` is the radius of
    this iteration, in units of [0, 1] pixels. The same call, without gradients, measures
    robust accuracy on held-out data.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    propagates_boxes: ClassVar[bool]

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the loss of a batch."""
