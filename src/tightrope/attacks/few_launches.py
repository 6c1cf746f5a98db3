"""The latent attack on chains of layers where every operation is a launch, such as on a GPU.

The same search as the plain one, asking for less: gradients in closed form instead of autograd's,
margins folded into the last layer, best points kept by selection instead of by index. Nothing is
waited for but, every few steps, the positions that still move; the others are left out from there
on, which changes no result. Between two such looks all shapes are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.attacks.kernels.chains import Chain, bias
from tightrope.attacks.pgd import EVERY, WIDTH, Steps
from tightrope.attacks.points import flatten_in_memory_order
from tightrope.box import Box
from tightrope.deadline import check_time
from tightrope.graph import evaluate, ops
from tightrope.precision import search_precision, search_type

# The share of all points that may still move for the others to be left out.
WORTHWHILE = 0.75


class Margins:
    """The margins `o_t - o_y` of a chain as functions of latent points, with their gradients."""

    def __init__(self, chain: Chain, kind: torch.dtype) -> None:
        """`kind` is the type of number in which they are computed."""
        graph, flattened = flatten_in_memory_order(chain.classifier.detach().to(kind))
        self.kind = kind
        self.hidden = [node.op for node in graph.nodes[1:-1]]
        self.flattened = flattened
        self.last = graph.nodes[-1].op

    def rows(self, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return slopes [samples, targets, neurons] and offsets of the margins."""
        assert isinstance(self.last, ops.Linear)
        weight, shift = self.last.weight, bias(self.last)
        slopes = weight[targets] - weight[labels].unsqueeze(1)
        return slopes, shift[targets] - shift[labels].unsqueeze(1)

    def look(self, points: Tensor, slopes: Tensor, offsets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the margins of points [rows, ...], and what the gradient needs."""
        check_time()
        value, inputs = points.to(self.kind), []
        for op in self.hidden:
            inputs.append(value)
            if isinstance(op, ops.Relu):
                value = value.relu_()
            elif op in self.flattened:
                value = value.permute(0, 2, 3, 1).flatten(1)
            else:
                value = evaluate.RULES[type(op)](op, value)
        scores = torch.baddbmm(offsets.view(-1, 1, 1), value.unsqueeze(1), slopes.unsqueeze(2))
        return scores.view(-1).to(points.dtype), inputs

    def gradient(self, inputs: Sequence[Tensor], slopes: Tensor) -> Tensor:
        """Return the gradients of the margins at the points that were looked at last."""
        slope = slopes
        for op, value in zip(reversed(self.hidden), reversed(inputs), strict=True):
            slope = self._back(op, value, slope)
        return slope

    def _back(self, op: ops.Op, value: Tensor, slope: Tensor) -> Tensor:
        if isinstance(op, ops.Relu):  # done in place: `value` is positive where it was before
            return torch.ops.aten.threshold_backward(slope, value, 0)
        if isinstance(op, ops.Linear):
            return slope @ op.weight
        if isinstance(op, ops.Conv2d):
            return _convolution_gradient(op, value, slope)
        if op in self.flattened:
            channels, height, width = value.shape[1:]
            return slope.unflatten(1, (height, width, channels)).permute(0, 3, 1, 2)
        return slope.view_as(value)


def _convolution_gradient(op: ops.Conv2d, value: Tensor, slope: Tensor) -> Tensor:
    gradient: Tensor = torch.ops.aten.convolution_backward(
        slope,
        value,
        op.weight,
        None,
        op.stride,
        op.padding,
        op.dilation,
        False,
        (0, 0),
        op.groups,
        (True, False, False),
    )[0]
    return gradient


@dataclass(frozen=True)
class Climbers:
    """Points that move: [samples, estimators, ...], or [rows, 1, ...] once some are left out.

    `box` has one of them for each of the samples, or rows: [samples, 1, ...].
    """

    points: Tensor
    box: Box
    slopes: Tensor  # [rows, neurons]
    offsets: Tensor  # [rows]
    best: Tensor  # as `points`
    scores: Tensor  # [rows]

    def look(self, margins: Margins) -> list[Tensor]:
        """Keep the best points, in place; return what the gradient needs."""
        rows = self.points.flatten(0, 1)
        found, inputs = margins.look(rows, self.slopes, self.offsets)
        better = (found > self.scores).view(*self.points.shape[:2], *(1 for _ in rows.shape[1:]))
        torch.where(better, self.points, self.best, out=self.best)
        torch.fmax(self.scores, found, out=self.scores)
        return inputs

    def moved(self, gradient: Tensor, size: float) -> Tensor:
        """Return the points after a step."""
        return self.box.step(self.points, gradient.view_as(self.points).to(self.points), size)

    def select(self, rows: Tensor) -> Climbers:
        """Return some of them, by row."""
        owner = rows // self.points.shape[1]
        points, best = (
            t.flatten(0, 1).index_select(0, rows).unsqueeze(1) for t in (self.points, self.best)
        )
        slopes, offsets, scores = (
            t.index_select(0, rows) for t in (self.slopes, self.offsets, self.scores)
        )
        box = self.box.map(lambda t: t.index_select(0, owner))
        return Climbers(points, box, slopes, offsets, best, scores)


def attack_chain(
    chain: Chain,
    box: Box,
    labels: Tensor,
    targets: Tensor,
    starts: Sequence[Tensor],
    steps: Steps,
) -> Tensor:
    """Return the best points [samples, targets, ...] of climbs from each of `starts`."""
    margins = Margins(chain, search_type(starts[0]))
    slopes, offsets = margins.rows(labels, targets)
    best = starts[0].clone()
    scores = best.new_full((targets.numel(),), -torch.inf)
    wide = box.map(lambda t: t.unsqueeze(1))
    for start in starts:
        climbers = Climbers(start, wide, slopes.flatten(0, 1), offsets.flatten(), best, scores)
        with search_precision():
            _climb(margins, climbers, steps)
    return best


def _climb(margins: Margins, climbers: Climbers, steps: Steps) -> None:
    """Take all steps, and leave the best points and scores in the tensors that were given."""
    best, scores = climbers.best, climbers.scores
    best = best.view(-1, *best.shape[2:])  # the same numbers, not a copy
    alive: Tensor | None = None
    way = 0.0
    for number, size in enumerate(steps.sizes(), start=1):
        inputs = climbers.look(margins)
        moved = climbers.moved(margins.gradient(inputs, climbers.slopes), size)
        way += size
        due = number % EVERY == 0 and way >= WIDTH and number < steps.count
        moving = _moving(climbers.points, moved) if due else None
        climbers = replace(climbers, points=moved)
        if moving is None:
            continue
        _keep(climbers, alive, best, scores)
        climbers = climbers.select(moving)
        alive = moving if alive is None else alive.index_select(0, moving)
        if not len(moving):
            return
    climbers.look(margins)
    _keep(climbers, alive, best, scores)


def _moving(points: Tensor, moved: Tensor) -> Tensor | None:
    """Return the rows that a step led elsewhere, or None if they are most; this waits."""
    rows = (moved != points).flatten(0, 1).flatten(1).any(1).nonzero()[:, 0]
    return rows if len(rows) <= WORTHWHILE * points.shape[0] * points.shape[1] else None


def _keep(climbers: Climbers, alive: Tensor | None, best: Tensor, scores: Tensor) -> None:
    if alive is not None:
        best.index_copy_(0, alive, climbers.best.flatten(0, 1))
        scores.index_copy_(0, alive, climbers.scores)
