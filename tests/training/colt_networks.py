"""A small network for COLT, its stages, and the strips around its ReLUs."""

from __future__ import annotations

import copy
from typing import Any

import torch
import training_reference as reference
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import zonotope
from tightrope.domains.strips import strip
from tightrope.graph import Graph, trace
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import COLT, Loss, Objective

RADIUS = 0.1


def deep_net(seed: int = 1) -> nn.Sequential:
    """Three ReLUs, the last two behind a flattened image."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data *= 2
    return net.double()


def batch(count: int = 7) -> tuple[Tensor, Tensor]:
    """Inputs whose channels lie last in memory, as in a step, and labels."""
    x, y = reference.batch(count)
    return x.contiguous(memory_format=torch.channels_last), y


def stage(number: int, layers: tuple[int, ...] = (0, 1, 2), **options: Any) -> Any:
    """The objective of a stage."""
    return COLT(layers, **options).stages[number].objective


def run(
    objective: Objective,
    progress: float = 1.0,
    *,
    net: nn.Sequential | None = None,
    radius: float = RADIUS,
    seed: int = 3,
) -> tuple[Loss, dict[str, Tensor]]:
    """Return loss and gradients of an objective at some share of its mixture."""
    net = deep_net() if net is None else copy.deepcopy(net)
    x, y = batch()
    model = FixedModel(trace(net, reference.SHAPE), x, progress=progress)
    torch.manual_seed(seed)
    loss = objective(model, x, y, radius)
    assert all(p.grad is None for p in net.parameters())
    loss.value.backward()
    return loss, reference.gradients(net)


def lines_of(graph: Graph, ball: Box, count: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Strips around the first ReLUs, from the exact zonotope."""
    inputs = [graph.nodes[i].inputs[0] for i in graph.relus[:count]]
    boxes = zonotope.bounds(graph, ball, keep=inputs)[1]
    return {
        i: strip("deepz", boxes[before])[:2] for i, before in zip(graph.relus, inputs, strict=False)
    }
