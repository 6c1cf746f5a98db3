"""Norms, variances, running sums and the like, along dimensions of the samples.

For both front ends; all is exact in real arithmetic, and dimensions that are reduced are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tightrope.graph import composed, layers, ops
from tightrope.graph.values import Maker, refuse

MOST_FACTORS = 256


def squares(make: Maker, x: int, axes: Sequence[int]) -> int:
    """Append the sum of squares."""
    return composed.summed(make, make.append(ops.Function("power", (2.0,)), x), axes)


def variance(make: Maker, x: int, axes: Sequence[int], correction: float = 0.0) -> int:
    """Append the sum of squared deviations from the mean over their number less a correction."""
    shape = make.shape_of(x)
    count = math.prod(shape[axis] for axis in axes)
    refuse(count - correction <= 0, f"a variance of {count} numbers, corrected by {correction}")
    mean = composed.summed(make, x, axes, mean=True)
    ones = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    wide = composed.expanded(make, composed.shaped(make, mean, ones), shape)
    total = squares(make, make.append(ops.Sub(), x, wide), axes)
    return make.append(ops.Scale(make.number(count - correction), divide=True), total)


def root(make: Maker, x: int) -> int:
    """Append the square root of what is never negative."""
    return make.append(ops.Function("sqrt", (), 0.0), x)


def deviation(make: Maker, x: int, axes: Sequence[int], correction: float = 0.0) -> int:
    """Append the standard deviation."""
    return root(make, variance(make, x, axes, correction))


def norm(make: Maker, x: int, axes: Sequence[int], order: float = 2.0) -> int:
    """Append `(sum |x|^p)^(1/p)`, for p = infinity the largest size."""
    if order == 2:
        return root(make, squares(make, x, axes))
    sizes = composed.absolute(make, x)
    if order == math.inf:
        return composed.largest(make, sizes, axes)
    # Of other orders the inverse is no exact number.
    refuse(order not in (1, 4, 8), f"a norm of order {order}")
    if order == 1:
        return composed.summed(make, sizes, axes)
    total = composed.summed(make, layers.power(make, sizes, order), axes)
    return make.append(ops.Function("power", (1 / order,), 0.0), total)


def log_sum_exp(make: Maker, x: int, axes: Sequence[int]) -> int:
    """Append `log(sum_j exp(x_j))`: the first number less the logarithm of its softmax."""
    rows, kept, count = composed.reduced_last(make, x, axes)
    if count == 1:
        return composed.shaped(make, rows, kept)
    first = ops.Slice((*[slice(None)] * (len(make.shape_of(rows)) - 1), slice(0, 1)))
    logarithm = make.append(first, make.append(ops.Softmax(logarithm=True), rows))
    return composed.shaped(make, make.append(ops.Sub(), make.append(first, rows), logarithm), kept)


def product(make: Maker, x: int, axes: Sequence[int]) -> int:
    """Append the product of all numbers, of halves by halves."""
    rows, kept, count = composed.reduced_last(make, x, axes)
    refuse(count > MOST_FACTORS, f"a product of {count} numbers")
    before = [slice(None)] * (len(make.shape_of(rows)) - 1)
    while count > 1:
        half = count // 2
        first, second, rest = (
            ops.Slice((*before, part))
            for part in (slice(0, half), slice(half, 2 * half), slice(2 * half, count))
        )
        found = make.append(ops.Mul(), make.append(first, rows), make.append(second, rows))
        if count % 2:
            odd = make.append(rest, rows)
            found = make.append(ops.Concat(len(before) + 1), found, odd)
        rows, count = found, half + count % 2
    return composed.shaped(make, rows, kept)


# --- running along an axis ------------------------------------------------------------------


def running_sum(
    make: Maker, x: int, axis: int, *, exclusive: bool = False, reverse: bool = False
) -> int:
    """Append the sums of all numbers up to each place."""
    size = make.shape_of(x)[axis]
    matrix = make.number(1.0).expand(size, size).tril(-1 if exclusive else 0)
    return composed.along(make, x, axis, matrix.T if reverse else matrix)


def running_product(make: Maker, x: int, axis: int) -> int:
    """Append the products of all numbers up to each place."""
    size = make.shape_of(x)[axis]
    refuse(size > MOST_FACTORS, f"a product of {size} numbers")
    before = [slice(None)] * axis
    parts = [make.append(ops.Slice((*before, slice(i, i + 1))), x) for i in range(size)]
    for i in range(1, size):
        parts[i] = make.append(ops.Mul(), parts[i - 1], parts[i])
    return parts[0] if size == 1 else make.append(ops.Concat(axis + 1), *parts)


def running_extremum(reduce: Callable[..., int]) -> Callable[[Maker, int, int], int]:
    """Return what appends the largest, or smallest, of all numbers up to each place."""

    def build(make: Maker, x: int, axis: int) -> int:
        shape = make.shape_of(x)
        size = shape[axis]
        upto = torch.minimum(torch.arange(size), torch.arange(size)[:, None])
        places = composed.places(shape).movedim(axis, -1)
        windows = composed.taken(make, x, places[..., upto])
        found = reduce(make, windows, [len(shape)])
        found = composed.shaped(make, found, (*(s for i, s in enumerate(shape) if i != axis), size))
        order = list(range(1, len(shape)))
        order.insert(axis, len(shape))
        return found if axis == len(shape) - 1 else make.append(ops.Permute((0, *order)), found)

    return build
