"""Keeping freed memory for the next computation.

On Linux, the C library gives large blocks back to the system at once and gets them again page
by page; for the large temporaries of bound propagation that costs a good part of a training step
and of a search on a large network.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt(3)
_LARGEST = 2**31 - 1


class _Arenas(ctypes.Structure):
    """What glibc's mallinfo2(3) returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def reuse_freed_memory() -> bool:
    """Tell the allocator to keep freed memory in this process; False where that cannot be."""
    library = _library()
    if library is None or not hasattr(library, "mallopt"):  # another C library
        return False
    return bool(library.mallopt(_MMAP_MAX, 0)) and bool(library.mallopt(_TRIM_THRESHOLD, _LARGEST))


def kept_memory() -> int:
    """Return how many bytes the allocator keeps that nobody uses, as far as it tells."""
    library = _library()
    if library is None or not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Arenas
    return int(library.mallinfo2().fordblks)


@cache
def _library() -> ctypes.CDLL | None:
    """Return the C library of a process on Linux."""
    try:
        return ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    except OSError:
        return None
