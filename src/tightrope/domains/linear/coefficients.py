"""Coefficients of linear functions of a node, one function per row.

Rows of a fully connected layer touch every neuron before it: `Coefficients` holds them as they
are. Rows of a convolution touch a small window of the map: `Windows` holds just that window and
where it lies, which is what lets bounds of large convolutional networks fit into memory.

Each row belongs to one element of the batch that bounds are held for: `owner` says which
(None: rows and batch go one to one, or the batch has one element).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.box import flat
from tightrope.devices import launches
from tightrope.graph import ops
from tightrope.graph.windows import sides

# Bytes of rows that go through a convolution at a time: what comes of them is cached.
PART = 1 << 20


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

    def take_all(self, fields: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return several quantities of one shape as each row sees them."""
        return [self.take(field) for field in fields]

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

    def reach(self, field: Tensor) -> Tensor:
        """Return at least the sum of absolute coefficients times a nonnegative field, per row.

        The largest value of a field that is a map does for all of it: what rounding errors are
        measured by need not be known any better.
        """
        if self.values.dim() != 4:
            return self.like(self.values.abs()).dot(field)
        most = flat(field).amax(1)
        return self._total * (most if self.owner is None or len(most) == 1 else most[self.owner])

    @cached_property
    def _total(self) -> Tensor:
        """The sum of absolute coefficients, per row."""
        return torch.linalg.vector_norm(self.values, 1, (1, 2, 3))

    def plus(self, other: Coefficients) -> Coefficients:
        """Add the coefficients that reach the same node on another path."""
        return Coefficients(self.values + other.dense().values, self.owner)

    def through(self, op: ops.Conv2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a convolution of inputs of that shape."""
        values = self.values
        counts = zip(sides(op, shape), values.shape[2:], strict=True)
        extra = tuple(side.left_over(count) for side, count in counts)
        options = (op.stride, op.padding, extra, op.groups, op.dilation)
        if values.dtype != torch.float64 or values.device.type != "cpu":
            return self.like(F.conv_transpose2d(values, op.weight, None, *options))
        # What torch does for float64 is several times as fast on few rows.
        size = max(1, PART // (values[0].numel() * values.element_size()))
        parts = [F.conv_transpose2d(p, op.weight, None, *options) for p in values.split(size)]
        return self.like(parts[0] if len(parts) == 1 else torch.cat(parts))

    def through_transposed(self, op: ops.ConvTranspose2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a transposed convolution of inputs of that shape."""
        options = (op.stride, op.padding, op.dilation, op.groups)
        return self.like(F.conv2d(self.values, op.weight, None, *options))


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

        Outside of the map, where coefficients are zero, it is what is asked for; a number for each
        channel is that everywhere.
        """
        if len(field) == 1 and field.shape[2:] == (1, 1):
            return field
        height, width = self.values.shape[2:]
        # Windows that stick out lie within a frame; a window is then a view of the framed field.
        low, high = (int(t) for t in self.origin.aminmax())
        before = max(0, -low)
        after = max(0, high + max(height, width) - min(self.size))
        frame = (before, after, before, after)
        framed = F.pad(field.expand(-1, -1, *self.size), frame, value=outside)
        framed = framed.permute(0, 2, 3, 1).contiguous()
        views = framed.unfold(1, height, 1).unfold(2, width, 1).permute(0, 1, 2, 4, 5, 3)
        row, column = (self.origin + before).unbind(1)
        owner = 0 if len(field) == 1 else self._owners()
        return views[owner, row, column].permute(0, 3, 1, 2)

    def take_all(self, fields: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return several quantities of one shape as each row sees them, read at once."""
        return self.take(torch.cat(list(fields), 1)).chunk(len(fields), 1)

    def dot(self, field: Tensor) -> Tensor:
        """Return the sum over the window of coefficients times a field, one per row."""
        if len(field) == 1 and field.shape[2:] == (1, 1):
            return self.values.sum((2, 3)) @ field.flatten()
        field = field.expand(len(field), self.values.shape[1], *self.size)
        rows, seen = (t.permute(0, 2, 3, 1).flatten(1) for t in (self.values, self.take(field)))
        return torch.einsum("ni,ni->n", rows, seen)

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
        """Add windows: in each row those that contain both, dense ones if they cover the map."""
        if not isinstance(other, Windows):
            return other.plus(self)
        start = torch.minimum(self.origin, other.origin)
        ends = [w.origin + w.origin.new_tensor(w.values.shape[2:]) for w in (self, other)]
        height, width = (torch.maximum(*ends) - start).amax(0).tolist()
        if height >= self.size[0] and width >= self.size[1]:
            return self.dense().plus(other)
        total = _placed(self.values, self.origin - start, (height, width))
        total += _placed(other.values, other.origin - start, (height, width))
        return replace(self, values=total, origin=start)

    def through(self, op: ops.Conv2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a convolution: a wider window, or dense ones."""
        wider = _widened(self.values, op)
        stride = torch.tensor(op.stride, device=self.origin.device)
        padding = torch.tensor(op.padding, device=self.origin.device)
        size = (shape[1], shape[2])
        moved = Windows(wider, self.owner, self.origin * stride - padding, size)
        moved = moved.cleared(in_place=True)
        if wider.shape[2] >= size[0] and wider.shape[3] >= size[1]:
            return moved.dense()
        return moved

    def through_transposed(self, op: ops.ConvTranspose2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a transposed convolution: windows of all that it meets.

        Input i of a side brings something to the outputs from `i stride - padding` on. So a
        window begins at another place of the first input's outputs in each row.
        """
        stride, padding = (self.origin.new_tensor(t) for t in (op.stride, op.padding))
        taps = self.origin.new_tensor(op.weight.shape[2:])
        reach = self.origin.new_tensor(op.dilation) * (taps - 1)
        if (stride > reach + 1).any():  # outputs that no input brings anything to
            return self.dense().through_transposed(op, shape)
        first = -((reach - self.origin - padding) // stride)
        count = (reach + self.origin.new_tensor(self.values.shape[2:]) - 1) // stride
        extent = (count * stride + reach + 1).tolist()
        offset = self.origin + padding - first * stride
        placed = _placed(self.values, offset, (extent[0], extent[1]))
        values = F.conv2d(placed, op.weight, None, op.stride, 0, op.dilation, op.groups)
        spread = Windows(values, self.owner, first, (shape[1], shape[2]))
        return spread.cleared(in_place=True)

    def moved(self, by: tuple[int, int], size: tuple[int, int]) -> Windows:
        """Return the windows in a map of another size, whose places have other numbers."""
        return replace(self, origin=self.origin + self.origin.new_tensor(by), size=size).cleared()

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

    def cleared(self, *, in_place: bool = False) -> Windows:
        """Return the same with nothing outside of the map; in place, if nobody else has it."""
        last = self.origin.new_tensor(self.size) - self.origin.new_tensor(self.values.shape[2:])
        if ((self.origin >= 0) & (self.origin <= last)).all():
            return self
        row, column = self._places()
        rows, columns = (row >= 0) & (row < self.size[0]), (column >= 0) & (column < self.size[1])
        mask = (rows & columns).to(self.values.dtype)
        return replace(self, values=self.values.mul_(mask) if in_place else self.values * mask)


def _widened(values: Tensor, op: ops.Conv2d) -> Tensor:
    """Return windows before a convolution without padding.

    Products of matrices and a sum over the taps: torch has no fast way for float64 and small maps,
    nor for maps of one place or one channel.
    """
    slow = values.dtype == torch.float64 or values.shape[2:].numel() == 1 or op.weight.shape[1] == 1
    if op.groups > 1 or launches(values) or not slow:
        # What windows see of a map has its channels last, too.
        weight = op.weight.contiguous(memory_format=torch.channels_last)
        return F.conv_transpose2d(values, weight, None, op.stride, 0, 0, op.groups, op.dilation)
    count, channels, *sizes = values.shape
    kernel, (down, across) = op.weight.shape[2:], op.dilation
    ends = [(size - 1) * step + 1 for size, step in zip(sizes, op.stride, strict=True)]
    rows = values.permute(0, 2, 3, 1).reshape(-1, channels)
    weight = op.weight.permute(2, 0, 3, 1).flatten(2)
    height, width = ends[0] + down * (kernel[0] - 1), ends[1] + across * (kernel[1] - 1)
    total = values.new_zeros(count, height, width, op.weight.shape[1])
    area = sizes[0] * sizes[1]
    cached = PART * torch.get_num_threads() // (area * weight.shape[2] * weight.element_size())
    many = max(1, cached)
    for start in range(0, count, many):
        some, sums = rows[start * area : (start + many) * area], total[start : start + many]
        for i in range(kernel[0]):
            parts = (some @ weight[i]).view(len(sums), *sizes, kernel[1], -1)
            for j in range(kernel[1]):
                met = sums[:, i * down :, j * across :]
                met[:, : ends[0] : op.stride[0], : ends[1] : op.stride[1]] += parts[:, :, :, j]
    return total.permute(0, 3, 1, 2)


def _placed(values: Tensor, offset: Tensor, size: tuple[int, int]) -> Tensor:
    """Return windows as parts of larger ones, each row's at its own offset."""
    count, channels, height, width = values.shape
    whole = values.new_zeros(count, *size, channels).permute(0, 3, 1, 2)
    if bool((offset == offset[:1]).all()):
        down, right = offset[0].tolist()
        whole[:, :, down : down + height, right : right + width] = values
        return whole
    for place in offset.unique(dim=0):
        down, right = place.tolist()
        mine = (offset == place).all(1)
        part = whole[:, :, down : down + height, right : right + width]
        part[mine] = values[mine]
    return whole


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
