"""What every training objective is: a function of the network and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.training.batchnorm import FixedModel


@dataclass(frozen=True)
class Loss:
    """What an objective returns for a batch.

    `value` is differentiable; `robust` says which samples the method itself considers robust
    (None if it makes no such claim); `parts` are named numbers for the log; `boxes` holds the
    bounds at the positions in `model.watched`, for the regularisers. A loss that is not a mean
    over samples is made by `Loss.of`, from the means that it combines.
    """

    value: Tensor
    robust: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    boxes: Mapping[int, Box] = field(default_factory=dict)
    means: tuple[Tensor, ...] = ()
    combine: Callable[..., Tensor] | None = None

    @classmethod
    def of(
        cls,
        combine: Callable[..., Tensor],
        *means: Tensor,
        robust: Tensor | None = None,
        boxes: Mapping[int, Box] | None = None,
    ) -> Loss:
        """Return `combine(*means)`.

        Where a batch is computed in parts, the means of the whole batch are combined.
        """
        return cls(combine(*means), robust, {}, boxes or {}, means, combine)


class Objective(Protocol):
    """A training method. Its fields are its hyperparameters, with their defaults.

    A method is a frozen dataclass with a `name` and a `__call__`; nothing needs to be
    inherited. `propagates_boxes` says that it bounds the network, so that Shi et al.'s
    initialisation, annealing and regularisers are its defaults. `radius` is the radius of
    this iteration, in units of [0, 1] pixels. The same call, without gradients, measures
    robust accuracy on held-out data.

    More names are optional: `section`, under which its options appear in the settings (by
    default its name); `annealing`, the objective to use while the radius grows; `check(graph)`,
    which refuses networks that it cannot train; `largest_batch(graph)`, how many samples fit
    into memory when held-out data is evaluated; `annealing_share`, the default part of the
    epochs over which the radius grows.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    propagates_boxes: ClassVar[bool]

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the loss of a batch."""


def certified(margins: Tensor, y: Tensor) -> Tensor:
    """Return which samples have only positive margins `o_y - o_i`."""
    others = margins.detach().scatter(1, y[:, None], torch.inf)
    return (others > 0).all(1)


def require(condition: bool, message: str) -> None:
    """Refuse a hyperparameter."""
    if not condition:
        raise UserError(message)
