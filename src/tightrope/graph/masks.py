"""Constants beside values, choices between them that are known beforehand, and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tightrope.graph import composed, ops
from tightrope.graph.values import Maker, is_live, refuse, viewed

Shape = tuple[int, ...]

MOST_PATTERNS = 256  # of what a softmax leaves out, each a softmax of its own


def held(make: Maker, beside: int, constant: Tensor, axis: int = 0) -> int:
    """Append a node that holds a constant, as padding of one that has its shape but for an axis."""
    shape = make.shape_of(beside)
    size, count = shape[axis], constant.shape[axis]
    sides = (*[0, 0] * (len(shape) - 1 - axis), 0, count)
    cut = (*[slice(None)] * axis, slice(size, size + count))
    zeros = make.append(ops.Slice(cut), make.append(ops.Pad(sides, 0.0), beside))
    fits = make.shape_of(zeros) == tuple(constant.shape)
    refuse(not fits, f"a constant of shape {tuple(constant.shape)} beside {shape}")
    return zeros if _is_zero(constant) else make.append(ops.Shift(constant), zeros)


def _is_zero(constant: Tensor) -> bool:
    return not is_live(constant) and not constant.requires_grad and not bool(constant.any())


def constant_like(make: Maker, anchor: int, constant: Tensor) -> int:
    """Append a node that holds a constant of any shape, as padding of any other node."""
    row = composed.flat(make, anchor)
    found = held(make, row, viewed(constant, (), (constant.numel(),)))
    return composed.shaped(make, found, tuple(constant.shape))


def joined(make: Maker, parts: Sequence[int | Tensor], axis: int) -> int:
    """Append values and constants one after the other along an axis of the samples."""
    anchor = next(part for part in parts if isinstance(part, int))
    places = [held(make, anchor, p, axis) if isinstance(p, Tensor) else p for p in parts]
    return make.append(ops.Concat(axis + 1), *places)


def picked(make: Maker, parts: Sequence[int | Tensor], index: Tensor) -> int:
    """Append numbers of several values and constants, by their places in all of them."""
    anchor = next(part for part in parts if isinstance(part, int))
    rows = [viewed(p, (), (p.numel(),)) if isinstance(p, Tensor) else composed.flat(make, p)
            for p in parts]  # fmt: skip
    start = composed.flat(make, anchor)
    places = [held(make, start, row) if isinstance(row, Tensor) else row for row in rows]
    whole = places[0] if len(places) == 1 else make.append(ops.Concat(1), *places)
    return composed.taken(make, whole, index)


def kept(make: Maker, x: int, mask: Tensor, other: Tensor | None = None) -> int:
    """Append the numbers where a mask is set, and elsewhere zero or those of a constant."""
    chosen = make.number(1.0) * mask
    found = make.append(ops.Scale(chosen), x)
    if other is None or _is_zero(other):
        return found
    rest = torch.where(mask, torch.zeros((), dtype=other.dtype), other)
    return make.append(ops.Shift(rest), found)


def masked_softmax(make: Maker, x: int, hidden: Tensor, *, logarithm: bool = False) -> int:
    """Append a softmax over the last dimension without the hidden places, which become zero.

    Each row is a softmax of those that it has left.
    """
    refuse(logarithm, "minus infinity in a logarithm")
    shape = make.shape_of(x)
    rows, size = math.prod(shape[:-1]), shape[-1]
    seen = ~hidden.expand(shape).reshape(rows, size)
    patterns, owner = seen.unique(dim=0, return_inverse=True)
    refuse(bool((~patterns.any(1)).any()), "a softmax of nothing but minus infinity")
    refuse(len(patterns) > MOST_PATTERNS, f"masks of {len(patterns)} kinds")
    flat = composed.places((rows, size))
    parts, index = [], torch.full((rows, size), -1)
    first = 0
    for k, pattern in enumerate(patterns):
        mine = (owner == k).nonzero()[:, 0]
        chosen = flat[mine][:, pattern]
        parts.append(_softmax_of(make, x, chosen))
        index[mine[:, None], pattern.nonzero()[:, 0]] = first + composed.places(tuple(chosen.shape))
        first += chosen.numel()
    index = torch.where(index < 0, first, index)  # behind all of them lies a zero
    nothing = [torch.zeros(1, dtype=make.number(0.0).dtype)] if bool((index == first).any()) else []
    return picked(make, [*parts, *nothing], index.view(shape))


def _softmax_of(make: Maker, x: int, chosen: Tensor) -> int:
    """Append a softmax of numbers by their places, a row each; of one number it is one."""
    taken = composed.taken(make, composed.flat(make, x), chosen)
    return make.append(ops.Softmax(), taken)
