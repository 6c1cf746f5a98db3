"""What every training objective is: a function of the network and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from torch import Tensor

from tightrope.attacks import worst_margin
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.errors import UserError
from tightrope.graph import Graph, ops
from tightrope.graph.graph import Rules
from tightrope.training.batchnorm import FixedModel
from tightrope.training.distances import DistancePass
from tightrope.training.parsing import parse_setting


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


class Guarantee(StrEnum):
    """What a method trains for: what can be said of its networks around an input.

    Any network can be certified; without a guarantee to train for, little comes of it.
    """

    DETERMINISTIC = "deterministic"  # proofs, by `certify`
    PROBABILISTIC = "probabilistic"  # votes under noise, by `smooth`
    NONE = "none"  # accuracy under attack


@dataclass(frozen=True)
class Stage:
    """A part of a training that begins anew, with an optimiser of its own.

    The layers up to the `frozen`-th ReLU keep their weights; `radius` and `rate` are factors of
    `train_eps` and of the learning rate. With `mix`, `model.progress` grows from 0 to 1 over that
    part of the stage, a little in each iteration.
    """

    objective: Objective
    frozen: int = 0
    radius: float = 1.0
    rate: float = 1.0
    mix: float | None = None


class Objective:
    """A training method: a frozen dataclass with a `name` and a `__call__`.

    Its fields are its hyperparameters, declared by `setting` (default, type and range, meaning);
    values out of range are refused. `propagates_boxes` says that it bounds the network, so that
    Shi et al.'s initialisation, annealing and regularisers are its defaults. `section` is the name
    under which its options appear in the settings, by default its own; `annealing_share` the part
    of the epochs over which the radius grows if nothing is said (None: two sevenths for methods
    that propagate boxes, else none). `guarantee` is what tables group methods by; `needs_teacher`
    says that it learns from `model.teacher`, and `trains_distances` that it is for distance layers
    and for nothing else.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    propagates_boxes: ClassVar[bool] = False
    guarantee: ClassVar[Guarantee] = Guarantee.DETERMINISTIC
    needs_teacher: ClassVar[bool] = False
    trains_distances: ClassVar[bool] = False
    section: ClassVar[str]
    annealing_share: ClassVar[float | None] = None

    def __init_subclass__(cls) -> None:
        if "section" not in vars(cls) and "name" in vars(cls):
            cls.section = cls.name

    def __post_init__(self) -> None:
        for name, option in self.hyperparameters().items():
            value = parse_setting(f"{self.section}.{name}", option, getattr(self, name))
            object.__setattr__(self, name, value)

    @classmethod
    def hyperparameters(cls) -> dict[str, Field[Any]]:
        """Return the declared fields by name."""
        return {option.name: option for option in fields(cls)}  # type: ignore[arg-type]

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the loss of a batch.

        `radius` is the radius of this iteration, in units of [0, 1] pixels. The same call, without
        gradients, measures robust accuracy on held-out data.
        """
        raise NotImplementedError

    @property
    def annealing(self) -> Objective:
        """The objective to use while the radius grows."""
        return self

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a training, one after the other and equally long; none: it is one."""
        return ()

    @property
    def rules(self) -> Rules:
        """The interval rules with which the method propagates boxes."""
        return interval.RULES

    def ramp(self, time: float, epochs: int) -> float | None:
        """Return what `model.progress` is after that many epochs, if not the radius' share."""
        return None

    def own_pass(self, graph: Graph, progress: float) -> DistancePass | None:
        """Return how the clean batch is computed, if not as it is evaluated."""
        return None

    def groups(self, graph: Graph) -> dict[Tensor, dict[str, float]]:
        """Return settings of the optimiser for single parameters; `share` is that of the rate."""
        return {}

    def check(self, graph: Graph) -> None:
        """Refuse networks that the method cannot train."""

    def check_layers(self, graph: Graph) -> None:
        """Refuse distance layers to methods that are not for them, and the other way round."""
        has_distances = any(isinstance(node.op, ops.Distance) for node in graph.nodes)
        if has_distances and not self.trains_distances:
            raise UserError(f"{self.name} cannot train distance layers: set method = sortnet")
        if self.trains_distances and not has_distances:
            raise UserError(
                f"{self.name} trains distance layers: set net to linf-dist, sortnet or sortnet-mlp"
            )

    def largest_batch(self, graph: Graph) -> int | None:
        """Return how many samples to evaluate at a time; None: as many as one likes."""
        return None


def certified(margins: Tensor, y: Tensor) -> Tensor:
    """Return which samples have only positive margins `o_y - o_i`."""
    return worst_margin(-margins.detach(), y) > 0
