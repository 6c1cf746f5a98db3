"""Regularisers that keep interval bounds healthy while the radius grows (Shi et al. 2021).

Both look at the boxes in front of the ReLU layers and are averaged over the layers:

- `tightness` asks that boxes do not grow with depth: `r_0 / r_i >= tau`;
- `relu_balance` asks that active and inactive neurons hold each other in balance, in mean
  (`a_i`) and in variance (`b_i`) of their centres.

`l1` is the plain sum of absolute weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.graph import Graph, ops

TAU = 0.5


def fast_regularizer(input_box: Box, boxes: Sequence[Box]) -> Tensor:
    """Return `L_tight + L_relu` for the normalised input box and the pre-activation boxes."""
    return tightness(input_box, boxes) + relu_balance(boxes)


def tightness(input_box: Box, boxes: Sequence[Box]) -> Tensor:
    """Return the mean over layers of `max(0, tau - r_0 / r_i) / tau`."""
    return _tightness(input_box.radius.mean(), torch.stack([box.radius.mean() for box in boxes]))


def relu_balance(boxes: Sequence[Box]) -> Tensor:
    """Return the mean over layers of the imbalance between active and inactive neurons.

    A layer with neither active nor inactive neurons has no ratio and does not count.
    """
    return _relu_balance(torch.stack([_moments(box) for box in boxes]))


def batch_moments(input_box: Box, boxes: Sequence[Box]) -> Tensor:
    """Return the means over the batch that the regularisers are made of, as one vector."""
    layers = torch.stack([_moments(box) for box in boxes])
    return torch.cat((input_box.radius.mean()[None], layers.flatten()))


def of_moments(moments: Tensor) -> Tensor:
    """Return `L_tight + L_relu` from the means of a whole batch."""
    layers = moments[1:].unflatten(0, (-1, 8))
    return _tightness(moments[0], layers[:, 0]) + _relu_balance(layers)


def _moments(box: Box) -> Tensor:
    """Return the mean radius and centre, and the 0th to 2nd moment of active and inactive ones."""
    center = box.center
    masks = box.lower > 0, box.upper < 0
    parts = [[(center**n * mask).mean() for n in range(3)] for mask in masks]
    return torch.stack([box.radius.mean(), center.mean(), *parts[0], *parts[1]])


def _tightness(first: Tensor, widths: Tensor) -> Tensor:
    return (TAU - first / widths.clamp(min=1e-12)).clamp(min=0).mean() / TAU


def _relu_balance(layers: Tensor) -> Tensor:
    mean = layers[:, 1]
    sides = layers[:, 2:5], layers[:, 5:8]
    means = _deficit(sides[0][:, 1], -sides[1][:, 1], torch.zeros_like(mean))
    # The sum of (c - mean)^2 over the active (or inactive) neurons, and its rounding error.
    spreads = [m[:, 2] - 2 * mean * m[:, 1] + mean**2 * m[:, 0] for m in sides]
    noise = 8 * torch.finfo(mean.dtype).eps * (sides[0][:, 2] + sides[1][:, 2] + mean**2)
    variances = _deficit(spreads[0], spreads[1], noise.detach())
    counts = sides[0][:, 0] + sides[1][:, 0] > 0
    return ((means + variances) * counts).mean() / TAU


def _deficit(a: Tensor, b: Tensor, noise: Tensor) -> Tensor:
    """Return `max(0, tau - min(a / b, b / a))`, written so that its gradient is finite."""
    larger = torch.maximum(a, b)
    defined = larger > noise
    ratio = torch.minimum(a, b) / torch.where(defined, larger, 1.0)
    return (TAU - torch.where(defined, ratio, 0.0)).clamp(min=0)


def l1(graph: Graph) -> Tensor:
    """Return the sum of absolute weights of all linear and convolution layers."""
    layers = (node.op for node in graph.nodes)
    weights = [op.weight for op in layers if isinstance(op, ops.Linear | ops.Conv2d)]
    return torch.stack([weight.abs().sum() for weight in weights]).sum()
