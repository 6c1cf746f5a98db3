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
    first = input_box.radius.mean()
    widths = torch.stack([box.radius.mean() for box in boxes]).clamp(min=1e-12)
    return (TAU - first / widths).clamp(min=0).mean() / TAU


def relu_balance(boxes: Sequence[Box]) -> Tensor:
    """Return the mean over layers of the imbalance between active and inactive neurons.

    A layer with neither active nor inactive neurons has no ratio and does not count.
    """
    return torch.stack([_imbalance(box) for box in boxes]).mean() / TAU


def _imbalance(box: Box) -> Tensor:
    center = box.center
    active, inactive = box.lower > 0, box.upper < 0
    if not (active.any() or inactive.any()):
        return center.new_zeros(())
    spread = (center - center.mean()).square()
    means = (center * active).mean(), -(center * inactive).mean()
    variances = (spread * active).sum(), (spread * inactive).sum()
    return _deficit(*means) + _deficit(*variances)


def _deficit(a: Tensor, b: Tensor) -> Tensor:
    """Return `max(0, tau - min(a / b, b / a))`, written so that its gradient is finite."""
    larger = torch.maximum(a, b)
    ratio = torch.minimum(a, b) / larger.clamp(min=torch.finfo(a.dtype).tiny)
    return (TAU - ratio).clamp(min=0)


def l1(graph: Graph) -> Tensor:
    """Return the sum of absolute weights of all linear and convolution layers."""
    layers = (node.op for node in graph.nodes)
    weights = [op.weight for op in layers if isinstance(op, ops.Linear | ops.Conv2d)]
    return torch.stack([weight.abs().sum() for weight in weights]).sum()
