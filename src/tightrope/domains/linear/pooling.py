"""Which inputs each output of a max pooling looks at."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import ops


def windows(op: ops.MaxPool, shape: tuple[int, ...]) -> Tensor:
    """Return the flat positions of each output's inputs, [window, *output shape].

    Windows that reach over the edge hold -1 for what lies in the padding.
    """
    return _windows(op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode, tuple(shape))


@lru_cache(maxsize=64)
def _windows(
    kernel: ops.Pair,
    stride: ops.Pair,
    padding: ops.Pair,
    dilation: ops.Pair,
    ceil_mode: bool,
    shape: tuple[int, ...],
) -> Tensor:
    positions = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float64).view(1, *shape)
    pooled = F.max_pool2d(positions, kernel, stride, padding, dilation, ceil_mode)
    height, width = pooled.shape[-2:]
    # In ceil mode windows reach beyond the symmetric padding: fill up what they ask for.
    below, right = (
        max(0, (count - 1) * step + spread * (taps - 1) + 1 - size - pad)
        for count, step, spread, taps, size, pad in zip(
            (height, width), stride, dilation, kernel, shape[1:], padding, strict=True
        )
    )
    edges = (padding[1], right, padding[0], below)
    padded = F.pad(positions, edges, value=-1.0).transpose(0, 1)
    taps = F.unfold(padded, kernel, dilation, 0, stride)  # [channels, window, places]
    across = (padded.shape[-1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    grid = taps.unflatten(2, (-1, across))[:, :, :height, :width]
    return grid.transpose(0, 1).long()
