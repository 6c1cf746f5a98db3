"""Loops that are compiled when they are first called.

Loops that numba compiles take 4 to 15 seconds at their first call, a tenth of a second in every
later process: what was compiled is kept beside the sources where we may write there. Whoever is in
a hurry goes another way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightrope.deadline import time_left

COMPILING = 30.0  # seconds that have to be left to begin with it


def in_time(function: Any) -> bool:
    """Return whether a loop is compiled, or kept from an earlier process, or has time to be."""
    if time_left() >= COMPILING or not hasattr(function, "signatures") or function.signatures:
        return True
    name = function.py_func.__qualname__.rpartition(".")[2]
    # Where there is no cache, there is no folder of it.
    folder = getattr(function.stats, "cache_path", None)
    return folder is not None and any(Path(folder).glob(f"*.{name}-*.nbi"))


def compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    from numba import njit  # takes a while to load

    # Sums may be reordered and contracted, as in the library's own kernels.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)
