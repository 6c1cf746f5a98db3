"""Affine layers as windows on the values before them, for the compiled loops."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from tightrope.attacks.kernels.chains import Array, Shape, bias, flat
from tightrope.graph import ops
from tightrope.graph.windows import Side, places, sides


class Layer(NamedTuple):
    """An affine layer: every channel looks at every window.

    Its outputs are [windows, channels], flattened; so are the values before it.
    """

    taps: Array  # [windows, taps]: values below the window; one past the last for padding
    weights: Array  # [channels, taps]
    biases: Array  # [channels]


def lay_out(op: ops.Conv2d | ops.Linear, shape: Shape) -> Layer:
    """Lay out a layer on values of some shape; a linear one is a single window."""
    if isinstance(op, ops.Conv2d):
        taps = _taps(shape[0], *sides(op, shape))
        weights = op.weight.permute(0, 2, 3, 1).flatten(1)
    else:
        taps = np.arange(math.prod(shape), dtype=np.int32)[None]
        weights = flat(op.weight.unflatten(1, shape), 1)
    return Layer(taps, weights.contiguous().numpy(), bias(op).contiguous().numpy())


@lru_cache(maxsize=64)
def _taps(channels: int, rows: Side, columns: Side) -> Array:
    pixels = places(rows, columns, (rows.windows(), columns.windows())).flatten(1).T
    taps = pixels.unsqueeze(2) * channels + torch.arange(channels)
    taps[pixels < 0] = channels * rows.size * columns.size  # padding
    return taps.flatten(1).to(torch.int32).contiguous().numpy()
