"""How the inner loops of attacks are compiled."""

from __future__ import annotations

from typing import Any

from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


def compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    # Sums may be reordered and contracted, as in the library's own kernels.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)
