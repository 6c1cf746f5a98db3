"""How a region becomes a loss: interval bounds, or interval bounds and a latent attack."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import wrong_classes
from tightrope.box import Box
from tightrope.budget import fitting
from tightrope.devices import launches
from tightrope.domains import interval
from tightrope.graph import Graph, ops
from tightrope.graph.graph import Rules
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives.base import Loss, certified

# Bytes that evaluating held-out data may take.
EVALUATION_MEMORY = 1 << 30


def interval_loss(model: FixedModel, box: Box, y: Tensor, *, rules: Rules = interval.RULES) -> Loss:
    """Return the cross-entropy of the interval bounds over `box`: the paper's Eq. (2)."""
    margins, boxes = interval.margins(model.graph, box, y, keep=model.watched, rules=rules)
    return Loss(margin_loss(margins, y), certified(margins, y), boxes=boxes)


def margin_loss(margins: Tensor, y: Tensor) -> Tensor:
    """Return the mean of `ln(1 + sum_i exp(-margin_i))` over bounds or estimates of `o_y - o_i`.

    This is Eq. (2) for interval bounds and Eq. (5) for the margins that a latent attack finds.
    With 0 for the true class, `-margins` are worst-case logits.
    """
    return F.cross_entropy(-margins, y)


def estimated_margins(network: Graph, points: Tensor, y: Tensor) -> Tensor:
    """Return `o_y - o_i` for each class i: [batch, classes], with 0 for the true class.

    `points` are [batch, estimators, ...]. With one estimator per wrong class, class i is
    evaluated at its own point only (Section 3.3); a single estimator serves all classes.
    """
    logits = network(points.flatten(0, 1)).unflatten(0, points.shape[:2])
    true = logits.gather(2, y.view(-1, 1, 1).expand(-1, logits.shape[1], 1))
    if points.shape[1] == 1:
        return (true - logits)[:, 0]
    wrong = wrong_classes(y, logits.shape[2])
    margins = (true - logits.gather(2, wrong.unsqueeze(2))).squeeze(2)
    return margins.new_zeros(len(y), logits.shape[2]).scatter(1, wrong, margins)


def evaluation_batch(network: Graph) -> int:
    """Return how many samples to evaluate at a time, each with one point per class."""
    largest = max(math.prod(node.shape) for node in network.nodes)
    memory = EVALUATION_MEMORY
    weights = [node.op.weight for node in network.nodes if isinstance(node.op, ops.Linear)]
    if weights and launches(weights[0]):
        memory = fitting(memory, weights[0].device)
    return max(1, memory // (4 * 8 * network.output_shape[0] * largest))


def interval_rules(shrink: float) -> Rules:
    """Return the interval rules, with ReLU shrinkage if `shrink` is below 1.

    Shrinkage (Mueller et al. 2023) multiplies the upper bounds of ReLUs that cross zero: bounds
    for training only, no longer sound.
    """
    if shrink == 1:
        return interval.RULES

    def relu(op: ops.Relu, box: Box, *, rounding: float) -> Box:
        lower, upper = box.corners
        shrunk = torch.where((lower < 0) & (upper > 0), shrink * upper, upper)
        return Box(lower.relu(), shrunk.relu())

    return {**interval.RULES, ops.Relu: relu}


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return `value` itself, with its gradient multiplied by `factor`."""
    return value.detach() + factor * (value - value.detach())


def gradient_factors(weight: float, scale: str) -> tuple[float, float]:
    """Return the factors of `dL_TAPS` and `dL_IBP` in the gradient of the product.

    "plain" is (w, 1), under which the published L1 strengths were tuned; "paper" is Eq. (6)'s
    (2 alpha, 2 - 2 alpha) with w = alpha / (1 - alpha): the same ratio. An infinite w drops the
    second.
    """
    if math.isinf(weight):
        return (1.0, 0.0) if scale == "plain" else (2.0, 0.0)
    if scale == "plain":
        return weight, 1.0
    alpha = weight / (1 + weight)
    return 2 * alpha, 2 - 2 * alpha
