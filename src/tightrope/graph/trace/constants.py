"""Converters of values and constants together: joined, written into each other, masked.

What copies numbers of several values is run on their places, as in `moves`; constants count from
minus one downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import masks, ops
from tightrope.graph.trace.elementwise import constant
from tightrope.graph.values import Composed, Masked, Value, apply, is_live, refuse


def row_of(given: Tensor, batch: int) -> Tensor:
    """Return a constant for one sample, of one that was made for a batch."""
    same = len(given) == batch and bool((given == given[:1]).all())
    refuse(not (same or len(given) == 1), f"a constant of shape {tuple(given.shape)}")
    with torch.enable_grad():
        return given[0]


# --- side by side ---------------------------------------------------------------------------


def concatenated(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join values, and constants for each sample of a batch."""
    anchor = next(t for t in tensors if isinstance(t, Value))
    dim %= len(anchor.shape) + 1
    refuse(dim == 0, "concatenation along the batch")
    if all(isinstance(t, Value) for t in tensors):
        return apply(tuple(tensors), ops.Concat(dim))

    def build(make: Any) -> int:
        parts = [
            t.position if isinstance(t, Value) else row_of(t, len(make.probe)) for t in tensors
        ]
        return masks.joined(make, parts, dim - 1)

    return Composed(build)


