"""Propagation tightness (Mao et al. 2024): what intervals lose against the linear map itself.

With the activations of the clean input fixed, as a diagonal D of zeros and ones per layer, margins
are linear in the input. A box of half-widths r has margins within `A r` of the centre's, where
`A = |C W_L D ... D W_1|`, and intervals say `M r` with `M = |C W_L| D ... D |W_1|`. Both are equal
if nothing cancels; `A r / M r` is the propagation tightness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.attacks import wrong_classes
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.reduced.reduction import LINEAR
from tightrope.errors import UserError
from tightrope.graph import Graph, ops
from tightrope.training.batchnorm import FixedModel


def lost_tightness(model: FixedModel, y: Tensor) -> Tensor:
    """Return `sum (M - A)` over wrong classes and inputs, per sample; never negative."""
    propagated = propagated_reach(model, y, torch.ones_like(model.x)).sum(1)
    return propagated - slopes(model, y).flatten(1).sum(1)


def slopes(model: FixedModel, y: Tensor) -> Tensor:
    """Return A: [batch, wrong classes, *input], the sizes of the margins' gradients at x."""
    wrong = wrong_classes(y, model.graph.output_shape[0])
    count, differentiable = wrong.shape[1], torch.is_grad_enabled()
    with torch.enable_grad():
        # One copy of the input for each margin: a network's rows come from one backward pass.
        points = model.x.detach().repeat_interleave(count, 0).requires_grad_()
        logits = model.graph(points)
        pair = torch.stack((y.repeat_interleave(count), wrong.flatten()), 1)
        margins = logits.gather(1, pair) @ logits.new_tensor([1.0, -1.0])
        (gradient,) = torch.autograd.grad(margins.sum(), points, create_graph=differentiable)
    return gradient.abs().unflatten(0, (len(y), count))


def propagated_reach(model: FixedModel, y: Tensor, radius: Tensor) -> Tensor:
    """Return `M r`: [batch, classes], with 0 for the true class."""
    box, end = Box.around(model.x, radius), len(model.graph.nodes) - 1
    lower, boxes = interval.margins(model.graph, box, y, keep=(end,), rules=_RULES)
    outputs = boxes[end].center
    return outputs.gather(1, y[:, None]) - outputs - lower


def check_tightness(graph: Graph) -> None:
    """Refuse networks that are not linear once it is known which neurons are active."""
    other = next((n for n in graph.nodes if not isinstance(n.op, (*LINEAR, ops.Relu))), None)
    if other is not None:
        raise UserError(
            "tightness_weight is for networks of linear layers and ReLUs, but this one has "
            f"{type(other.op).__name__} ({other.name}); leave it at 0"
        )


def _relu(op: ops.Relu, box: Box, *, rounding: float) -> Box:
    center, radius = box.middle
    return Box.around(center.relu(), radius * (center > 0))


_RULES = {**interval.RULES, ops.Relu: _relu}
