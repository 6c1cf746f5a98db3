"""Full precision wherever bounds are computed.

TF32 keeps ten bits of the mantissa: a bound computed with it proves nothing. Nor does one computed
where the smallest numbers count as zero: a weight may be one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from tightrope.errors import UserError

# The unit of rounding that proofs are made with: the gap above 1, twice what rounding to nearest
# asks for, so that they hold whichever way operations are rounded.
ROUNDING = torch.finfo(torch.float64).eps

SHARE = 1 << 16  # numbers that torch leaves to one thread, at most


# Of what the numbers of float32 products may be, by the names that a user knows.
FULL, TF32, BF16 = "full", "tf32", "bf16"

_search: ContextVar[str] = ContextVar("search", default=FULL)


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 in float32, on all devices, and restore the settings after.

    TF32 and bfloat16 can be chosen by either of PyTorch's two interfaces; to mix them is an error
    that it finds when the older one is read.
    """
    with _products("ieee"):
        yield


@contextmanager
def _products(kind: str) -> Iterator[None]:
    """Set the precision of all products through both interfaces, and restore both."""
    before = [switch.fp32_precision for switch in _switches()]
    older = _older_settings()
    if older is not None:
        _set_older("highest" if kind == "ieee" else "high", kind != "ieee")
    for switch in _switches():
        switch.fp32_precision = kind
    try:
        yield
    finally:
        if older is not None:
            _set_older(*older)
        for switch, value in zip(_switches(), before, strict=True):
            switch.fp32_precision = value


def _switches() -> list[Any]:
    """Return what has a precision of its own; older versions of PyTorch have no such settings."""
    backends = torch.backends
    found: list[Any] = [backends.cuda.matmul]
    for library in (backends.cudnn, backends.mkldnn):
        found += [getattr(library, name, None) for name in ("conv", "rnn", "matmul")]
    return [switch for switch in found if hasattr(switch, "fp32_precision")]


def _older_settings() -> tuple[str, bool] | None:
    """Return the settings of the older interface; None where the newer one was used."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_older(matmul: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def searching(precision: str) -> Iterator[None]:
    """Let attacks in this block search in full, tf32 or bf16; nothing else is changed.

    What they find is evaluated by others, in full precision.
    """
    token = _search.set(precision)
    try:
        yield
    finally:
        _search.reset(token)


def search_type(points: torch.Tensor) -> torch.dtype:
    """Return the type in which an attack evaluates points."""
    short = _search.get() == BF16 and points.dtype == torch.float32
    return torch.bfloat16 if short else points.dtype


@contextmanager
def search_precision() -> Iterator[None]:
    """Compute as a search may, for nothing but a search."""
    if _search.get() != TF32:
        yield
        return
    with _products("tf32"):
        yield


@contextmanager
def provable() -> Iterator[None]:
    """Compute in full precision what is to be proved; an error where that cannot be."""
    if flushes():
        raise UserError(
            "torch takes the smallest numbers for zero (set_flush_denormal), so that nothing could "
            "be proved; call torch.set_flush_denormal(False) before its threads are started"
        )
    with full_precision():
        yield


def flushes() -> bool:
    """Return whether subnormal numbers count as zero in any of torch's threads."""
    normal = torch.full((SHARE * torch.get_num_threads(),), 2.0**-1000, dtype=torch.float64)
    return not torch.equal(normal * 2.0**-40 * 2.0**40, normal)
