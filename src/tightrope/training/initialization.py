"""Initialisation for certified training (Shi et al. 2021).

Weights are drawn so that the width of interval bounds stays constant from layer to layer:
`N(0, s^2)` with `s = sqrt(2 pi) / fan_in`.
"""

from __future__ import annotations

import math

import torch

from tightrope.graph import Graph, ops


@torch.no_grad()
def initialize(graph: Graph) -> None:
    """Redraw every linear and convolution weight but the last layer's, in place.

    Biases and the last layer keep the framework's initialisation. A layer that reads a
    residual sum directly gets half the deviation, for the sum doubles the width.
    """
    layers = [n for n in graph.nodes if isinstance(n.op, ops.Linear | ops.Conv2d)]
    for node in layers[:-1]:
        assert isinstance(node.op, ops.Linear | ops.Conv2d)
        weight = node.op.weight
        deviation = math.sqrt(2 * math.pi) / weight[0].numel()
        if isinstance(graph.nodes[node.inputs[0]].op, ops.Add):
            deviation /= 2
        # Drawn on the CPU: a seed means the same network everywhere.
        weight.copy_(torch.empty_like(weight, device="cpu").normal_(0.0, deviation))


IDENTITY = -10.0  # far below all inputs


@torch.no_grad()
def pass_on(graph: Graph) -> None:
    """Let the outputs of distance layers begin as their inputs in turn, up to a constant.

    With one weight of -10 in each row, that input is the farthest: `|x + 10| = x + 10`. Layers with
    fewer outputs than inputs, such as the last one, stay as they are.
    """
    for node in graph.nodes:
        if isinstance(node.op, ops.Distance):
            outputs, inputs = node.op.weight.shape
            if inputs <= outputs:
                rows = torch.arange(outputs, device=node.op.weight.device)
                node.op.weight[rows, rows % inputs] = IDENTITY
