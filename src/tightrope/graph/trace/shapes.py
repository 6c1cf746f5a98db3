"""Converters of everything that only rearranges: reshapes, slices, padding, concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightrope.graph import ops
from tightrope.graph.trace.moves import moved
from tightrope.graph.values import Composed, Layered, Value, apply, refuse

MOST_LAYERS = 16  # values before the batch


def _flatten(x: Value, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(x.shape) + 1
    start, end = start_dim % dims, end_dim % dims
    if start == end == 0:
        return x
    refuse(start == 0, "flattening the batch dimension")
    middle = math.prod(x.shape[start - 1 : end])
    return apply(x, ops.Reshape((*x.shape[: start - 1], middle, *x.shape[end:])))


def _reshape(x: Value, shape: Sequence[int]) -> Any:
    """`view` and `reshape`; the batch must stay the first dimension.

    Which size is the batch's is not known here: that a sample keeps its number of elements, and
    that the result has the batch first, is checked with the shape that PyTorch recorded.
    """
    refuse(not shape, "a reshape that mixes the samples of a batch")
    sizes = list(shape[1:])
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = math.prod(x.shape) // max(known, 1)
    mixed = math.prod(sizes) != math.prod(x.shape)
    refuse(mixed, f"reshape of {x.shape} to {tuple(sizes)} mixes the samples of a batch")
    return apply(x, ops.Reshape(tuple(sizes)))


def _permute(x: Value, dims: Sequence[int]) -> Any:
    order = tuple(d % len(dims) for d in dims)
    if order[0] != 0:
        return _layered(x, order)
    return apply(x, ops.Permute(order))


def _layered(x: Value, order: tuple[int, ...]) -> Composed:
    """Values along a dimension that comes before the batch: the queries, keys and values, say."""
    first, rest = order[0], order[2:]
    count = x.shape[first - 1]
    refuse(order[1] != 0 or count > MOST_LAYERS, "moving the batch dimension")
    before = [slice(None)] * (first - 1)
    turned = (0, *(d - (d > first) for d in rest))

    def build(make: Any) -> Any:
        found = []
        for k in range(count):
            part = make.append(ops.Slice((*before, k)), x.position)
            if turned != tuple(range(len(turned))):
                part = make.append(ops.Permute(turned), part)
            found.append(Value(part, make.shape_of(part)))
        return Layered(tuple(found))

    return Composed(build)


def _transpose(x: Value, a: int, b: int) -> Any:
    order = list(range(len(x.shape) + 1))
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _pad(x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant":
        return moved(torch.ops.aten.pad)(x, pad, mode)
    refuse(len(pad) > 2 * len(x.shape), "padding the batch dimension")
    return apply(x, ops.Pad(tuple(int(p) for p in pad), float(value or 0.0)))


def _constant_pad(x: Value, pad: Sequence[int], value: float = 0.0) -> Any:
    return _pad(x, pad, value=value)


def _slice(
    x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    dim %= len(x.shape) + 1
    if dim == 0 and not start and (end is None or end == _ENDLESS) and step == 1:
        return x
    return _indexed(x, dim, slice(start, end, step))


_ENDLESS = 2**63 - 1


def _select(x: Value, dim: int, index: int) -> Any:
    return _indexed(x, dim % (len(x.shape) + 1), index)


def _indexed(x: Value, dim: int, index: slice | int) -> Any:
    refuse(dim == 0, "indexing the batch dimension")
    return apply(x, ops.Slice((*[slice(None)] * (dim - 1), index)))


def _unflatten(x: Value, dim: int, sizes: Sequence[int]) -> Any:
    dim %= len(x.shape) + 1
    refuse(dim == 0, "unflattening the batch dimension")
    return _reshape(x, (-1, *x.shape[: dim - 1], *sizes, *x.shape[dim:]))


def _unsqueeze(x: Value, dim: int) -> Any:
    dim %= len(x.shape) + 2
    refuse(dim == 0, "a dimension before the batch")
    return apply(x, ops.Reshape((*x.shape[: dim - 1], 1, *x.shape[dim - 1 :])))


def _squeeze(x: Value, dims: int | Sequence[int] | None = None) -> Any:
    """Drop dimensions of size one; the batch, of another size when recorded, stays."""
    rank = len(x.shape) + 1
    given = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    dropped = {d % rank for d in given}
    kept = tuple(s for d, s in enumerate(x.shape, start=1) if s != 1 or d not in dropped)
    return x if kept == x.shape else apply(x, ops.Reshape(kept))


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.flatten: _flatten,
    aten.view: _reshape,
    aten.reshape: _reshape,
    aten._unsafe_view: _reshape,
    aten.unflatten: _unflatten,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.mT: lambda x: _transpose(x, len(x.shape) - 1, len(x.shape)),
    aten.pad: _pad,
    aten.constant_pad_nd: _constant_pad,
    aten.slice: _slice,
    aten.select: _select,
}
