"""Distances of a batch to rows of weights by large powers, and their gradients, compiled.

One row of weights at a time is gathered into the first cache and meets all samples. Rows are filled
up with zeros to whole blocks, where both sides are zero and so is the distance. Nothing is raised
to a power but quotients that are at most 1. A power is `2 m 2^k` with m from 4 to 7, so that it is
k squares and a few products; there are loops for each k.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

BLOCK = 128  # numbers that are taken, or passed over, together
DENSE = 64  # powers up to here take all blocks: few terms are too small to count
LEAST, COUNTED = -100.0, -30.0  # logarithms of the smallest power, and of the smallest that counts


def compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)


class Room(NamedTuple):
    """Where one row is worked on: its weights and their gradients, and distances.

    `bits` are the distances as whole numbers; `tops` the largest ones of each block and of all.
    """

    row: Array
    slopes: Array
    gaps: Array
    bits: Array
    tops: Array


@compiled
def gather(row: Array, weights: Array, inputs: Array) -> None:
    """Fill a row with the weights of the inputs that are kept; the rest stays zero."""
    for j in range(len(inputs)):
        row[j] = weights[inputs[j]]


@compiled
def measure(x: Array, row: Array, gaps: Array, bits: Array, tops: Array) -> None:
    """Leave all distances in `gaps`, and the largest of each block and of all in `tops`, as bits.

    Floats that are not negative have the order of their bits, and the largest whole number is found
    in vectors, which that of floats is not.
    """
    for j in range(len(row)):
        gaps[j] = abs(x[j] - row[j])
    most = bits[0]
    for s in range(len(row) // BLOCK):  # so it is known not to leave the row
        top = bits[0] * 0
        for j in range(s * BLOCK, s * BLOCK + BLOCK):
            top = max(top, bits[j])
        tops[s] = top
        most = max(most, top)
    tops[len(row) // BLOCK] = most


@compiled
def place_of(bits: Array, tops: Array) -> int:
    """Return the first place of the largest distance that was measured."""
    s, most = 0, tops[len(tops) - 1]
    while tops[s] != most:
        s += 1
    place, last = s * BLOCK, s * BLOCK + BLOCK - 1
    while place < last and bits[place] != most:
        place += 1
    return place


@compiled
def farthest(
    x: Array, weight: Array, kept: tuple[Array, Array], values: Array, places: Array, room: Room
) -> None:
    """Write the largest distances of `x` [samples, whole blocks] to rows, and their places.

    `kept` are the numbers of the inputs and of the rows that count.
    """
    inputs, outputs = kept
    for o in range(len(outputs)):
        gather(room.row, weight[outputs[o]], inputs)
        for i in range(len(x)):
            measure(x[i], room.row, room.gaps, room.bits, room.tops)
            place = place_of(room.bits, room.tops)
            places[i, o], values[i, o] = place, room.gaps[place]


@compiled
def point_out(
    x: Array,
    weight: Array,
    kept: tuple[Array, Array],
    known: tuple[Array, Array],
    to: tuple[Array, Array],
) -> None:
    """Add the gradients of the largest distances; `known` are places and outer gradients."""
    inputs, outputs = kept
    places, grads = known
    to_x, to_weight = to
    for o in range(len(outputs)):
        for i in range(len(x)):
            j = places[i, o]
            if j < len(inputs):
                gap = x[i, j] - weight[outputs[o], inputs[j]]
                slope = grads[i, o] if gap > 0 else (-grads[i, o] if gap < 0 else gap)
                to_x[i, j] += slope
                to_weight[outputs[o], inputs[j]] -= slope


@cache
def loops(squares: int) -> tuple[Any, Any]:
    """Return the loops for powers `2 m 2^squares`: the distances and their gradients."""
    return distance_loop(squares), gradient_loop(squares)


def distance_loop(squares: int) -> Any:
    """Return the loop that writes distances by powers `2 m 2^squares`."""

    @compiled
    def distances(
        x: Array, weight: Array, kept: tuple[Array, Array], m: int, values: Array, room: Room
    ) -> None:
        inputs, outputs = kept
        kind, width, row = x.dtype.type, x.shape[1], room.row
        power = 2 * m * 2**squares
        floor, cut = kind(2.0 ** (2 * LEAST / power)), kind(2.0 ** (COUNTED / power))
        one, tops = kind(1), room.tops.view(x.dtype)
        blocks = 1 if power <= DENSE else width // BLOCK
        step = width // blocks
        for o in range(len(outputs)):
            gather(row, weight[outputs[o]], inputs)
            for i in range(len(x)):
                measure(x[i], row, room.gaps, room.bits, room.tops)
                peak = tops[width // BLOCK]
                values[i, o] = peak
                if peak == 0:
                    continue
                scale, total = one / peak, kind(0)
                for s in range(blocks):
                    if blocks > 1 and tops[s] < cut * peak:
                        continue
                    here = slice(s * step, s * step + step)
                    xs, ws = x[i][here], row[here]
                    for j in range(len(xs)):
                        gap = (xs[j] - ws[j]) * scale
                        b = gap * gap
                        b = b if b > floor else floor
                        for _ in range(squares):
                            b *= b
                        b2 = b * b
                        more = one if m == 4 else (b if m == 5 else b2)
                        total += b2 * b2 * more * (b if m == 7 else one)
                values[i, o] = peak * kind(total ** (1.0 / power))

    return distances


def gradient_loop(squares: int) -> Any:
    """Return the loop that adds the gradients of distances by powers `2 m 2^squares`.

    `known` are the distances and the gradients with respect to them; those of the points and of the
    weights are added to `to`.
    """

    @compiled
    def gradients(
        x: Array,
        weight: Array,
        kept: tuple[Array, Array],
        m: int,
        known: tuple[Array, Array],
        to: tuple[Array, Array],
        room: Room,
    ) -> None:
        inputs, outputs = kept
        kind, width, row, slopes = x.dtype.type, x.shape[1], room.row, room.slopes
        power = 2 * m * 2**squares
        floor, cut = kind(2.0 ** (2 * LEAST / power)), kind(2.0 ** (COUNTED / power))
        one, tops = kind(1), room.tops.view(x.dtype)
        blocks = 1 if power <= DENSE else width // BLOCK
        step = width // blocks
        for o in range(len(outputs)):
            gather(row, weight[outputs[o]], inputs)
            slopes[:] = 0
            for i in range(len(x)):
                factor, value, least = known[1][i, o], known[0][i, o], kind(0)
                if factor == 0 or value == 0:
                    continue
                if blocks > 1:
                    measure(x[i], row, room.gaps, room.bits, room.tops)
                    least = cut * tops[width // BLOCK]
                scale = one / value
                for s in range(blocks):
                    if blocks > 1 and tops[s] < least:
                        continue
                    here = slice(s * step, s * step + step)
                    xs, ws, to_x, to_w = x[i][here], row[here], to[0][i][here], slopes[here]
                    for j in range(len(xs)):
                        gap = (xs[j] - ws[j]) * scale
                        b = gap * gap
                        b = b if b > floor else floor
                        gap *= factor
                        for _ in range(squares):
                            gap *= b
                            b *= b
                        b2 = b * b
                        more = one if m < 6 else (b if m == 6 else b2)
                        gap *= b2 * (b if m == 4 else b2) * more
                        to_x[j] += gap
                        to_w[j] -= gap
            for j in range(len(inputs)):
                to[1][outputs[o], inputs[j]] += slopes[j]

    return gradients
