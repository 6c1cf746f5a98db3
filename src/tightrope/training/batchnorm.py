"""BatchNorm made explicit: one clean pass per step fixes every BatchNorm's map.

During a training step the statistics come from one forward pass over the clean batch, and
from nothing else. Bounds and attacks of the same step reuse them as constants of an affine
map, through which gradients still flow back into the clean pass. That pass alone updates
the running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tightrope.attacks import Network, for_points
from tightrope.draws import own_rows
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops
from tightrope.training import distances
from tightrope.training.distances import DistancePass
from tightrope.training.distributed import Group


class FixedModel:
    """A network during one step: every BatchNorm is a fixed affine map.

    `graph` computes bounds and is differentiable in the parameters; `frozen` is the same
    function without parameter gradients, for attacks; `logits` are the outputs on the clean
    batch `x`. `watched` are positions whose boxes the trainer wants back from the objective;
    `progress` is the present radius as a share of the final one, or what the objective says it is;
    `teacher` is the network that methods which distil learn from, if there is one. `values` are
    those at some positions on the clean batch, in a pass of the objective's own.
    """

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        logits: Tensor | None = None,
        *,
        watched: tuple[int, ...] = (),
        progress: float = 1.0,
        values: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.graph = graph
        self.x = x
        self.watched = watched
        self.progress = progress
        self.teacher: Graph | None = None
        self.values = values or {}
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


def training_model(
    graph: Graph,
    x: Tensor,
    group: Group | None = None,
    *,
    total: int | None = None,
    own_pass: DistancePass | None = None,
) -> FixedModel:
    """Run the clean pass over `x`, update running statistics, and fix every BatchNorm.

    With a group, `x` are this process's samples of `total`, whose statistics are taken.
    """
    if own_pass is not None:
        rows = (group.rows(total or len(x)) if group else own_rows(len(x))).indices
        values = own_pass(graph, x, rows, total or len(x), group)
        return FixedModel(graph, x, values[len(graph.nodes) - 1], values=values)
    statistics, logits = clean_pass(graph, x, group)
    if not statistics:
        return FixedModel(graph, x)
    update_running(graph, statistics, total or len(x))
    return FixedModel(fix(graph, statistics), x, logits)


Statistics = dict[int, tuple[Tensor, Tensor]]


def clean_pass(
    graph: Graph, x: Tensor, group: Group | None = None
) -> tuple[Statistics, Tensor | None]:
    """Return the batch mean and variance at each BatchNorm, and the outputs.

    Without BatchNorm there is nothing to do, and no outputs. The processes of `group` have parts
    of the batch, and its mean and variance are those of all of it.
    """
    norms = {node.op: i for i, node in enumerate(graph.nodes) if isinstance(node.op, ops.BatchNorm)}
    if not norms:
        return {}, None
    if len(x) < 2 and group is None:
        raise UserError("BatchNorm needs at least two samples in a training batch")
    statistics: Statistics = {}

    def normalize(op: ops.BatchNorm, value: Tensor) -> Tensor:
        given = value, op.weight, op.bias, op.epsilon
        if group is None:
            output, mean, variance = _NormalizeBatch.apply(*given)
        else:
            output, mean, variance = _NormalizeShare.apply(*given, group)
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
def precise_batchnorm(
    graph: Graph, batches: Iterable[tuple[Tensor, Tensor]], group: Group | None = None
) -> None:
    """Recompute the running statistics as the average over `batches` at the present weights."""
    usable = (x for x, _ in batches if len(x) > 1)  # one sample has no variance
    for k, x in enumerate(usable, start=1):
        own = x if group is None else x[group.rows(len(x)).inside]
        if distances.distance_layers(graph):
            distances.average_means(graph, own, k, group)
            continue
        update_running(graph, clean_pass(graph, own, group)[0], len(x), average=k)


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
            count = x.numel() / x.shape[1]
            extra = _through_statistics(x, mean, grad_mean, grad_variance, count)
            grad_x = extra if grad_x is None else grad_x + extra
        return grad_x, grad_weight, grad_bias, None


class _NormalizeShare(torch.autograd.Function):
    """`_NormalizeBatch` of a batch of which every process has a part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, mean, variance = _joint_statistics(x, group)
        output, _, _ = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, epsilon)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.epsilon, ctx.group, ctx.count = epsilon, group, count
        ctx.set_materialize_grads(False)
        return output, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add up the gradients of the statistics: every process's outputs depend on them."""
        grad_output, *others = grads
        x, weight, mean, variance = ctx.saved_tensors
        grad_mean, grad_variance = (torch.zeros_like(mean) if g is None else g for g in others)
        grad_x = grad_weight = grad_bias = None
        if grad_output is not None:
            given = mean, variance, None, None, False, ctx.epsilon, [True] * 3
            factor = torch.ones_like(mean) if weight is None else weight
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_output, x, factor, *given
            )
            inverse = (variance + ctx.epsilon).rsqrt()
            grad_mean = grad_mean - factor * inverse * grad_bias
            grad_variance = grad_variance - factor * inverse**2 * grad_weight / 2
        total = ctx.group.add(torch.stack((grad_mean, grad_variance)))
        extra = _through_statistics(x, mean, total[0], total[1], ctx.count)
        grad_x = extra if grad_x is None else grad_x + extra
        affine = (None, None) if weight is None else (grad_weight, grad_bias)
        return grad_x, *affine, None, None


def _joint_statistics(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of values per channel in all processes, their mean and variance."""
    variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    own = torch.cat((mean.new_full((1,), x.numel() / x.shape[1]), mean, variance))
    every = group.gather(own)
    counts, (means, variances) = every[:, :1], every[:, 1:].unflatten(1, (2, -1)).unbind(1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    # Spread inside each part, and of the parts among themselves.
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return count, mean, variance


def _through_statistics(
    x: Tensor,
    mean: Tensor,
    grad_mean: Tensor | None,
    grad_variance: Tensor | None,
    count: float | Tensor,
) -> Tensor:
    """Return the gradient that reaches x from statistics over `count` values per channel.

    It is affine in x: `d mean / dx = 1 / n` and `d variance / dx = 2 (x - mean) / n`.
    """
    slope = torch.zeros_like(mean) if grad_variance is None else grad_variance * (2 / count)
    offset = -slope * mean
    offset = offset if grad_mean is None else offset + grad_mean / count
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return torch.addcmul(offset.view(shape), x, slope.view(shape))
