"""The latent attack on chains of layers, by less work for the same result.

There are two ways. Small classifiers are reduced to what can change inside each box (`reduced`); in
large ones, what changes from step to step is followed (`increments`).
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tightrope.attacks.kernels.chains import Chain, Task, flat, image
from tightrope.attacks.kernels.increments import Increments
from tightrope.attacks.kernels.reduced import Reduction
from tightrope.attacks.pgd import Steps, starting_points
from tightrope.box import Box
from tightrope.draws import own_rows

# Streams of random numbers: a fixed number, so that threads have no influence on the points.
STREAMS = 32


class ChainSearch(Protocol):
    """A way to climb."""

    def climb(self, piece: slice, points: Tensor, best: Tensor, scores: Tensor) -> None:
        """Take all steps from some samples' points; keep the best of them."""


def attack_chain(
    classifier: Chain,
    box: Box,
    labels: Tensor,
    targets: Tensor,
    *,
    steps: Steps,
    restarts: int,
    start: Tensor | None,
    memory: int,
) -> Tensor:
    """Return the best points as `attack_margins` does."""
    box = Box(*(flat(t, 1).contiguous() for t in box.corners))
    count = targets.shape[1]
    shapes = classifier.shapes
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        given = None if start is None else flat(start, 2)
        starts = starting_points(box, given, lambda: _draw(box, count, pool), restarts)
        points = next(starts)
        best = points.clone()
        scores = best.new_full(targets.shape, -torch.inf)
        each = 4 * count * sum(map(math.prod, shapes)) * best.element_size()
        size = max(1, memory // each)
        task = Task(classifier, box, labels, targets, steps, pool)
        search: ChainSearch = Reduction(task) if classifier.reducible else Increments(task)
        for fresh in itertools.chain([points], starts):
            for begin in range(0, len(labels), size):
                search.climb(slice(begin, begin + size), fresh, best, scores)
    return image(best, shapes[0])


def _draw(box: Box, count: int, pool: ThreadPoolExecutor) -> Tensor:
    """Draw points as `Box.sample` does, on all threads."""
    points = box.lower.new_empty(len(box.lower), count, box.lower.shape[1])
    seeds = np.random.SeedSequence(int(torch.randint(1 << 62, ()))).spawn(STREAMS)
    rows = own_rows(len(points))
    edges = [k * (rows.total // STREAMS) + min(k, rows.total % STREAMS) for k in range(STREAMS + 1)]
    drawn, lowers, uppers = (t.numpy() for t in (points, *box.corners))

    def fill(seed: np.random.SeedSequence, begin: int, end: int) -> None:
        first, last = max(begin, rows.first), min(end, rows.last)
        if first >= last:  # other processes have all of them
            return
        own = slice(first - rows.first, last - rows.first)
        part, lower, upper = drawn[own], lowers[own][:, None], uppers[own][:, None]
        whole = part
        if len(part) < end - begin:
            whole = np.empty((end - begin, *part.shape[1:]), part.dtype)
        np.random.Generator(np.random.SFC64(seed)).random(out=whole, dtype=part.dtype.type)
        if whole is not part:
            part[:] = whole[first - begin : last - begin]
        part *= upper - lower
        part += lower
        # Rounding may lead out of the box by a unit in the last place.
        np.clip(part, lower, upper, out=part)

    list(pool.map(fill, seeds, edges[:-1], edges[1:]))
    return points
