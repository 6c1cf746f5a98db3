"""What layers are made of: operations of the graph put together, for both front ends.

Everything here is exact in real arithmetic. Piecewise linear functions are made of ReLUs, so that
bounds, branch and bound and mixed-integer programs know them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tightrope.graph import evaluate, ops
from tightrope.graph.values import Maker, is_live, refuse

Shape = tuple[int, ...]

# --- copies ---------------------------------------------------------------------------------


def places(shape: Shape) -> Tensor:
    """Return the flat place of each number of a sample."""
    return torch.arange(math.prod(shape)).view(shape)


def taken(make: Maker, x: int, index: Tensor) -> int:
    """Append what brings numbers to other places: `index` holds the place that each comes from."""
    shape = tuple(index.shape)
    refuse(not index.numel(), "a result without elements")
    before = make.shape_of(x)
    if index.numel() == math.prod(before) and torch.equal(index, places(shape)):
        return x if shape == before else make.append(ops.Reshape(shape), x)
    return make.append(ops.Take(index.contiguous()), x)


def expanded(make: Maker, x: int, shape: Shape) -> int:
    """Append the copies that give samples a shape that theirs broadcasts to."""
    before = make.shape_of(x)
    return x if before == shape else taken(make, x, places(before).expand(shape))


def replayed(operations: Sequence[ops.Op], x: Tensor) -> Tensor:
    """Return what operations make of numbers, one after the other."""
    for op in operations:
        x = evaluate.RULES[type(op)](op, x)
    return x


def zeros_like(make: Maker, x: int) -> int:
    """Append zeros of a node's shape."""
    return make.append(ops.Scale(make.number(0.0)), x)


# --- maxima and minima ----------------------------------------------------------------------


def negated(make: Maker, x: int) -> int:
    """Append `-x`."""
    return make.append(ops.Scale(make.number(-1.0)), x)


def maximum(make: Maker, a: int, b: int) -> int:
    """Append `max(a, b) = a + relu(b - a)` of two nodes of one shape."""
    rise = make.append(ops.Relu(), make.append(ops.Sub(), b, a))
    return make.append(ops.Add(), a, rise)


def minimum(make: Maker, a: int, b: int) -> int:
    """Append `min(a, b) = a - relu(a - b)` of two nodes of one shape."""
    fall = make.append(ops.Relu(), make.append(ops.Sub(), a, b))
    return make.append(ops.Sub(), a, fall)


def at_least(make: Maker, x: int, low: Tensor) -> int:
    """Append `max(x, low) = low + relu(x - low)` with a constant."""
    if not is_live(low) and not low.requires_grad and not bool(low.any()):
        return make.append(ops.Relu(), x)
    rise = make.append(ops.Relu(), make.append(ops.Shift(low, subtract=True), x))
    return make.append(ops.Shift(low), rise)


def at_most(make: Maker, x: int, high: Tensor) -> int:
    """Append `min(x, high) = high - relu(high - x)` with a constant."""
    gap = make.append(ops.Shift(high), negated(make, x))
    return make.append(ops.Shift(high), negated(make, make.append(ops.Relu(), gap)))


def opposite(make: Maker, x: int) -> int:
    """Append `1 - x`, which is "not" of what is 0 or 1."""
    return make.append(ops.Shift(make.number(1.0)), negated(make, x))


# --- other functions that bend --------------------------------------------------------------


def absolute(make: Maker, x: int) -> int:
    """Append `|x| = relu(x) + relu(-x)`."""
    return make.append(ops.Add(), *_halves(make, x))


def leaky(make: Maker, x: int, slope: Tensor) -> int:
    """Append `relu(x) - slope * relu(-x)`, whatever the slopes are."""
    above, below = _halves(make, x)
    return make.append(ops.Sub(), above, make.append(ops.Scale(slope), below))


def soft_shrunk(make: Maker, x: int, width: Tensor) -> int:
    """Append `relu(x - width) - relu(-x - width)`."""
    above = make.append(ops.Relu(), make.append(ops.Shift(width, subtract=True), x))
    below = make.append(ops.Shift(width, subtract=True), negated(make, x))
    return make.append(ops.Sub(), above, make.append(ops.Relu(), below))


def _halves(make: Maker, x: int) -> tuple[int, int]:
    return make.append(ops.Relu(), x), make.append(ops.Relu(), negated(make, x))


# --- transposed convolutions ----------------------------------------------------------------


