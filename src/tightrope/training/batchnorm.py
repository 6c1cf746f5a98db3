"""BatchNorm made explicit: one clean pass per step fixes every BatchNorm's map.

During a training step the statistics come from one forward pass over the clean batch, and
from nothing else. Bounds and attacks of the same step reuse them as constants of an affine
map, through which gradients still flow back into the clean pass. That pass alone updates
the running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tightrope.attacks import Network, for_points
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops


class FixedModel:
    """A network during one step: every BatchNorm is a fixed affine map.

    `graph` computes bounds and is differentiable in the parameters; `frozen` is the same
    function without parameter gradients, for attacks; `logits` are the outputs on the clean
    batch `x`. `watched` are positions whose boxes the trainer wants back from the objective;
    `progress` is the present radius as a share of the final one.
    """

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        logits: Tensor | None = None,
        *,
        watched: tuple[int, ...] = (),
        progress: float = 1.0,
    ) -> None:
        self.graph = graph
        self.x = x
        self.watched = watched
        self.progress = progress
        if logits is not None:
            self.__dict__["logits"] = logits

    @cached_property
    def logits(self) -> Tensor:
        """Outputs on the clean batch."""
        return self.graph(self.x)

    @cached_property
    def frozen(self) -> Network:
        """The network without gradients to its parameters."""
        return for_points(self.graph)


def evaluation_model(graph: Graph, x: Tensor) -> FixedModel:
    """Return the network with its running statistics, for evaluation on `x`."""
    return FixedModel(graph.fold_batchnorm(), x)


def training_model(graph: Graph, x: Tensor) -> FixedModel:
    """Run the clean pass over `x`, update running statistics, and fix every BatchNorm."""
    statistics, logits = clean_pass(graph, x)
    if not statistics:
        return FixedModel(graph, x)
    update_running(graph, statistics, len(x))
    return FixedModel(fix(graph, statistics), x, logits)


Statistics = dict[int, tuple[Tensor, Tensor]]


def clean_pass(graph: Graph, x: Tensor) -> tuple[Statistics, Tensor | None]:
    """Return the batch mean and variance at each BatchNorm, and the outputs.

    Without BatchNorm there is nothing to do, and no outputs.
    """
    norms = {node.op: i for i, node in enumerate(graph.nodes) if isinstance(node.op, ops.BatchNorm)}
    if not norms:
        return {}, None
    if len(x) < 2:
        raise UserError("BatchNorm needs at least two samples in a training batch")
    statistics: Statistics = {}

    def normalize(op: ops.BatchNorm, value: Tensor) -> Tensor:
        output, mean, variance = _NormalizeBatch.apply(value, op.weight, op.bias, op.epsilon)
        statistics[norms[op]] = (mean, variance)
        return output

    values = graph.propagate({**evaluate.RULES, ops.BatchNorm: normalize}, x)
    return statistics, values[len(graph.nodes) - 1]


def fix(graph: Graph, statistics: Statistics) -> Graph:
    """Put the given statistics in place of the running ones, and fold what can be folded."""
    fixed = {}
    for i, (mean, variance) in statistics.items():
        op = graph.nodes[i].op
        assert isinstance(op, ops.BatchNorm)
        fixed[i] = replace(op, mean=mean, variance=variance)
    return graph.replace_ops(fixed).fold_batchnorm()


@torch.no_grad()
def update_running(
    graph: Graph, statistics: Statistics, batch: int, *, average: int | None = None
) -> None:
    """Move the running statistics towards those of a batch of that size, as torch does.

    `average=k` says that this is the k-th batch of a plain average instead.
    """
    for i, (mean, variance) in statistics.items():
        node = graph.nodes[i]
        assert isinstance(node.op, ops.BatchNorm)
        if node.op.batches is not None and average is None:
            node.op.batches.add_(1)
        momentum = node.op.momentum if average is None else 1 / average
        if momentum is None:
            assert node.op.batches is not None
            momentum = 1 / float(node.op.batches)
        count = batch * math.prod(node.shape[1:])
        node.op.mean.lerp_(mean, momentum)
        node.op.variance.lerp_(variance * (count / (count - 1)), momentum)


@torch.no_grad()
def precise_batchnorm(graph: Graph, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Recompute the running statistics as the average over `batches` at the present weights."""
    usable = (x for x, _ in batches if len(x) > 1)  # one sample has no variance
    for k, x in enumerate(usable, start=1):
        update_running(graph, clean_pass(graph, x)[0], len(x), average=k)


class _NormalizeBatch(torch.autograd.Function):
    """Training BatchNorm that also returns its statistics, with gradients through them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, mean, inverse = torch.native_batch_norm(
            x, weight, bias, None, None, True, 0.0, epsilon
        )
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.epsilon = epsilon
        ctx.set_materialize_grads(False)
        return output, mean, inverse.pow(-2) - epsilon

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, grad_mean, grad_variance = grads
        x, weight, mean, inverse = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if grad_output is not None:
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_output,
                x,
                weight,
                None,
                None,
                mean,
                inverse,
                True,
                ctx.epsilon,
                [True, weight is not None, weight is not None],
            )
        if grad_mean is not None or grad_variance is not None:
            slope, offset = _through_statistics(x, mean, grad_mean, grad_variance)
            shape = (1, -1) + (1,) * (x.dim() - 2)
            extra = torch.addcmul(offset.view(shape), x, slope.view(shape))
            grad_x = extra if grad_x is None else grad_x + extra
        return grad_x, grad_weight, grad_bias, None


def _through_statistics(
    x: Tensor, mean: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return slope and offset of d(statistics)/dx, which is affine in x per channel.

    `d mean / dx = 1 / n` and `d variance / dx = 2 (x - mean) / n`.
    """
    count = x.numel() / x.shape[1]
    slope = torch.zeros_like(mean) if grad_variance is None else grad_variance * (2 / count)
    offset = -slope * mean
    return slope, offset if grad_mean is None else offset + grad_mean / count
