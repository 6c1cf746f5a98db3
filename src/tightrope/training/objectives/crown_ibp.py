"""CROWN-IBP (Zhang et al. 2020), with loss fusion (Xu et al. 2020), and CROWN training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import wrong_classes
from tightrope.box import Box
from tightrope.budget import fitting
from tightrope.domains import interval
from tightrope.domains.linear import batch
from tightrope.domains.linear.bounded import Relaxation
from tightrope.errors import UserError
from tightrope.graph import Graph, ops
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.objectives.propagation import interval_loss, margin_loss
from tightrope.training.parsing import choice, setting

NEGLIGIBLE = 1e-5  # beta below which linear bounds are not computed
MEMORY = 1 << 31  # bytes that linear bounds may keep for the gradient
CROWN_BYTES = 1 << 25  # of one sample, beyond which bounds of every layer are refused


@dataclass(frozen=True)
class CROWNIBP(Objective):
    """Linear bounds of the margins over interval bounds of the layers, which take over.

    The margins are `beta m_CROWN + (1 - beta) m_IBP`, and beta falls from 1 to `end_beta` while the
    radius grows: linear bounds make the start stable, intervals are what is left to certify by.
    """

    name: ClassVar[str] = "crown-ibp"
    summary: ClassVar[str] = "linear bounds over interval bounds, which take over"
    propagates_boxes: ClassVar[bool] = True

    end_beta: float = setting(0.0, options.share, "share of linear bounds at the full radius")
    loss: str = setting(
        "margins", choice("margins", "fused"), "every margin, or their loss bounded in one row"
    )
    bounds: str = setting(
        "crown-ibp", choice("crown-ibp", "crown"), "layers by intervals, or by linear bounds"
    )
    start_kappa: float = setting(0.0, options.share, "weight of the clean loss at radius 0")
    end_kappa: float = setting(0.0, options.share, "weight of the clean loss at the full radius")

    def check(self, graph: Graph) -> None:
        """Refuse linear bounds of every layer where there are too many neurons."""
        if self.bounds == "crown":
            widths = [math.prod(graph.nodes[i].shape) for i in batch.read_by_activations(graph)]
            if 8 * max(widths) * sum(widths) > CROWN_BYTES:
                raise UserError(
                    f"crown-ibp.bounds = crown is for small networks: this one has layers of "
                    f"{max(widths)} numbers; use crown-ibp.bounds = crown-ibp"
                )

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `kappa CE(o(x)) + (1 - kappa) CE(-margins)`."""
        beta = 1 - model.progress * (1 - self.end_beta)
        robust = self._robust_loss(model, Box.ball(x, radius), y, beta)
        kappa = self.start_kappa + model.progress * (self.end_kappa - self.start_kappa)
        if kappa == 0:
            return robust
        value = kappa * F.cross_entropy(model.logits, y) + (1 - kappa) * robust.value
        return Loss(value, robust.robust, boxes=robust.boxes)

    def _robust_loss(self, model: FixedModel, box: Box, y: Tensor, beta: float) -> Loss:
        if beta < NEGLIGIBLE:
            return interval_loss(model, box, y)
        graph = model.graph
        watched = {*model.watched, *batch.read_by_activations(graph), *last_latent(graph)}
        margins, boxes = interval.margins(graph, box, y, keep=watched)
        if self.bounds == "crown":
            relaxation = batch.relaxed_by_lines(graph, box)
        else:
            relaxation = batch.relaxed_by_intervals(graph, box, boxes)
        seen = {i: boxes[i] for i in model.watched}
        if self.loss == "fused":
            value = fused_loss(
                relaxation, margins, upper_margins(graph, boxes, margins, y), y, beta
            )
            return Loss(value, certified(margins, y), boxes=seen)
        mixed = beta * linear_margins(relaxation, y) + (1 - beta) * margins
        return Loss(margin_loss(mixed, y), certified(mixed, y), boxes=seen)


def linear_margins(relaxation: Relaxation, y: Tensor) -> Tensor:
    """Return lower bounds of `o_y - o_i`: [batch, classes], with 0 for the true class."""
    classes = relaxation.graph.output_shape[0]
    wrong = wrong_classes(y, classes)
    units = torch.eye(classes, dtype=relaxation.box.lower.dtype, device=y.device)
    rows = units[y].unsqueeze(1) - units[wrong]
    memory = fitting(MEMORY, y.device)
    bounds = batch.lower_bounds(relaxation, relaxation.output, rows, memory=memory)
    return bounds.new_zeros(len(y), classes).scatter(1, wrong, bounds)


def fused_loss(
    relaxation: Relaxation, lower: Tensor, upper: Tensor, y: Tensor, beta: float
) -> Tensor:
    """Return `log S` with `S >= sum_i exp(-m_i)`, all margins in one row.

    On `[l, u]`, where intervals say m lies, `exp(-m)` is below its chord of slope
    `k = (e^-u - e^-l) / (u - l)`, so that `S = 1 + sum_i (e^-l_i - k_i l_i) - min sum_i (-k_i) m_i`
    over the wrong classes, and a linear bound of the one sum is all it takes. What is mixed is S.
    Everything is multiplied by `exp(-shift)`, so that no exponential overflows.
    """
    shift = (-lower).detach().amax(1, keepdim=True).clamp(min=0)
    falls = torch.exp(-lower - shift)
    width = upper - lower
    thin = width < 1e-4  # expm1(-w) / w is then -1 + w / 2
    safe = torch.where(thin, torch.ones_like(width), width)
    slope = falls * torch.where(thin, -1 + width / 2, torch.expm1(-safe) / safe)
    wrong = torch.ones_like(lower).scatter(1, y[:, None], 0.0)
    slope, chord = slope * wrong, (falls - slope * lower) * wrong
    # sum_i (-k_i)(o_y - o_i): the row of the outputs.
    row = slope.scatter(1, y[:, None], -slope.sum(1, keepdim=True))
    memory = fitting(MEMORY, y.device)
    least = batch.lower_bounds(relaxation, relaxation.output, row.unsqueeze(1), memory=memory)
    one = torch.exp(-shift)
    by_lines = one + chord.sum(1, keepdim=True) - least
    by_intervals = one + (falls * wrong).sum(1, keepdim=True)
    total = torch.maximum(beta * by_lines + (1 - beta) * by_intervals, one)  # S >= 1
    return (total.log() + shift).mean()


def last_latent(graph: Graph) -> tuple[int, ...]:
    """Return the position before a last linear layer, whose margins are merged with it."""
    last = graph.nodes[-1]
    return last.inputs if isinstance(last.op, ops.Linear) and len(last.shape) == 1 else ()


def upper_margins(graph: Graph, boxes: dict[int, Box], lower: Tensor, y: Tensor) -> Tensor:
    """Return interval upper bounds of `o_y - o_i`, given the lower ones."""
    before = last_latent(graph)
    if before:  # the centre of the merged interval is the margin at the latent centre
        op = graph.nodes[-1].op
        assert isinstance(op, ops.Linear)
        outputs = F.linear(boxes[before[0]].center, op.weight, op.bias)
        return 2 * (outputs.gather(1, y[:, None]) - outputs) - lower
    low, high = boxes[len(graph.nodes) - 1].corners
    return (high.gather(1, y[:, None]) - low).scatter(1, y[:, None], 0.0)