def stacked(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join values, and constants, along a new dimension."""
    shape = next(t.shape for t in tensors if isinstance(t, Value))
    dim %= len(shape) + 2
    refuse(dim == 0, "stacking along the batch")
    wide = (*shape[: dim - 1], 1, *shape[dim - 1 :])

    def build(make: Any) -> int:
        parts: list[Any] = []
        for t in tensors:
            if isinstance(t, Value):
                parts.append(make.append(ops.Reshape(wide), t.position))
            else:
                with torch.enable_grad():
                    parts.append(row_of(t, len(make.probe)).unsqueeze(dim - 1))
        return masks.joined(make, parts, dim - 1)

    return Composed(build)


# --- one written into another ---------------------------------------------------------------


def merged(operator: Any, *data: int) -> Callable[..., Composed]:
    """Return the converter of an operator that copies numbers of the arguments at some places."""

    def convert(*args: Any, **kwargs: Any) -> Composed:
        refuse(any(place >= len(args) for place in data), "arguments by name")
        others = [a for i, a in enumerate(args) if i not in data]
        refuse(any(isinstance(o, Value) for o in _flat(others)), "an index that depends on values")

        def build(make: Any) -> int:
            batch = len(make.probe)
            values = [args[i] for i in data if isinstance(args[i], Value)]
            each = sum(math.prod(value.shape) for value in values)
            labelled, first = list(args), 0
            rows: list[Tensor] = []
            for i in data:
                if isinstance(args[i], Value):
                    labelled[i] = _labels(batch, args[i].shape, first, each)
                    first += math.prod(args[i].shape)
                else:
                    before = sum(row.numel() for row in rows)
                    row, labelled[i] = _labelled_constant(constant(args[i]), batch, before)
                    rows.append(row)
            index = _own(operator(*labelled, **kwargs), each)
            index = torch.where(index < 0, each - 1 - index, index)
            return masks.picked(make, [*(value.position for value in values), *rows], index)

        return Composed(build)

    return convert


def _labelled_constant(given: Tensor, batch: int, before: int) -> tuple[Tensor, Tensor]:
    """Return a constant and its places, below zero; of what was made for a batch, one row."""
    made = given.dim() > 0 and len(given) == batch and bool((given == given[:1]).all())
    row = row_of(given, batch) if made else given
    labels = -1.0 - before - _labels(1, tuple(row.shape), 0, 0)[0]
    return row, labels.expand(given.shape)


def _flat(arguments: Any) -> list[Any]:
    if isinstance(arguments, tuple | list):
        return [found for part in arguments for found in _flat(part)]
    return [arguments]


def _labels(batch: int, shape: Sequence[int], first: int, each: int) -> Tensor:
    """Return the places of numbers in a batch whose samples have so many."""
    own = torch.arange(math.prod(shape), dtype=torch.float64).view(1, *shape) + first
    return own + each * torch.arange(batch, dtype=torch.float64).view(-1, *[1] * len(shape))


def _own(found: Tensor, each: int) -> Tensor:
    """Return the places of one sample, if each of a batch has its own, or constants."""
    step = each * torch.arange(len(found), dtype=found.dtype).view(-1, *[1] * (found.dim() - 1))
    own = found[:1]
    wanted = torch.where(own < 0, own, own + step)
    apart = torch.equal(found, wanted) and bool((own < each).all())
    refuse(not apart, "it mixes the samples of a batch")
    return own[0].long()


def _copied(x: Value, source: Any, *flags: bool) -> Any:
    """A tensor that is overwritten by another one, which is as often there as needed."""
    return merged(lambda target, new: new.expand_as(target), 0, 1)(x, source)


def _scattered(x: Any, dim: int, index: Tensor, source: Any, **options: Any) -> Any:
    refuse(bool(options.get("reduce")), "reduce")
    if not isinstance(source, Value | Tensor):
        source = torch.full(index.shape, float(source), dtype=torch.float64)
    return merged(lambda a, s: aten.scatter(a, dim, index, s), 0, 1)(x, source)


def _put(x: Any, indices: Sequence[Any], source: Any, accumulate: bool = False) -> Any:
    refuse(accumulate, "accumulate")
    refuse(any(isinstance(i, Value) for i in indices), "an index that depends on values")
    return merged(lambda a, s: aten.index_put(a, indices, s), 0, 1)(x, source)


# --- masks ----------------------------------------------------------------------------------


def chosen(condition: Tensor, a: Any, b: Any) -> Any:
    """`where` with a condition that is known: minus infinity is left to a softmax."""
    if isinstance(b, Value) and not isinstance(a, Value):
        condition, a, b = ~condition.bool(), b, a
    condition = condition.bool()
    if isinstance(a, Value) and (isinstance(b, Value) or is_live(constant(b))):
        return merged(lambda s, t: torch.where(condition, s, t), 0, 1)(a, b)
    assert isinstance(a, Value)
    mask, other = _sample(condition, a), _sample(constant(b), a)
    shape = torch.broadcast_shapes(a.shape, mask.shape, other.shape)
    refuse(tuple(shape) != a.shape, f"a choice of shape {tuple(shape)} for {a.shape}")
    if bool((other == -math.inf).any()):
        rest = (other != -math.inf) & ~mask
        refuse(bool(rest.any()), "a choice between numbers and minus infinity")
        return Masked(a, (~mask).expand(a.shape))
    return Composed(lambda make: masks.kept(make, a.position, mask, other))


def _sample(given: Tensor, value: Value) -> Tensor:
    """Return a constant without a batch of one."""
    if given.dim() == len(value.shape) + 1:
        refuse(len(given) != 1 and not bool((given == given[:1]).all()), "a mask of each sample")
        return given[0]
    return given


def _triangle(cut: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    """`tril` and `triu`."""

    def convert(x: Value, diagonal: int = 0) -> Any:
        refuse(len(x.shape) < 2, "a triangle of the batch")
        mask = cut(torch.ones(x.shape[-2:]), diagonal).bool()
        return Composed(lambda make: masks.kept(make, x.position, mask))

    return convert


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.cat: concatenated,
    aten.concat: concatenated,
    aten.stack: stacked,
    aten.slice_scatter: merged(aten.slice_scatter, 0, 1),
    aten.select_scatter: merged(aten.select_scatter, 0, 1),
    aten.diagonal_scatter: merged(aten.diagonal_scatter, 0, 1),
    aten.copy: _copied,
    aten.fill: lambda x, value: _copied(x, constant(value)),
    aten.scatter: _scattered,
    aten.index_put: _put,
    aten.tril: _triangle(torch.tril),
    aten.triu: _triangle(torch.triu),
}
