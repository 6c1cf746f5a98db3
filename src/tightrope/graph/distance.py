"""Distance neurons: how far a point is from a row of weights, by the largest differences.

With `a_j = |x_j - w_j|`, largest first, a neuron is `sum_i s_i a_(i)` over the first few: with one
share of 1 the l-infinity distance, with several the sort neuron of SortNet.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.compiling import in_time
from tightrope.graph import ops
from tightrope.graph.rounding import Rounded, growth, outwards

COMPILED = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMBERS = 1 << 24  # differences that are held at a time where nothing is compiled


def neurons(above: Tensor, below: Tensor, weight: Tensor, shares: Tensor) -> Tensor:
    """Return `sum_i s_i a_(i)` of `a_j = max(above_j - w_j, w_j - below_j, 0)`: [batch, rows].

    With `above = below = x` that is the value at x; with the corners of a box `upper, lower` the
    largest value in it, and with `lower, upper` the smallest one.
    """
    found: Tensor = _Neurons.apply(above, below, weight, shares)
    return found


def value(op: ops.Distance, x: Tensor) -> Tensor:
    """Return the values of distance neurons."""
    return neurons(x, x, op.weight, op.shares)


def rounded(rule: Any, op: ops.Distance, x: Rounded) -> Rounded:
    """A difference and a sum of few products; what changes by no more than d changes it as much."""
    found = rule(op, x.value)
    total = op.shares.abs().sum()
    relative = growth(len(op.shares) + 4, found.dtype)
    error = relative * found.abs() + x.error.amax(1, keepdim=True) * total * (1 + relative)
    return outwards(found, error, absolute=len(op.shares) + 1)


class _Neurons(torch.autograd.Function):
    """The largest terms are kept with their places; all others have no gradient."""

    @staticmethod
    def forward(ctx: Any, above: Tensor, below: Tensor, weight: Tensor, shares: Tensor) -> Tensor:
        terms, places = farthest(above, below, weight, min(len(shares), weight.shape[1]))
        ctx.save_for_backward(above, below, weight, shares, places)
        return torch.einsum("bot,t->bo", terms, shares[: terms.shape[2]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        above, below, weight, shares, places = ctx.saved_tensors
        return *slopes(above, below, weight, places, grads[0], shares), None


def slopes(
    above: Tensor, below: Tensor, weight: Tensor, places: Tensor, grad: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to `above`, `below` and the weights."""
    flat = places.flatten(1)
    rows = torch.arange(len(weight), device=weight.device).view(-1, 1) * weight.shape[1]
    at = (places + rows).flatten()
    near = weight.reshape(-1)[at].view_as(flat)
    up, down = above.gather(1, flat) - near, near - below.gather(1, flat)
    slope = (grad.unsqueeze(2) * shares[: places.shape[2]]).flatten(1)
    upward = slope * ((up >= down) & (up > 0))
    downward = slope * ((up < down) & (down > 0))
    to_weight = torch.zeros_like(weight).view(-1).index_add(0, at, (downward - upward).flatten())
    return (
        torch.zeros_like(above).scatter_add(1, flat, upward),
        torch.zeros_like(below).scatter_add(1, flat, -downward),
        to_weight.view_as(weight),
    )


def farthest(above: Tensor, below: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest terms of each sample and row, largest first, and their places."""
    above, below, weight = (t.detach() for t in (above, below, weight))
    if _can_compile(above, below, weight):
        return _compiled(above, below, weight, count)
    rows = max(1, NUMBERS // max(1, len(above) * weight.shape[1]))
    found = []
    for part in weight.split(rows):
        gaps = torch.maximum(above.unsqueeze(1) - part, part - below.unsqueeze(1)).clamp(min=0)
        found.append(gaps.topk(count, dim=2))
    terms, places = zip(*found, strict=True)
    return torch.cat(terms, 1), torch.cat(places, 1)


def _can_compile(*tensors: Tensor) -> bool:
    """Return whether the compiled loops know these tensors; they know finite numbers only."""
    kinds = {(t.device.type, t.dtype) for t in tensors}
    if len(kinds) > 1 or not kinds <= {("cpu", dtype) for dtype in COMPILED} or not len(tensors[0]):
        return False
    from tightrope.graph.distance_kernel import largest

    return in_time(largest) and all(bool(t.isfinite().all()) for t in tensors)


def _compiled(above: Tensor, below: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    from tightrope.graph.distance_kernel import BLOCK, largest

    fill = (0, -weight.shape[1] % BLOCK)
    rows = F.pad(weight, fill).contiguous()
    high = F.pad(above, fill).contiguous()
    low = high if below is above else F.pad(below, fill).contiguous()
    terms = weight.new_empty(len(above), len(weight), count)
    places = torch.empty(terms.shape, dtype=torch.int64)
    gaps = weight.new_empty(rows.shape[1])
    room = (gaps.numpy(), gaps.view(COMPILED[gaps.dtype]).numpy())
    largest(high.numpy(), low.numpy(), rows.numpy(), room, (terms.numpy(), places.numpy()))
    # What fills the rows is zero and comes last: there are numbers enough before it.
    return terms, places


# --- as an operator of PyTorch, by which modules are recorded ------------------------------------

_SCHEMA = "(Tensor x, Tensor weight, Tensor shares) -> (Tensor, Tensor)"


@torch.library.custom_op("tightrope::distance", mutates_args=(), schema=_SCHEMA)
def distance(x: Tensor, weight: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances of points to rows of weights, and the places of the largest terms."""
    terms, places = farthest(x, x, weight, min(len(shares), weight.shape[1]))
    return torch.einsum("bot,t->bo", terms, shares[: terms.shape[2]]), places


@distance.register_fake
def _(x: Tensor, weight: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    count = min(len(shares), weight.shape[1])
    found = x.new_empty(x.shape[0], weight.shape[0], count)
    return found[:, :, 0].clone(), found.to(torch.int64)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, shares, places = ctx.saved_tensors
    above, below, to_weight = slopes(x, x, weight, places, grad, shares)
    return above + below, to_weight, None


distance.register_autograd(_backward, setup_context=_keep)


DISTANCE = torch.ops.tightrope.distance
