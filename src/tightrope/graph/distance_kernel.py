"""The largest distances of points, or boxes, to rows of weights, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

BLOCK = 128  # distances that are passed over together if none of them is among the largest


def compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)


@compiled
def largest(
    above: Array, below: Array, weight: Array, room: tuple[Array, Array], found: tuple[Any, Any]
) -> None:
    """Find the largest of `max(above_j - w_j, w_j - below_j, 0)` for each sample and row.

    `above`, `below` and the rows of `weight` are filled up to whole blocks, where the terms are
    zero. `room` are the terms of one row and the same memory as whole numbers: floats that are not
    negative have the order of their bits, and the largest whole number is found in vectors.
    `found` are the terms, largest first, and their places: [samples, rows, count].
    """
    gaps, bits = room
    terms, places = found
    count = terms.shape[2]
    best, where = np.empty(count, bits.dtype), np.empty(count, places.dtype)
    as_terms, zero = best.view(gaps.dtype), gaps.dtype.type(0)
    for o in range(len(weight)):
        row = weight[o]
        for i in range(len(above)):
            high, low = above[i], below[i]
            for j in range(len(row)):
                up, down = high[j] - row[j], row[j] - low[j]
                gap = up if up > down else down
                gaps[j] = gap if gap > 0 else zero
            best[:] = -1
            for s in range(len(row) // BLOCK):
                top = bits[0] * 0
                for j in range(s * BLOCK, s * BLOCK + BLOCK):
                    top = max(top, bits[j])
                if top > best[count - 1]:
                    enter(bits, s * BLOCK, best, where)
            for k in range(count):
                terms[i, o, k], places[i, o, k] = as_terms[k], where[k]


@compiled
def enter(bits: Array, first: int, best: Array, where: Array) -> None:
    """Enter the numbers of a block into the list of the largest ones; of equals the first."""
    last = len(best) - 1
    for j in range(first, first + BLOCK):
        if bits[j] > best[last]:
            k = last
            while k > 0 and best[k - 1] < bits[j]:
                best[k], where[k] = best[k - 1], where[k - 1]
                k -= 1
            best[k], where[k] = bits[j], j
