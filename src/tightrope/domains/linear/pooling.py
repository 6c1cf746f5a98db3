"""What the windows of a max pool hold beside their best input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.windows import sides


def largest_others(op: ops.MaxPool, upper: Tensor, index: Tensor) -> Tensor:
    """Return the largest upper bound in each window, apart from the input at `index`."""
    height, width = upper.shape[2:]
    places = torch.arange(height * width, dtype=upper.dtype, device=upper.device)
    # Windows begin inside: room for the rest of one at the far edges lets them stick out.
    down, across = sides(op, upper.shape)
    padding = (across.before, across.span - 1, down.before, down.span - 1)
    values = F.pad(upper, padding, value=-torch.inf)
    numbers = F.pad(places.view(1, 1, height, width), padding, value=-1.0)
    best = torch.full_like(index, 0, dtype=upper.dtype).fill_(-torch.inf)
    rows, columns = index.shape[2:]
    for di in range(down.kernel):
        for dj in range(across.kernel):
            cut = (..., down.tap(di, rows), across.tap(dj, columns))
            other = numbers[cut].expand_as(index) != index
            best = torch.where(other, torch.maximum(best, values[cut]), best)
    return best
