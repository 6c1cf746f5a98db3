"""Floating-point arithmetic at its worst.

Strict bounds claim to hold for sums taken in any order, and for operations that are off by up to
one unit in the last place, whichever way they are rounded. `adverse` makes the most of both: the
processor is told to round everything up (or down), and the sums behind matrix products are
taken one by one in an order that keeps the partial sums large, so that every small term is
rounded against them. What holds in such arithmetic does not rest on luck.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_X86, _ARM = {"up": 0x800, "down": 0x400}, {"up": 0x400000, "down": 0x800000}
_MODES = {"x86_64": _X86, "AMD64": _X86, "i686": _X86, "aarch64": _ARM, "arm64": _ARM}

DIRECTIONS = ("nearest", "up", "down")


@contextmanager
def adverse(direction: str = "up") -> Iterator[None]:
    """Round in one direction and add in a bad order; tests are skipped where that cannot be."""
    with _rounded(direction), _BadOrder():
        yield


@contextmanager
def _rounded(direction: str) -> Iterator[None]:
    if direction == "nearest":
        yield
        return
    mode = _MODES.get(platform.machine(), {}).get(direction)
    library = ctypes.util.find_library("m")
    if mode is None or library is None:
        pytest.skip("how this processor is told to round is not known")
    set_mode = ctypes.CDLL(library).fesetround
    set_mode(mode)
    try:
        one, little = torch.ones(1, dtype=torch.float64), torch.full((1,), 1e-30).double()
        moved = (one + little) > one if direction == "up" else (one - little) < one
        assert bool(moved), "torch does not follow the direction of rounding"
        yield
    finally:
        set_mode(0)


def _added(terms: Tensor, dim: int) -> Tensor:
    """Return the sum over a dimension: from the largest term on, opposite signs last."""
    rising = terms.sort(dim).values
    falls = rising.select(dim, -1).abs() >= rising.select(dim, 0).abs()
    parts = torch.where(falls.unsqueeze(dim), rising.flip(dim), rising).unbind(dim)
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` of matrices, or of batches of matrices."""
    if a.shape[-1] == 0:
        return a @ b
    return _added(a.unsqueeze(-1) * b.unsqueeze(-3), -2)


def _sum(t: Tensor, dims: list[int] | None = None, keepdim: bool = False, **_: Any) -> Tensor:
    if t.numel() == 0 or not t.is_floating_point():
        return t.sum(dims, keepdim) if dims else t.sum()
    if not dims:
        return _added(t.flatten(), 0)
    for dim in sorted((d % t.dim() for d in dims), reverse=True):
        t = _added(t, dim)
        t = t.unsqueeze(dim) if keepdim else t
    return t


_aten = torch.ops.aten
_SUMS: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.mv.default: lambda a, x: _product(a, x[:, None])[:, 0],
    _aten.dot.default: lambda a, b: _product(a[None], b[:, None])[0, 0],
    _aten.addmm.default: lambda c, a, b: _added(
        torch.cat(((a.unsqueeze(-1) * b), c.expand(len(a), 1, b.shape[1])), 1), 1
    ),
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
}


class _BadOrder(TorchDispatchMode):
    """Takes sums apart."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _SUMS.get(func, func)(*args, **(kwargs or {}))
