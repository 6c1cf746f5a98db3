"""Where the windows of convolutions and pools lie: their geometry, written once.

Along one side of an image, a window has `kernel` taps that are `dilation` apart. Windows begin
`stride` apart, the first one `before` places ahead of the image: in its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tightrope.graph import ops


class Side(NamedTuple):
    """The windows along one side of an image."""

    size: int
    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """How many places a window reaches over."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def free(self) -> int:
        """How far a window can move; below zero if none fits."""
        return self.size + self.before + self.after - self.span

    @property
    def same(self) -> tuple[int, int]:
        """The padding that makes `ceil(size / stride)` windows, the smaller half first.

        It is below zero in total if there would be gaps between the windows.
        """
        total = (-(-self.size // self.stride) - 1) * self.stride + self.span - self.size
        return total // 2, total - total // 2

    def windows(self, ceil_mode: bool = False) -> int:
        """Return how many windows there are."""
        count = self.free // self.stride + 1
        if ceil_mode and self.free % self.stride and self.start(count) < self.size:
            count += 1  # it reaches over the edge, but does not begin beyond it
        return count

    def start(self, window: int) -> int:
        """Return the place where a window begins; those in the padding are below zero."""
        return window * self.stride - self.before

    def overhang(self, windows: int) -> int:
        """Return how far the last of so many windows reaches over the far edge."""
        return max(0, self.start(windows - 1) + self.span - self.size)

    def left_over(self, windows: int) -> int:
        """Return how many padded places are behind the last of so many windows."""
        return self.free - (windows - 1) * self.stride

    def tap(self, tap: int, windows: int) -> slice:
        """Return where, in the padded image, that tap of each of so many windows is."""
        first = tap * self.dilation
        return slice(first, first + (windows - 1) * self.stride + 1, self.stride)


def sharing(kernel: int, stride: int) -> int:
    """Return of how many windows without dilation a place can be a part."""
    return -(-kernel // stride)


def sides(op: ops.Conv2d | ops.AvgPool | ops.MaxPool, shape: Sequence[int]) -> tuple[Side, Side]:
    """Return the windows of an operation along height and width of inputs [..., H, W]."""
    kernel = op.weight.shape[2:] if isinstance(op, ops.Conv2d) else op.kernel
    dilation = (1, 1) if isinstance(op, ops.AvgPool) else op.dilation
    (top, left), (down, right) = op.padding, op.stride
    return (
        Side(shape[-2], kernel[0], down, top, top, dilation[0]),
        Side(shape[-1], kernel[1], right, left, left, dilation[1]),
    )


def places(rows: Side, columns: Side, counts: ops.Pair) -> Tensor:
    """Return the flat place of every tap of every window, [taps, *counts]; -1 is padding."""
    y, x = (
        torch.arange(side.kernel)[:, None] * side.dilation + side.start(0) + steps * side.stride
        for side, steps in zip((rows, columns), map(torch.arange, counts), strict=True)
    )
    y, x = y[:, None, :, None], x[None, :, None, :]
    inside = (y >= 0) & (y < rows.size) & (x >= 0) & (x < columns.size)
    return torch.where(inside, y * columns.size + x, -1).flatten(0, 1)


def pooled_places(op: ops.MaxPool, shape: tuple[int, ...]) -> Tensor:
    """Return the flat positions of the inputs of each output of a max pool, [taps, *output shape].

    Windows that reach over the edge hold -1 for what lies in the padding.
    """
    return _pooled(*sides(op, shape), op.ceil_mode, shape[0])


@lru_cache(maxsize=64)
def _pooled(rows: Side, columns: Side, ceil_mode: bool, channels: int) -> Tensor:
    found = places(rows, columns, (rows.windows(ceil_mode), columns.windows(ceil_mode)))
    found = found.unsqueeze(1)
    channel = torch.arange(channels).view(-1, 1, 1) * (rows.size * columns.size)
    return torch.where(found >= 0, channel + found, -1)
