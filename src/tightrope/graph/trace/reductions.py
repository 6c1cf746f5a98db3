"""Converters of sums, means, maxima and minima along dimensions of the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightrope.graph import composed, ops, statistics
from tightrope.graph.trace import elementwise
from tightrope.graph.values import Composed, Value, refuse

Reduce = Callable[[Any, int, list[int]], int]


def _axes(x: Value, dims: Any) -> list[int]:
    """Return dimensions of a batch as those of the samples."""
    given = [dims] if isinstance(dims, int) else list(dims or [])
    refuse(not given, "a reduction of all samples to one number")
    axes = sorted({d % (len(x.shape) + 1) - 1 for d in given})
    refuse(axes[0] < 0, "a reduction of the batch")
    return axes


def _reduced(x: Value, dims: Any, keep: bool, reduce: Reduce) -> Composed:
    axes = _axes(x, dims)
    sizes = [1 if i in axes else size for i, size in enumerate(x.shape)]
    shape = tuple(size for i, size in enumerate(sizes) if keep or i not in axes)

    def build(make: Any) -> int:
        position = reduce(make, x.position, axes)
        if make.shape_of(position) == shape:
            return position
        return int(make.append(ops.Reshape(shape), position))

    return Composed(build)


def _mean(make: Any, x: int, axes: list[int]) -> int:
    """Append a mean: over height and width it is a pool."""
    shape = make.shape_of(x)
    if len(shape) != 3 or axes != [1, 2]:
        return composed.summed(make, x, axes, mean=True)
    pool = ops.AvgPool(shape[1:], shape[1:], (0, 0), False, True)
    return int(make.append(pool, x))


def _of(reduce: Reduce) -> Callable[..., Any]:
    """Return the converter of an operator with dimensions, whether they are kept, and a type.

    That the type stays the same is checked for every operator.
    """

    def convert(x: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        return _reduced(x, dim, keepdim, reduce)

    return convert


def _with_places(reduce: Reduce, of_two: Any) -> Callable[..., Any]:
    """`max` and `min`: of two tensors, or along a dimension, then with the places as well."""

    def convert(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Value | torch.Tensor):
            return of_two(x, dim)
        built = _reduced(x, dim, keepdim, reduce).build
        return Composed(lambda make: (built(make), None))  # type: ignore[arg-type,return-value]

    return convert


def _norm(x: Value, order: float = 2, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    return _reduced(
        x, dim, keepdim, lambda make, i, axes: statistics.norm(make, i, axes, float(order))
    )


def _spread(reduce: Callable[..., int], *, with_mean: bool = False) -> Callable[..., Any]:
    """Variances and deviations, of which the number of numbers may be corrected."""

    def convert(
        x: Value,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        less = float(unbiased) if correction is None else float(correction)
        found = _reduced(x, dim, keepdim, lambda make, i, axes: reduce(make, i, axes, less))
        if not with_mean:
            return found
        mean = _reduced(x, dim, keepdim, _mean)
        return Composed(lambda make: (found.build(make), mean.build(make)))  # type: ignore[arg-type,return-value]

    return convert


def _along(run: Callable[[Any, int, int], int], *, places: bool = False) -> Callable[..., Any]:
    """What runs along a dimension, perhaps with places as well."""

    def convert(x: Value, dim: int, **options: Any) -> Any:
        axis = dim % (len(x.shape) + 1) - 1
        refuse(axis < 0, "a sum over the batch")

        def build(make: Any) -> Any:
            found = run(make, x.position, axis)
            return (found, None) if places else found

        return Composed(build)

    return convert


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.mean: _of(_mean),
    aten.sum: _of(composed.summed),
    aten.amax: _of(composed.largest),
    aten.amin: _of(composed.smallest),
    aten.max: _with_places(composed.largest, elementwise.maximum),
    aten.min: _with_places(composed.smallest, elementwise.minimum),
    aten.prod: _of(statistics.product),
    aten.logsumexp: _of(statistics.log_sum_exp),
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten.var: _spread(statistics.variance),
    aten.std: _spread(statistics.deviation),
    aten.var_mean: _spread(statistics.variance, with_mean=True),
    aten.std_mean: _spread(statistics.deviation, with_mean=True),
    aten.cumsum: _along(statistics.running_sum),
    aten.cumprod: _along(statistics.running_product),
    aten.cummax: _along(statistics.running_extremum(composed.largest), places=True),
    aten.cummin: _along(statistics.running_extremum(composed.smallest), places=True),
}
