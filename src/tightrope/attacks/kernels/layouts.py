"""How `changes_kernel` wants values and weights to lie in memory.

Values have their channels last and are flattened: what a change at a pixel adds to the windows
above it, or a window to the pixels below it, is then a few runs of neighbouring numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F

from tightrope.attacks.kernels.chains import Array, Shape
from tightrope.graph import ops
from tightrope.graph.windows import Side, sharing, sides

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.kernels.changes_kernel import Layer


def window_layer(op: ops.Conv2d | ops.Linear, shape: Shape) -> Layer:
    """Lay out a layer as windows on the pixels before it; a linear one is a single window."""
    from tightrope.attacks.kernels.changes_kernel import Joint, Layer

    channels, size = shape[0], shape[1:] or (1, 1)
    if isinstance(op, ops.Conv2d):
        windows = sides(op, size)
    else:  # one window on everything
        windows = Side(size[0], size[0], size[0]), Side(size[1], size[1], size[1])
    weight = op.weight.reshape(len(op.weight), channels, *(side.kernel for side in windows))
    blocks, phases, upwards, downwards = _tables(*windows)
    # Towards the windows, taps of a phase are together, last ones first; missing ones are zero.
    taps = [sharing(side.kernel, side.stride) for side in windows]
    missing = [n * side.stride - side.kernel for n, side in zip(taps, windows, strict=True)]
    padded = F.pad(weight, (0, missing[1], 0, missing[0]))
    by_phase = padded.unflatten(3, (taps[1], -1)).unflatten(2, (taps[0], -1)).flip(2, 4)
    forwards = by_phase.permute(3, 5, 1, 2, 4, 0).flatten(3).flatten(0, 2)
    backwards = weight.permute(0, 2, 3, 1).flatten(1)
    channel, outputs = np.arange(channels), np.arange(len(weight))
    picks = (phases[:, None] * channels + channel).ravel()
    above = np.repeat(blocks, channels), picks, forwards.contiguous().numpy(), upwards
    below = (
        np.repeat(np.arange(len(downwards)), len(weight)),
        np.tile(outputs, len(downwards)),
        backwards.contiguous().numpy(),
        downwards,
    )
    return Layer(Joint(*above), Joint(*below))


@lru_cache(maxsize=64)
def _tables(rows: Side, columns: Side) -> tuple[Array, Array, Array, Array]:
    """Return blocks of pixels in the same windows, phases, and what is above and below.

    That is, the block and the phase of each pixel, the runs of windows above each block, and the
    runs of pixels below each window.
    """
    size, counts = (rows.size, columns.size), (rows.windows(), columns.windows())
    taps = sharing(rows.kernel, rows.stride), sharing(columns.kernel, columns.stride)
    numbers: dict[Shape, int] = {}
    blocks, phases, above, below = [], [], [], []
    for y, x in np.ndindex(*size):
        row, phase_y = divmod(y + rows.before, rows.stride)
        column, phase_x = divmod(x + columns.before, columns.stride)
        phases.append(phase_y * columns.stride + phase_x)
        if (row, column) not in numbers:
            first = row - taps[0] + 1, column - taps[1] + 1
            above.append(_overlap(first, (row, column), counts))
        blocks.append(numbers.setdefault((row, column), len(numbers)))
    for y, x in np.ndindex(*counts):
        first = rows.start(y), columns.start(x)
        last = first[0] + rows.span - 1, first[1] + columns.span - 1
        below.append(_overlap(first, last, size))
    return np.array(blocks), np.array(phases), _table(above), _table(below)


def _overlap(first: Shape, last: Shape, size: Shape) -> list[tuple[int, int, int]]:
    """Return the rows of a rectangle inside a map: place in the map, in the rectangle, length."""
    left, right = max(first[1], 0), min(last[1], size[1] - 1)
    width = last[1] - first[1] + 1
    if right < left:
        return []
    return [
        (y * size[1] + left, (y - first[0]) * width + left - first[1], right - left + 1)
        for y in range(max(first[0], 0), min(last[0], size[0] - 1) + 1)
    ]


def _table(rows: list[list[tuple[int, int, int]]]) -> Array:
    """Return lists of different lengths as one array; zeros fill it up."""
    table = np.zeros((len(rows), max(1, *map(len, rows)), 3), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = np.array(row).reshape(-1, 3)
    return table
