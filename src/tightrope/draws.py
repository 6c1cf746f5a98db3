"""Random numbers for the rows of a batch, of which this process may have only some.

Processes that share a batch draw the numbers of all its rows and keep their own: so they have the
numbers that one process would have, and their generators stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows `first` to `last` (excluded) of a batch of `total`."""

    first: int
    last: int
    total: int

    @property
    def inside(self) -> slice:
        """Where they are in the batch."""
        return slice(self.first, self.last)

    @property
    def indices(self) -> Tensor:
        """Their numbers in the batch."""
        return torch.arange(self.first, self.last)

    @property
    def share(self) -> float:
        """Their part of the batch."""
        return (self.last - self.first) / self.total


_own: ContextVar[Rows | None] = ContextVar("own_rows", default=None)


@contextmanager
def drawn_for(rows: Rows) -> Iterator[None]:
    """Draw for a batch of which only these rows are at hand."""
    token = _own.set(rows)
    try:
        yield
    finally:
        _own.reset(token)


def own_rows(count: int) -> Rows:
    """Return which rows of their batch the `count` rows at hand are; by default all."""
    rows = _own.get()
    if rows is None:
        return Rows(0, count, count)
    if rows.last - rows.first != count:
        raise ValueError(f"numbers for {count} rows, where there are {rows.last - rows.first}")
    return rows


def uniform_like(t: Tensor) -> Tensor:
    """Draw uniform numbers from [0, 1) like `torch.rand_like`, one row per row of the batch."""
    return torch.rand_like(t) if _own.get() is None else _drawn(t, Tensor.uniform_)


def normal_like(t: Tensor) -> Tensor:
    """Draw standard normal numbers like `torch.randn_like`, one row per row of the batch."""
    return torch.randn_like(t) if _own.get() is None else _drawn(t, Tensor.normal_)


def _drawn(t: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    rows = own_rows(len(t))
    # The memory order decides which number goes where, so the whole batch has that of the part.
    shape, strides, length = (rows.total, *t.shape[1:]), [0] * t.dim(), 1
    for dim in sorted(range(1, t.dim()), key=t.stride):
        strides[dim] = length
        length *= t.shape[dim]
    strides[0] = length
    whole = torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device)
    return draw(whole)[rows.inside]
