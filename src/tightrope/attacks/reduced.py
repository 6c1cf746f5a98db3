"""The latent attack on classifiers that are reduced to what can change inside a box.

Interval bounds tell which ReLUs keep their sign in a sample's latent box, usually most of them.
What remains of the classifier (`reduction_kernel`) is a few dozen neurons and sparse sums, shared
by the estimators of the sample, so that every step is cheap (`reduced_kernel`).
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks.chains import Array, Shape, Task, bias, flat, image
from tightrope.graph import evaluate, ops

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.reduced_kernel import Search
    from tightrope.attacks.reduction_kernel import Layer, Reduced

# Bounds nearer to zero than so many rounding errors do not tell a sign.
DOUBT = 64


class Reduction:
    """The compiled search with all that it needs to know."""

    def __init__(self, task: Task) -> None:
        from tightrope.attacks.reduced_kernel import Readout

        self.task = task
        *layers, last = task.chain.layers
        shapes = task.chain.shapes
        self.layers = tuple(map(_layer, layers, shapes[:-1]))
        rows = flat(last.weight.unflatten(1, shapes[-1]), 1).contiguous()
        self.readout = Readout(rows.numpy(), bias(last).numpy())
        self.levels = np.cumsum([0, *map(math.prod, shapes)])
        self.sizes = np.array(task.steps.sizes())

    def climb(self, piece: slice, points: Tensor, best: Tensor, scores: Tensor) -> None:
        """Take all steps from some samples' points; keep the best of them."""
        from tightrope.attacks.reduced_kernel import attack

        task = self.task
        middle, kinds = self._stability(piece)
        each = (points, *task.box.corners, best, scores, task.labels, task.targets)
        numbers = [*(t[piece].numpy() for t in each), middle, kinds]
        most = self._most(kinds)
        mine = threading.local()

        def run(part: slice) -> None:
            if not hasattr(mine, "room"):
                mine.room = self._room(points.dtype, *most)
            arguments = (t[part] for t in numbers)
            attack(*arguments, self.layers, self.readout, self.sizes, *mine.room)

        list(task.pool.map(run, task.share(len(kinds))))

    def _stability(self, piece: slice) -> tuple[Array, Array]:
        """Return the first pre-activations at the centre, and the kinds of all neurons."""
        from tightrope.attacks.reduction_kernel import ACTIVE, DEAD, UNSTABLE

        chain = self.task.chain
        centers, kinds = [], []
        lower, upper = (image(t[piece], chain.shapes[0]) for t in self.task.box.corners)
        for node in chain.classifier.nodes[1 : chain.affine[-1]]:
            rule = evaluate.RULES[type(node.op)]
            if not isinstance(node.op, ops.Conv2d | ops.Linear):
                lower, upper = rule(node.op, lower), rule(node.op, upper)
                continue
            size = replace(node.op, weight=node.op.weight.abs(), bias=None)
            center = rule(node.op, (lower + upper) / 2)
            radius = rule(size, (upper - lower) / 2)
            doubt = DOUBT * torch.finfo(center.dtype).eps * (center.abs() + radius)
            doubt[radius == 0] = 0  # what never changes never flips
            kind = torch.full_like(center, UNSTABLE, dtype=torch.int8)
            kind[center - radius > doubt] = ACTIVE
            kind[(center + radius < -doubt) | ((radius == 0) & (center <= 0))] = DEAD
            centers.append(flat(center, 1))
            kinds.append(flat(kind, 1))
            lower, upper = center - radius, center + radius
        return centers[0].contiguous().numpy(), torch.cat(kinds, 1).numpy()

    def _most(self, kinds: Array) -> tuple[int, int, int, int]:
        """Return how many variables, neurons, entries and composed entries there are at most."""
        from tightrope.attacks.reduction_kernel import UNSTABLE

        inputs, behind = self.levels[1], self.levels[2] - self.levels[1]
        unstable = kinds == UNSTABLE
        first, all_of_them = unstable[:, :behind].sum(1), unstable.sum(1)
        variables = int(inputs + all_of_them.max())
        composed = int((all_of_them - first).max()) * variables
        entries = int(first.max()) * self.layers[0].taps.shape[1] + composed
        return variables, int(all_of_them.max()), entries, composed

    def _room(
        self, dtype: torch.dtype, variables: int, neurons: int, entries: int, composed: int
    ) -> tuple[Reduced, Search]:
        """Make room for one sample."""
        from tightrope.attacks.lanes_kernel import LANES
        from tightrope.attacks.reduced_kernel import Search
        from tightrope.attacks.reduction_kernel import Reduced

        def numbers(count: int) -> Array:
            return torch.empty(count, dtype=dtype).numpy()

        def rows(count: int) -> Array:
            return torch.zeros(count * LANES, dtype=dtype).numpy()

        total, inputs = int(self.levels[-1]), int(self.levels[1])
        reduced = Reduced(
            levels=self.levels,
            ends=np.empty(len(self.levels) - 1, np.int64),
            places=np.empty(total, np.int64),
            values=np.empty(total + 1, np.int64),
            starts=np.empty(variables + 1, np.int64),
            neurons=np.empty(entries, np.int32),
            weights=numbers(entries),
            constants=numbers(neurons),
            slopes=rows(total + len(self.levels)),
            offsets=rows(1),
            # One more is written, and forgotten.
            composed=np.empty((composed + 1, 2), np.int32),
            amounts=numbers(composed + 1),
        )
        search = Search(
            lower=rows(inputs),
            upper=rows(inputs),
            best=rows(inputs),
            point=rows(variables),
            moves=rows(variables),
            outer=rows(variables),
            slopes=rows(variables),
            hidden=rows(neurons),
            passed=rows(neurons),
            gain=rows(1),
            better=rows(1),
        )
        return reduced, search


def _layer(op: ops.Conv2d | ops.Linear, shape: Shape) -> Layer:
    """Lay out a layer as windows on the values before it; a linear one is a single window."""
    from tightrope.attacks.reduction_kernel import Layer

    if isinstance(op, ops.Conv2d):
        taps = _taps(shape, tuple(op.weight.shape[2:]), op.stride, op.padding)
        weights = op.weight.permute(0, 2, 3, 1).flatten(1)
    else:
        taps = np.arange(math.prod(shape), dtype=np.int32)[None]
        weights = flat(op.weight.unflatten(1, shape), 1)
    return Layer(taps, weights.contiguous().numpy(), bias(op).numpy())


@lru_cache(maxsize=64)
def _taps(shape: Shape, kernel: Shape, stride: Shape, padding: Shape) -> Array:
    channels, height, width = shape
    numbers = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
    pixels = F.unfold(numbers, kernel, padding=padding, stride=stride)[0].T.long() - 1
    taps = pixels.unsqueeze(2) * channels + torch.arange(channels)
    taps[pixels < 0] = channels * height * width  # padding
    return taps.flatten(1).to(torch.int32).contiguous().numpy()
