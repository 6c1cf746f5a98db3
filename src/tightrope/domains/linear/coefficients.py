"""Coefficients of linear functions of a node, one function per row.

Rows of a fully connected layer touch every neuron before it: `Coefficients` holds them as they
are. Rows of a convolution touch a small window of the map: `Windows` holds just that window and
where it lies, which is what lets bounds of large convolutional networks fit into memory.

Each row belongs to one element of the batch that bounds are held for: `owner` says which
(None: rows and batch go one to one, or the batch has one element).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.box import flat
from tightrope.graph import ops
from tightrope.graph.windows import sides


@dataclass(frozen=True)
class Coefficients:
    """Dense coefficients, [rows, *shape]."""

    values: Tensor
    owner: Tensor | None

    def like(self, values: Tensor) -> Coefficients:
        """Return other coefficients of the same rows and place."""
        return replace(self, values=values)

    def split(self, size: int) -> list[Coefficients]:
        """Return the rows in parts of so many (dense ones)."""
        if len(self.values) <= size or type(self) is not Coefficients:
            return [self]
        values = self.values.split(size)
        # Without owners, rows and batch go one to one, or the batch has one element.
        numbers = torch.arange(len(self.values), device=self.values.device)
        owners = (numbers if self.owner is None else self.owner).split(size)
        return [Coefficients(v, o) for v, o in zip(values, owners, strict=True)]

    def take(self, field: Tensor, *, outside: float = 0.0) -> Tensor:
        """Return a quantity held per batch element, [batch, *shape], as each row sees it."""
        return field if self.owner is None or len(field) == 1 else field[self.owner]

    def dense(self) -> Coefficients:
        """Return the same as dense coefficients."""
        return self

    def dot(self, field: Tensor) -> Tensor:
        """Return the sum over the neurons of coefficients times a field, one per row."""
        seen = self.take(field)
        rows = flat(self.values)
        if len(seen) == 1:
            return rows @ seen.expand(1, *self.values.shape[1:]).reshape(-1)
        return torch.einsum("ni,ni->n", rows, flat(seen.expand_as(self.values)))

    def plus(self, other: Coefficients) -> Coefficients:
        """Add the coefficients that reach the same node on another path."""
        return Coefficients(self.values + other.dense().values, self.owner)

    def through(self, op: ops.Conv2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a convolution of inputs of that shape."""
        values = self.values
        counts = zip(sides(op, shape), values.shape[2:], strict=True)
        extra = tuple(side.left_over(count) for side, count in counts)
        return self.like(
            F.conv_transpose2d(
                values, op.weight, None, op.stride, op.padding, extra, op.groups, op.dilation
            )
        )


