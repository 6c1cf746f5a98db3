"""Margins of a classifier `linear, ReLU, linear`, evaluated by what changed since the last time.

Sign steps of a fifth of the width bring nearly all coordinates of a latent point to a corner
within five steps. From then on few coordinates move and few ReLUs flip, and a large first layer
needs no full product: the columns of the moved coordinates are added to the pre-activations, the
rows of the flipped ReLUs to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks.pgd import View
from tightrope.graph import Graph, ops

# A full product is as fast as adding this share of its columns (or rows) one by one.
FULL_PRODUCT_SHARE = 0.08
# Smaller layers are multiplied in full faster than what changed is found.
SMALLEST_LAYER = 1 << 20


def linear_pair(classifier: Graph) -> tuple[ops.Linear, ops.Linear] | None:
    """Return the layers of a classifier `linear, ReLU, linear` on vectors, if it is one."""
    flat = [n.op for n in classifier.nodes[1:] if not _flattens(n.op)]
    if len(classifier.input_shape) != 1 or len(flat) != 3:
        return None
    first, activation, last = flat
    if not (isinstance(first, ops.Linear) and isinstance(last, ops.Linear)):
        return None
    return (first, last) if isinstance(activation, ops.Relu) else None


def _flattens(op: ops.Op) -> bool:
    return isinstance(op, ops.Reshape) and len(op.shape) == 1


@dataclass
class _Memory:
    """The last points with their pre-activations and gradient."""

    points: Tensor
    hidden: Tensor
    gradient: Tensor


@dataclass
class IncrementalMargins:
    """The landscape `o_target - o_label` of a `linear, ReLU, linear` classifier.

    `outer` is the row `W_target - W_label` of the last layer, per point; `offset` its bias.
    """

    layer: ops.Linear
    columns: Tensor
    outer: Tensor
    offset: Tensor
    memory: _Memory | None = None

    @classmethod
    def of(
        cls, first: ops.Linear, last: ops.Linear, columns: Tensor, labels: Tensor, targets: Tensor
    ) -> IncrementalMargins:
        """Make the landscape of one target class per point; `columns` is `first.weight.T`."""
        outer = last.weight[targets] - last.weight[labels]
        bias = last.bias
        offset = outer.new_zeros(len(outer)) if bias is None else bias[targets] - bias[labels]
        return cls(first, columns, outer, offset)

    def look(self, points: Tensor, *, gradient: bool = True) -> View:
        """Evaluate the points."""
        hidden = self._hidden(points)
        active = hidden > 0
        scores = (self.outer * hidden * active).sum(1) + self.offset
        slope = self._gradient(active) if gradient else None
        if slope is not None:
            self.memory = _Memory(points, hidden, slope)
        return View(scores, scores > 0, slope)

    def select(self, index: Tensor) -> IncrementalMargins:
        """Return the landscape of some of the samples."""
        memory = self.memory
        if memory is not None:
            parts = (memory.points, memory.hidden, memory.gradient)
            memory = _Memory(*(t[index] for t in parts))
        return replace(self, outer=self.outer[index], offset=self.offset[index], memory=memory)

    def _hidden(self, points: Tensor) -> Tensor:
        if self.memory is not None:
            changed = points != self.memory.points
            if changed.count_nonzero() < FULL_PRODUCT_SHARE * points.numel():
                change = points[changed] - self.memory.points[changed]
                return self.memory.hidden + _sum_rows(self.columns, changed, change)
        return F.linear(points, self.layer.weight, self.layer.bias)

    def _gradient(self, active: Tensor) -> Tensor:
        if self.memory is not None:
            before = self.memory.hidden > 0
            flipped = active != before
            if flipped.count_nonzero() < FULL_PRODUCT_SHARE * active.numel():
                signs = torch.where(active[flipped], 1.0, -1.0).to(self.outer.dtype)
                change = _sum_rows(self.layer.weight, flipped, self.outer[flipped] * signs)
                return self.memory.gradient.add_(change)
        return (self.outer * active) @ self.layer.weight


def _sum_rows(table: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return, for each row of the mask `chosen`, the weighted sum of the chosen table rows."""
    counts = chosen.sum(1)
    return F.embedding_bag(
        chosen.nonzero()[:, 1],
        table,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=weights,
    )
