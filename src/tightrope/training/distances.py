"""The clean pass of distance nets in training: large powers, dropped inputs, means of the batch.

SortNet keeps each input of a layer with probability q and takes the distance over those that are
kept: at p = inf, what comes out is on average the sort neuron that is evaluated. The inputs are
drawn for 32 samples of the whole batch at a time, as many for each of them, so that the rest need
not be computed: neither in this layer nor in the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import Graph, evaluate, ops
from tightrope.graph.graph import Rules
from tightrope.nets.distance import MOMENTUM
from tightrope.nets.powers import Kept, powers
from tightrope.training.distributed import Group

TOGETHER = 32  # samples that keep the same inputs


@dataclass(frozen=True)
class DistancePass:
    """How to compute a batch: by which power, and the values at which positions are wanted."""

    power: float
    wanted: tuple[int, ...]

    def __call__(
        self, graph: Graph, x: Tensor, rows: Tensor, total: int, group: Group | None = None
    ) -> dict[int, Tensor]:
        """Return the wanted values of a batch of `total`, of which x are those `rows`.

        Running means move towards those of the whole batch.
        """
        batch = _Batch(graph, self.power, rows, total, group)
        return graph.propagate(batch.rules, x, keep=self.wanted)


@torch.no_grad()
def average_means(graph: Graph, x: Tensor, count: int, group: Group | None = None) -> None:
    """Let the running means be the plain average over batches, of which this is the count-th.

    They are those of the neurons that are evaluated.
    """
    means = _Means(mean_shifts(graph), 1 / count, group)
    shares = _count(torch.full((1,), len(x), device=x.device), group)

    def shift(op: ops.Shift, value: Tensor) -> Tensor:
        if op in means.shifts:
            return means(op, value, shares)
        return value - op.offset if op.subtract else value + op.offset

    graph.propagate({**evaluate.RULES, ops.Shift: shift}, x)


def distance_layers(graph: Graph) -> list[int]:
    """Return the positions of the distance layers."""
    return [i for i, node in enumerate(graph.nodes) if isinstance(node.op, ops.Distance)]


def mean_shifts(graph: Graph) -> dict[ops.Op, int]:
    """Return the shifts by running means, each with the position of the layer right before it."""
    found: dict[ops.Op, int] = {}
    for node in graph.nodes:
        if isinstance(node.op, ops.Shift) and node.op.subtract and not node.op.offset.requires_grad:
            before = node.inputs[0]
            if isinstance(graph.nodes[before].op, ops.Distance):
                found[node.op] = before
    return found


def keep_of(op: ops.Distance) -> float:
    """Return the probability with which an input is kept: shares fall by `1 - q`."""
    return 1 - float(op.shares[1] / op.shares[0]) if len(op.shares) > 1 else 1.0


class _Batch:
    """One pass: what is kept of every layer, and the rules by which values go on."""

    def __init__(
        self, graph: Graph, power: float, rows: Tensor, total: int, group: Group | None
    ) -> None:
        self.power = power
        self.number = {graph.nodes[i].op: i for i in distance_layers(graph)}
        self.kept = {i: _draw(graph.nodes[i].op, total) for i in distance_layers(graph)}
        self.readers = _readers(graph)
        self.samples = [(rows // TOGETHER == part).nonzero()[:, 0] for part in _parts(total)]
        self.sizes = [min(TOGETHER, total - part * TOGETHER) for part in _parts(total)]
        self.means = _Means(mean_shifts(graph), MOMENTUM, group)

    @property
    def rules(self) -> Rules:
        return {**evaluate.RULES, ops.Distance: self._distance, ops.Shift: self._shift}

    def _distance(self, op: ops.Distance, x: Tensor) -> Tensor:
        inputs = self.kept[self.number[op]]
        outputs = self._outputs(op)
        chosen = zip(self.samples, inputs, outputs, strict=True)
        kept = [Kept(*(t.to(x.device) for t in part)) for part in chosen if len(part[0])]
        return powers(x, op.weight, self.power, kept)

    def _outputs(self, op: ops.Distance) -> list[Tensor]:
        """Return the outputs that are read, for each part of the batch."""
        reader = self.readers.get(self.number[op])
        everything = [torch.arange(len(op.weight))] * len(self.samples)
        return everything if reader is None else self.kept[reader]

    def _shift(self, op: ops.Shift, x: Tensor) -> Tensor:
        if op not in self.means.shifts:
            return x - op.offset if op.subtract else x + op.offset
        layer = self.means.shifts[op]
        reader = self.readers.get(layer)
        counts = torch.zeros(x.shape[1])
        for part, size in enumerate(self.sizes):
            counts[... if reader is None else self.kept[reader][part]] += size
        return self.means(op, x, counts.to(x))


@dataclass(frozen=True)
class _Means:
    """Shifts by means of the whole batch, which the running ones follow."""

    shifts: Mapping[ops.Op, int]
    momentum: float
    group: Group | None

    def __call__(self, op: ops.Shift, x: Tensor, counts: Tensor) -> Tensor:
        """Subtract the means of numbers of which that many were computed; the others are zero."""
        total = x.sum(0)
        if self.group is not None:
            total = _Total.apply(total, self.group)
        mean = total / counts.clamp(min=1)
        with torch.no_grad():
            moved = op.offset.lerp(mean.detach(), self.momentum)
            op.offset.copy_(torch.where(counts > 0, moved, op.offset))
        return x - mean


class _Total(torch.autograd.Function):
    """The sum over all processes; every process's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.add(own.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.add(grads[0].contiguous().clone()), None


def _count(own: Tensor, group: Group | None) -> Tensor:
    return own if group is None else group.add(own.clone())


def _parts(total: int) -> range:
    return range(-(-total // TOGETHER))


def _draw(op: ops.Op, total: int) -> list[Tensor]:
    """Draw the inputs that each part of the batch keeps: one number of them for all parts."""
    assert isinstance(op, ops.Distance)
    inputs, keep = op.weight.shape[1], keep_of(op)
    if keep == 1:
        return [torch.arange(inputs)] * len(_parts(total))
    count = max(1, int((torch.rand(inputs) < keep).sum()))
    return [torch.randperm(inputs)[:count].sort().values for _ in _parts(total)]


def _readers(graph: Graph) -> dict[int, int]:
    """Return which layer alone reads a layer's outputs, if that is so, up to a shift."""
    consumers, found = graph.consumers(), {}
    for i in distance_layers(graph):
        here = i
        while len(consumers[here]) == 1:
            here = consumers[here][0]
            if isinstance(graph.nodes[here].op, ops.Distance):
                found[i] = here
            if not isinstance(graph.nodes[here].op, ops.Shift):
                break
    return found
