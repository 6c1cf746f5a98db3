"""Keeping freed memory for the next step.

On Linux, the C library gives large blocks back to the system at once and gets them again page
by page; for the large temporaries of bound propagation that costs a fifth of a training step.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt(3)
_LARGEST = 2**31 - 1


def reuse_freed_memory() -> bool:
    """Tell the allocator to keep freed memory in this process; False where that cannot be."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
