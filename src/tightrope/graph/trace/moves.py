"""Converters of what copies numbers to other places: indices, splits, repetitions, resizing.

PyTorch's own operator is run on the places of the numbers instead of the numbers: what comes out
says where each number of the result comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightrope.graph.composed import taken
from tightrope.graph.values import Composed, Value, refuse

# Larger integers are not all numbers of float32.
EXACT_IN_FLOAT32 = 1 << 24


def moved(operator: Any) -> Callable[..., Composed]:
    """Return the converter of an operator that copies numbers of its first argument."""

    def convert(x: Value, *args: Any, **kwargs: Any) -> Composed:
        refuse(not isinstance(x, Value), "it works on a constant")
        refuse(_depends((*args, *kwargs.values())), "an index that depends on the input")

        def build(make: Any) -> int | tuple[int | None, ...]:
            found = operator(_labels(make, x), *args, **kwargs)
            if isinstance(found, Tensor):
                return taken(make, x.position, _index(found, x))
            return tuple(taken(make, x.position, _index(part, x)) for part in found)

        return Composed(build)

    return convert


def _depends(arguments: Any) -> bool:
    if isinstance(arguments, tuple | list):
        return any(_depends(part) for part in arguments)
    return isinstance(arguments, Value)


def _labels(make: Any, x: Value) -> Tensor:
    """Return a batch of the places of numbers, counted through all its samples."""
    batch = len(make.probe)
    total = batch * math.prod(x.shape)
    narrow = make.probe.dtype == torch.float32 and total <= EXACT_IN_FLOAT32
    dtype = torch.float32 if narrow else torch.float64
    return torch.arange(total, dtype=dtype).view(batch, *x.shape)


def _index(found: Tensor, x: Value) -> Tensor:
    """Return where the numbers of one sample come from, if each comes from its own sample."""
    size = math.prod(x.shape)
    own = found[:1]
    step = torch.arange(len(found)).view(-1, *[1] * (found.dim() - 1)) * size
    apart = torch.equal(found, (own + step).to(found.dtype)) and bool((own < size).all())
    refuse(not apart, "it mixes the samples of a batch")
    return own[0].long()


def _expanded_as(x: Value, other: Value) -> Any:
    refuse(not (isinstance(x, Value) and isinstance(other, Value)), "a constant among them")
    return moved(torch.ops.aten.expand)(x, [-1, *other.shape])


aten = torch.ops.aten

_MOVES = (
    *(aten.index, aten.index_select, aten.gather, aten.take_along_dim, aten.narrow),
    *(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unbind),
    *(aten.expand, aten.broadcast_to, aten.repeat, aten.tile),
    *(aten.repeat_interleave, aten.roll, aten.flip, aten.rot90, aten.movedim, aten.swapaxes),
    *(aten.swapdims, aten.unfold, aten.diagonal, aten.as_strided, aten.pixel_shuffle),
    *(aten.pixel_unshuffle, aten.channel_shuffle, aten.upsample_nearest1d),
    *(aten.upsample_nearest2d, aten.upsample_nearest3d, aten._upsample_nearest_exact1d),
    *(aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),
    *(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d),
    *(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d),
    *(aten.unsafe_split, aten.unsafe_chunk),
)

CONVERTERS: dict[Any, Callable[..., Any]] = {
    **{operator: moved(operator) for operator in _MOVES},
    aten.expand_as: _expanded_as,
}
