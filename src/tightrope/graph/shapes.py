"""Converters of everything that only rearranges: reshapes, slices, padding, concatenation."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from tightrope.graph import ops
from tightrope.graph.values import BATCH, Value, apply, refuse


def flatten(x: Value, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge dimensions."""
    dims = len(x.shape) + 1
    start, end = start_dim % dims, end_dim % dims
    refuse(start == 0, "flattening the batch dimension")
    middle = math.prod(x.shape[start - 1 : end])
    return apply(x, ops.Reshape((*x.shape[: start - 1], middle, *x.shape[end:])))


def reshape(x: Value, *shape: Any) -> Any:
    """`view` and `reshape`; the batch must stay the first dimension."""
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    batch, sizes = shape[0], list(shape[1:])
    refuse(batch is not BATCH and batch != -1, "a reshape with a fixed batch size")
    refuse(batch == -1 and -1 in sizes, "a reshape with two unknown sizes")
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = math.prod(x.shape) // known
    refuse(math.prod(sizes) != math.prod(x.shape), f"reshape of {x.shape} to {tuple(sizes)}")
    return apply(x, ops.Reshape(tuple(sizes)))


def permute(x: Value, *dims: Any) -> Any:
    """Reorder dimensions."""
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = tuple(dims[0])
    order = tuple(d % len(dims) for d in dims)
    refuse(order[0] != 0, "moving the batch dimension")
    return apply(x, ops.Permute(order))


def transpose(x: Value, a: int, b: int) -> Any:
    """Swap two dimensions."""
    order = list(range(len(x.shape) + 1))
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


def pad(x: Value, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Pad with a constant."""
    refuse(mode != "constant", f"mode={mode!r}")
    refuse(len(pad) > 2 * len(x.shape), "padding the batch dimension")
    return apply(x, ops.Pad(tuple(int(p) for p in pad), float(value or 0.0)))


def constant_pad(m: nn.ZeroPad2d | nn.ConstantPad2d, x: Value) -> Any:
    """`nn.ZeroPad2d` and `nn.ConstantPad2d`."""
    return pad(x, m.padding, value=m.value)


def getitem(x: Any, index: Any) -> Any:
    """Index with slices and integers; also an element of `x.shape`."""
    if isinstance(x, tuple):  # an element of x.shape
        return x[index]
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        missing = len(x.shape) + 1 - (len(index) - 1)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    refuse(index[0] != slice(None), "indexing the batch dimension")
    simple = all(isinstance(i, int | slice) for i in index[1:])
    refuse(not simple, "an index other than integers and slices")
    return apply(x, ops.Slice(tuple(index[1:])))


def concat(tensors: Any, dim: int = 0, *, axis: int | None = None) -> Any:
    """Join along a dimension."""
    dim = dim if axis is None else axis
    refuse(not all(isinstance(t, Value) for t in tensors), "concatenation with a constant")
    dim %= len(tensors[0].shape) + 1
    refuse(dim == 0, "concatenation along the batch")
    return apply(tuple(tensors), ops.Concat(dim))


def size(x: Value, dim: int | None = None) -> Any:
    """Return the shape, the batch size being a symbol."""
    shape = (BATCH, *x.shape)
    return shape if dim is None else shape[dim]


def get_attribute(x: Any, name: str) -> Any:
    """`x.shape`."""
    refuse(name != "shape", f"attribute {name!r}")
    return size(x)


def unflatten(x: Value, dim: int, sizes: tuple[int, ...]) -> Any:
    """Split a dimension."""
    dim %= len(x.shape) + 1
    refuse(dim == 0, "unflattening the batch dimension")
    return reshape(x, BATCH, *x.shape[: dim - 1], *sizes, *x.shape[dim:])
