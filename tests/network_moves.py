"""Moves of random networks that copy numbers or bend them: see `network_programs`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.graph import ops
from tightrope.nets.distance import Distance

if TYPE_CHECKING:
    from network_programs import Writer


def take(w: Writer) -> None:
    """Copy numbers of one sample to other places."""
    dim, size = w.integer(1, len(w.shape)), w.shape[-1]
    index = torch.randint(size, (w.integer(1, size + 2),), generator=w.generator)
    if torch.equal(index, torch.arange(size)):
        index = torch.zeros(size + 1, dtype=torch.int64)
    times = [1] * (len(w.shape) + 1)
    times[dim] = 2
    w.append(
        w.choose(
            lambda x: x[..., index],
            lambda x: x.index_select(-1, index),
            lambda x: torch.cat((x, x.flip(dim)), dim).roll(1, dim),
            lambda x: x.repeat(times),
            lambda x: x.unsqueeze(dim).expand(-1, *w_shape(x, dim)).flatten(1),
            lambda x: torch.stack(x.repeat_interleave(2, dim).chunk(2, dim), 1)[:, [1, 0]].flatten(
                1
            ),
            lambda x: F.interpolate(x.flatten(1).unsqueeze(1), scale_factor=2).flatten(1),
        )
    )


def w_shape(x: Tensor, dim: int) -> list[int]:
    """Return the sizes of samples with each number twice along a new dimension."""
    sizes = list(x.shape[1:])
    sizes.insert(dim - 1, 2)
    return sizes


def conv_transpose(w: Writer) -> None:
    """Append a transposed convolution that leaves something of its output."""
    channels = w.shape[0]
    kernel, stride = (w.integer(1, 3), w.integer(1, 3)), (w.integer(1, 2), w.integer(1, 2))
    dilation = (w.integer(1, 2), w.integer(1, 2))
    pads, extra = [], []
    for size, k, s, d in zip(w.shape[1:], kernel, stride, dilation, strict=True):
        full = (size - 1) * s + d * (k - 1) + 1
        pads.append(w.integer(0, min(1, (full - 1) // 2)))
        extra.append(w.integer(0, max(s, d) - 1))
    groups = w.choose(1, channels)
    outputs = groups * w.integer(1, 2)
    layer = nn.ConvTranspose2d(
        channels, outputs, kernel, stride, tuple(pads), tuple(extra), groups,
        w.choose(True, False), dilation,
    )  # fmt: skip
    w.fill(layer)
    w.append(layer)


class Slopes(nn.Module):
    """PReLU with slopes of any sign."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes)

    def forward(self, x: Tensor) -> Tensor:
        """Bend the input."""
        return F.prelu(x, self.slopes)


def bend(w: Writer) -> None:
    """Append a piecewise linear function that is made of ReLUs."""
    slopes = w.numbers(w.choose(1, w.shape[0]), magnitudes=(1.0, 0.1))
    w.append(
        w.choose(
            nn.ReLU6(),
            nn.Hardtanh(-0.5, w.choose(0.25, 3.0)),
            nn.Hardsigmoid(),
            nn.Softshrink(0.25),
            lambda x: x.clamp(min=-0.1),
            lambda x: x.clamp(max=0.3),
            torch.abs,
            Slopes(slopes),
            nn.LeakyReLU(-0.5),
        )
    )


def extremum(w: Writer) -> None:
    """Append the larger or smaller one of two values."""
    w.append(w.choose(torch.maximum, torch.minimum), *w.branch())


def reduction(w: Writer) -> None:
    """Append a sum, mean, maximum or minimum along some dimensions."""
    if math.prod(w.shape) == 1:
        return
    dims = [d for d in range(1, len(w.shape) + 1) if w.choose(True, False)] or [len(w.shape)]
    keep = len(dims) == len(w.shape) or w.choose(True, False)
    function = w.choose(torch.sum, torch.mean, torch.amax, torch.amin)
    w.append(lambda x: function(x, dim=dims, keepdim=keep))


def distance(w: Writer) -> None:
    """Append distances to rows of weights, by the largest term or several."""
    w.flatten()
    layer = Distance(w.shape[0], w.integer(1, 6), w.choose(1.0, 0.5)).double()
    layer.weight = nn.Parameter(w.numbers(*layer.weight.shape))
    w.append(layer)


def _distance_magnitude(op: ops.Distance, s: Tensor) -> Tensor:
    farthest = s.amax(1, keepdim=True) + op.weight.abs().amax(1)
    return farthest * op.shares.sum()


# --- jumps ------------------------------------------------------------------------------------


def step(w: Writer) -> None:
    """Append a function with jumps."""
    w.append(
        w.choose(
            torch.sign, torch.floor, torch.round, torch.ceil, torch.trunc,
            lambda x: (x > 0.1).to(x.dtype), lambda x: (x <= 0.1).to(x.dtype),
            lambda x: (x.round() == 1).to(x.dtype), lambda x: (~(x > 0)).to(x.dtype),
        )
    )  # fmt: skip


def choice(w: Writer) -> None:
    """Append a choice between two values, or a value and a number."""
    either = w.choose(
        lambda a, b: torch.where(a > b, a, 0.5), lambda a, b: torch.where(a > 0, a, b)
    )
    w.append(either, *w.branch())


def place(w: Writer) -> None:
    """Append the places of maxima, beside the values."""
    w.append(lambda x: x + x.argmax(-1, keepdim=True).to(x.dtype))


# Near a jump, a rounding error can have any effect.
ANY = 1e30
MAGNITUDES: dict[type[ops.Op], Callable[..., Tensor]] = {
    ops.Distance: _distance_magnitude,
    ops.Step: lambda op, s: torch.full_like(s, ANY),
    ops.Where: lambda op, c, a, b: torch.full_like(a, ANY),
    ops.ArgMax: lambda op, s: torch.full_like(s[..., 0], ANY),
}