@dataclass(frozen=True)
class Windows(Coefficients):
    """Coefficients in a window of a map, [rows, channels, height, width].

    `origin` is the place of each row's window, [rows, 2]; it may stick out of the map, whose
    size is `size`: what lies outside is padding and has coefficient zero.
    """

    origin: Tensor
    size: tuple[int, int]

    def take(self, field: Tensor, *, outside: float = 0.0) -> Tensor:
        """Return a quantity held per batch element as each row's window sees it.

        Outside of the map, where coefficients are zero, it is what is asked for.
        """
        height, width = self.values.shape[2:]
        # Windows that stick out lie within a frame; a window is then a view of the framed field.
        low, high = (int(t) for t in self.origin.aminmax())
        before = max(0, -low)
        after = max(0, high + max(height, width) - min(self.size))
        frame = (before, after, before, after)
        framed = F.pad(field.expand(-1, -1, *self.size), frame, value=outside)
        views = framed.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
        row, column = (self.origin + before).unbind(1)
        if len(field) == 1:
            return views[0, row, column]
        return views[self._owners(), row, column]

    def dot(self, field: Tensor) -> Tensor:
        """Return the sum over the window of coefficients times a field, one per row."""
        field = field.expand(len(field), self.values.shape[1], *self.size)
        return torch.einsum("ni,ni->n", flat(self.values), flat(self.take(field)))

    def dense(self) -> Coefficients:
        """Return the same as dense coefficients."""
        count, channels = self.values.shape[:2]
        row, column = self._places()
        whole = self.values.new_zeros(count, channels, *self.size)
        numbers = torch.arange(count, device=whole.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=whole.device).view(1, -1, 1, 1)
        place = (row.clamp(0, self.size[0] - 1), column.clamp(0, self.size[1] - 1))
        # Outside the map coefficients are zero, so adding them at its edge changes nothing.
        whole.index_put_((numbers, channel, *place), self.values, accumulate=True)
        return Coefficients(whole, self.owner)

    def plus(self, other: Coefficients) -> Coefficients:
        """Add windows that lie alike in every row; anything else becomes dense."""
        if not isinstance(other, Windows):
            return other.plus(self)
        offset = other.origin - self.origin
        if not (offset == offset[:1]).all():
            return self.dense().plus(other)
        down, right = (int(t) for t in offset[0])
        top, left = min(down, 0), min(right, 0)
        sizes = [w.values.shape[2:] for w in (self, other)]
        bottom = max(sizes[0][0], down + sizes[1][0])
        edge = max(sizes[0][1], right + sizes[1][1])
        total = self.values.new_zeros(*self.values.shape[:2], bottom - top, edge - left)
        total[:, :, -top : sizes[0][0] - top, -left : sizes[0][1] - left] += self.values
        total[:, :, down - top :, right - left :][:, :, : sizes[1][0], : sizes[1][1]] += (
            other.values
        )
        start = self.origin + torch.tensor([top, left], device=self.origin.device)
        return replace(self, values=total, origin=start)

    def through(self, op: ops.Conv2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a convolution: a wider window, or dense ones."""
        wider = F.conv_transpose2d(
            self.values, op.weight, None, op.stride, 0, 0, op.groups, op.dilation
        )
        stride = torch.tensor(op.stride, device=self.origin.device)
        padding = torch.tensor(op.padding, device=self.origin.device)
        size = (shape[1], shape[2])
        moved = Windows(wider, self.owner, self.origin * stride - padding, size)._without_padding()
        if wider.shape[2] >= size[0] and wider.shape[3] >= size[1]:
            return moved.dense()
        return moved

    def _owners(self) -> Tensor:
        if self.owner is None:
            return torch.arange(len(self.values), device=self.values.device)
        return self.owner

    def _places(self) -> tuple[Tensor, Tensor]:
        height, width = self.values.shape[2:]
        device = self.values.device
        row = self.origin[:, 0].view(-1, 1, 1, 1) + torch.arange(height, device=device).view(-1, 1)
        column = self.origin[:, 1].view(-1, 1, 1, 1) + torch.arange(width, device=device)
        return row, column

    def _without_padding(self) -> Windows:
        row, column = self._places()
        inside = (row >= 0) & (row < self.size[0]) & (column >= 0) & (column < self.size[1])
        return replace(self, values=self.values * inside)


def unit_rows(
    shape: tuple[int, ...], positions: Tensor, owner: Tensor | None, like: Tensor, *, windows: bool
) -> Coefficients:
    """Return the rows that pick single neurons of a node, by their flat positions."""
    count = len(positions)
    numbers = torch.arange(count, device=like.device)
    if windows and len(shape) == 3:
        area = shape[1] * shape[2]
        values = like.new_zeros(count, shape[0], 1, 1)
        values[numbers, positions // area] = 1.0
        place = positions % area
        origin = torch.stack((place // shape[2], place % shape[2]), 1)
        return Windows(values, owner, origin, (shape[1], shape[2]))
    values = like.new_zeros(count, int(torch.Size(shape).numel()))
    values[numbers, positions] = 1.0
    return Coefficients(values.view(count, *shape), owner)
