"""Training of l-infinity-distance nets (Zhang et al. 2021, 2022a) and SortNet (2022b)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified, worst_margin
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops
from tightrope.graph.graph import Node
from tightrope.nets.powers import LEAST_POWER, nearest_power
from tightrope.training.batchnorm import FixedModel
from tightrope.training.distances import DistancePass, distance_layers
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.parsing import choice, optional, setting, whole, within

LARGEST_POWER = 1000.0
epochs_or_none = optional(within(whole(0), "at least 0", whole()))


@dataclass(frozen=True)
class SortNet(Objective):
    """Distances by powers that grow to infinity; margins are compared with twice the radius.

    Layers of distances cannot change an output by more than the input changes, so that nothing has
    to be propagated. They learn by p-norms, in which all inputs have a part.
    """

    name: ClassVar[str] = "sortnet"
    summary: ClassVar[str] = "distance nets: margins beyond the radius, by growing powers"
    trains_distances: ClassVar[bool] = True
    annealing_share: ClassVar[float | None] = 0.0

    loss: str = setting(
        "mixture",
        choice("mixture", "hinge", "head"),
        "clipped hinge and cross-entropy, hinge alone, or bounds of a linear head",
    )
    mixing: float = setting(0.1, options.not_negative, "weight of the cross-entropy at first")
    end_mixing: float = setting(1e-3, options.not_negative, "weight of the cross-entropy at last")
    ramp_start: int | None = setting(None, epochs_or_none, "epoch at which p begins to grow")
    ramp_end: int | None = setting(None, epochs_or_none, "epoch from which p is infinite")
    scale_rate: float = setting(
        1.0, options.not_negative, "learning rate of the logits' scale, as a share of the others'"
    )

    def __post_init__(self) -> None:
        """Refuse weights that have no geometric mean, and ramps that end before they start."""
        super().__post_init__()
        if (self.mixing == 0) != (self.end_mixing == 0):
            raise UserError("sortnet.mixing and sortnet.end_mixing must both be 0, or neither")
        start, end = self.ramp_start, self.ramp_end
        if start is not None and end is not None and start >= end:
            raise UserError(f"sortnet.ramp_start = {start} must be below sortnet.ramp_end = {end}")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the loss; margins count in units of what the distances are of."""
        reach = radius * input_scale(model.graph)
        seen = self._values(model)
        if self.loss == "head":
            return self._head_loss(model, seen, y, reach)
        own = torch.arange(seen.shape[1], device=y.device) == y[:, None]
        margins = seen.gather(1, y[:, None]) - seen
        worst = (1 - margins / (2 * reach)).masked_fill(own, 0.0)
        robust = certified((margins - 2 * reach).masked_fill(own, 0.0), y)
        claim = None if model.values else robust
        if self.loss == "hinge":
            value = 0.75 * worst.amax(1).relu().mean() + 0.25 * worst.relu().mean()
            return Loss(value, claim)
        value = worst.clamp(0, 1).amax(1).mean()
        return Loss(value + self._natural_loss(model, y), claim)

    def _head_loss(self, model: FixedModel, seen: Tensor, y: Tensor, reach: float) -> Loss:
        """Bound the margins behind the distances by intervals."""
        head = behind(model.graph, self.wanted(model.graph)[0])
        margins, _ = interval.margins(head, Box(seen - reach, seen + reach), y)
        right = ~misclassified(model.logits.detach(), y)
        worst = (1 + worst_margin(-margins, y).neg()).relu()
        claim = None if model.values else certified(margins, y)
        return Loss((right * worst).mean() + self._natural_loss(model, y), claim)

    def _natural_loss(self, model: FixedModel, y: Tensor) -> Tensor:
        if not self.mixing:
            return model.logits.new_zeros(())
        weight = self.mixing * (self.end_mixing / self.mixing) ** model.progress
        return weight * F.cross_entropy(model.logits, y)

    def _values(self, model: FixedModel) -> Tensor:
        """Return what the distances end in: negative distances, or what the head reads."""
        (position,) = self.wanted(model.graph)
        if position in model.values:
            return model.values[position]
        return model.graph.propagate(evaluate.RULES, model.x, keep=(position,))[position]

    def wanted(self, graph: Graph) -> tuple[int, ...]:
        """Return the position before the scale of the logits, or before the head."""
        if self.loss != "head":
            return graph.nodes[-1].inputs
        return (graph.consumers()[distance_layers(graph)[-1]][0],)

    def own_pass(self, graph: Graph, progress: float) -> DistancePass:
        """Return the pass of a step: p = 8 * 125^r, infinite at r = 1."""
        power = math.inf
        if progress < 1:
            power = LEAST_POWER * (LARGEST_POWER / LEAST_POWER) ** progress
        return DistancePass(nearest_power(power), self.wanted(graph))

    def ramp(self, time: float, epochs: int) -> float:
        """Return r: 0 before the ramp of p, 1 behind it."""
        start = round(0.1 * epochs) if self.ramp_start is None else self.ramp_start
        end = round(0.9 * epochs) if self.ramp_end is None else self.ramp_end
        if time >= end:
            return 1.0
        return min(max((time - start) / (end - start), 0.0), 1.0) if end > start else 0.0

    def groups(self, graph: Graph) -> dict[Tensor, dict[str, float]]:
        """Return that distances do not decay, and how fast the logits' scale learns."""
        own: dict[Tensor, dict[str, float]] = {}
        for node in graph.nodes:
            if isinstance(node.op, ops.Distance):
                own[node.op.weight] = {"weight_decay": 0.0}
            elif isinstance(node.op, ops.Shift) and node.op.offset.requires_grad:
                own[node.op.offset] = {"weight_decay": 0.0}
        last = graph.nodes[-1].op
        if isinstance(last, ops.Scale):
            own[last.factor] = {"share": self.scale_rate}
        return own

    def check(self, graph: Graph) -> None:
        """Refuse networks that end in something else than the loss is for."""
        ends = isinstance(graph.nodes[-1].op, ops.Scale)
        if ends == (self.loss == "head"):
            other = "mixture or hinge" if ends else "head"
            what = "in distances" if ends else "in linear layers"
            raise UserError(f"a network that ends {what} takes sortnet.loss = {other}")


def input_scale(graph: Graph) -> float:
    """Return by how much normalisation enlarges the largest difference of two inputs."""
    scale = 1.0
    for node in graph.nodes[: distance_layers(graph)[0]]:
        if isinstance(node.op, ops.Scale):
            factor = node.op.factor.abs()
            scale *= float(1 / factor.min() if node.op.divide else factor.max())
    return scale


def behind(graph: Graph, position: int) -> Graph:
    """Return the rest of a network behind a position that all paths go through."""
    start = Node("latent", ops.Input(), (), graph.nodes[position].shape)
    rest = (
        Node(n.name, n.op, tuple(j - position for j in n.inputs), n.shape)
        for n in graph.nodes[position + 1 :]
    )
    return Graph((start, *rest))
