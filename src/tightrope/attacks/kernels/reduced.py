"""The latent attack on classifiers that are reduced to what can change inside a box.

Interval bounds tell which ReLUs keep their sign in a sample's latent box, usually most of them.
What remains of the classifier (`reduction_kernel`) is a few dozen neurons and sparse sums, shared
by the estimators of the sample, so that every step is cheap (`reduced_kernel`).
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tightrope.attacks.kernels.chains import Array, Task, bias, flat
from tightrope.attacks.kernels.stability import UNSTABLE, stability
from tightrope.attacks.kernels.windows import lay_out

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.kernels.reduced_kernel import Search
    from tightrope.attacks.kernels.reduction_kernel import Reduced


class Reduction:
    """The compiled search with all that it needs to know."""

    def __init__(self, task: Task) -> None:
        from tightrope.attacks.kernels.reduced_kernel import Readout

        self.task = task
        *layers, last = task.chain.layers
        shapes = task.chain.shapes
        self.layers = tuple(map(lay_out, layers, shapes[:-1]))
        rows = flat(last.weight.unflatten(1, shapes[-1]), 1).contiguous()
        self.readout = Readout(rows.numpy(), bias(last).numpy())
        self.levels = np.cumsum([0, *map(math.prod, shapes)])
        self.sizes = np.array(task.steps.sizes())

    def climb(self, piece: slice, points: Tensor, best: Tensor, scores: Tensor) -> None:
        """Take all steps from some samples' points; keep the best of them."""
        from tightrope.attacks.kernels.reduced_kernel import attack

        task = self.task
        known = stability(task.chain, task.box[piece])
        middle, kinds = known.middle.contiguous().numpy(), torch.cat(known.kinds, 1).numpy()
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

    def _most(self, kinds: Array) -> tuple[int, int, int, int]:
        """Return how many variables, neurons, entries and composed entries there are at most."""
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
        from tightrope.attacks.kernels.lanes_kernel import LANES
        from tightrope.attacks.kernels.reduced_kernel import Search
        from tightrope.attacks.kernels.reduction_kernel import Reduced

        def numbers(count: int) -> Array:
            return torch.empty(count, dtype=dtype).numpy()

        def rows(count: int) -> Array:
            return numbers(count * LANES)

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
            slopes=torch.zeros((total + len(self.levels)) * LANES, dtype=dtype).numpy(),
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
