"""Linear bounds of max pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.domains.linear.coefficients import Coefficients
from tightrope.graph import ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.windows import sides

if TYPE_CHECKING:
    from tightrope.domains.linear.rules import Pass


def max_pool(op: ops.MaxPool, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """Max pool: below by the input with the largest lower bound, above by the largest upper one.

    Where that input's lower bound is at least the others' upper bounds, it is the maximum.
    """
    a = a.dense()
    before = state.graph.nodes[i].inputs[0]
    lower, upper = state.boxes[before].corners
    peak = POINT_RULES[ops.MaxPool](op, upper)
    arguments = (op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode)
    best, index = F.max_pool2d(lower, *arguments, return_indices=True)
    others = _others(op, upper, index)
    wins = best >= others
    through = torch.where((a.values >= 0) | a.take(wins), a.values, 0.0)
    flat = a.values.new_zeros(len(a.values), *state.graph.nodes[before].shape).flatten(2)
    places = a.take(index).flatten(2).expand(len(a.values), -1, -1)
    flat.scatter_add_(2, places, through.flatten(2))
    state.add(a.like(a.values.clamp(max=0)), torch.where(wins, 0.0, peak))
    state.charge(a, i, op.kernel[0] * op.kernel[1])
    return (a.like(flat.view(len(a.values), *state.graph.nodes[before].shape)),)


def _others(op: ops.MaxPool, upper: Tensor, index: Tensor) -> Tensor:
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