def transposed(
    weight: Tensor,
    bias: Tensor | None,
    stride: ops.Pair,
    padding: ops.Pair,
    extra: ops.Pair,
    dilation: ops.Pair,
    groups: int,
) -> tuple[ops.Op, ...]:
    """Return a transposed convolution; whole strides of output padding are zeros of the input."""
    rows, columns = (e // s for e, s in zip(extra, stride, strict=True))
    rest = (extra[0] % stride[0], extra[1] % stride[1])
    conv = ops.ConvTranspose2d(weight, bias, stride, padding, rest, dilation, groups)
    return (ops.Pad((0, columns, 0, rows), 0.0), conv) if rows or columns else (conv,)


# --- reductions -----------------------------------------------------------------------------


def summed(make: Maker, x: int, axes: Sequence[int], *, mean: bool = False) -> int:
    """Append the sum, or the mean, over some axes of the samples, which are dropped."""
    x, kept, count = reduced_last(make, x, axes)
    if count > 1:
        x = make.append(ops.Linear(make.number(1.0).expand(1, count).contiguous(), None), x)
    if mean and count > 1:
        x = make.append(ops.Scale(make.number(float(count)), divide=True), x)
    return shaped(make, x, kept)


def largest(make: Maker, x: int, axes: Sequence[int]) -> int:
    """Append the largest number along some axes of the samples, which are dropped."""
    x, kept, count = reduced_last(make, x, axes)
    x = shaped(make, x, (1, math.prod(kept), count))
    window = (1, count)
    x = make.append(ops.MaxPool(window, window, (0, 0), (1, 1), False), x)
    return shaped(make, x, kept)


def smallest(make: Maker, x: int, axes: Sequence[int]) -> int:
    """Append the smallest number along some axes of the samples, which are dropped."""
    return negated(make, largest(make, negated(make, x), axes))


def along(make: Maker, x: int, axis: int, matrix: Tensor) -> int:
    """Append a matrix that is applied along one axis of the samples."""
    linear = ops.Linear(matrix, None)
    rank = len(make.shape_of(x))
    if axis == rank - 1:
        return make.append(linear, x)
    order = list(range(rank + 1))
    order[axis + 1], order[-1] = order[-1], order[axis + 1]
    turn = ops.Permute(tuple(order))
    return make.append(turn, make.append(linear, make.append(turn, x)))


def adaptive_mean(make: Maker, x: int, sizes: Sequence[int]) -> int:
    """Append the means of adaptive pooling, whose windows along an axis may differ in size.

    Of n places, window i of k holds those from `floor(i n / k)` to `ceil((i + 1) n / k)`. `sizes`
    are the numbers of windows along the last axes.
    """
    rank = len(make.shape_of(x))
    counts = torch.ones((), dtype=torch.int64)
    for axis, size in enumerate(sizes, start=rank - len(sizes)):
        before = make.shape_of(x)[axis]
        first, last = _adaptive_windows(before, size)
        counts = counts.unsqueeze(-1) * (last - first)
        if size != before:
            place = torch.arange(before)
            inside = (place >= first[:, None]) & (place < last[:, None])
            x = along(make, x, axis, make.number(1.0) * inside)
    if bool((counts == 1).all()):
        return x
    return make.append(ops.Scale(make.number(1.0) * counts, divide=True), x)


def adaptive_largest(make: Maker, x: int, sizes: Sequence[int]) -> int:
    """Append the largest numbers of adaptive pooling; shorter windows hold one of theirs twice."""
    rank = len(make.shape_of(x))
    for axis, size in enumerate(sizes, start=rank - len(sizes)):
        shape = make.shape_of(x)
        starts, ends = _adaptive_windows(shape[axis], size)
        span = torch.arange(int((ends - starts).max()))
        inside = torch.minimum(starts[:, None] + span, ends[:, None] - 1)
        copies = taken(make, x, places(shape).movedim(axis, -1)[..., inside])
        rest = tuple(s for i, s in enumerate(shape) if i != axis)
        x = shaped(make, largest(make, copies, [rank]), (*rest, size))
        if axis < rank - 1:
            order = list(range(1, rank))
            order.insert(axis, rank)
            x = make.append(ops.Permute((0, *order)), x)
    return x


def _adaptive_windows(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return where the windows of adaptive pooling start and end."""
    return torch.arange(size) * count // size, -(-torch.arange(1, size + 1) * count // size)


def unfolding(channels: int, kernel: ops.Pair) -> Tensor:
    """Return the weight of a convolution whose outputs are the numbers of its windows."""
    taps = kernel[0] * kernel[1]
    unit = torch.eye(taps, dtype=torch.float64)  # rounded to the module's precision when it is used
    return unit.view(taps, 1, *kernel).repeat(channels, 1, 1, 1)


def reduced_last(make: Maker, x: int, axes: Sequence[int]) -> tuple[int, Shape, int]:
    """Bring the axes to the end, as one; also return the other sizes and this one."""
    shape = make.shape_of(x)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    order = [*kept, *sorted(axes)]
    if order != sorted(order):
        x = make.append(ops.Permute((0, *(axis + 1 for axis in order))), x)
    rest = tuple(shape[axis] for axis in kept)
    count = math.prod(shape[axis] for axis in axes)
    refuse(not count, "a reduction of no numbers")
    rows = math.prod(rest)
    return shaped(make, x, (count,) if rows == 1 else (rows, count)), rest, count


def flat(make: Maker, x: int) -> int:
    """Append samples as rows of numbers."""
    return shaped(make, x, (math.prod(make.shape_of(x)),))


def shaped(make: Maker, x: int, shape: Shape) -> int:
    """Append samples in another shape."""
    return x if make.shape_of(x) == shape else make.append(ops.Reshape(shape), x)
