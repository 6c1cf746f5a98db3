"""The latent attack on chains of layers, worked out from what changes in a step.

Sign steps of a fifth of the width bring nearly all coordinates of a latent point to a corner
within five steps. From then on few coordinates move and few ReLUs flip, so neither the outputs
nor the gradients need to be computed anew: changes are followed through the network, one
estimator at a time (`increments_kernel`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tightrope.attacks.chains import Array, Task, bias, flat, image
from tightrope.attacks.goals import Targeted
from tightrope.attacks.layouts import window_layer
from tightrope.attacks.pgd import WIDTH
from tightrope.attacks.points import prepare

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.changes_kernel import Changes, State

# The weights of a small layer stay in the processor's cache.
LARGEST_CACHED = 1 << 16
# Changes of a single layer are followed so fast that a second state does not pay.
SMALLEST_DEPTH = 2


class Increments:
    """The compiled search with all that it needs to know."""

    def __init__(self, task: Task) -> None:
        self.task, self.shapes = task, task.chain.shapes
        self.graph, self.rules = prepare(task.chain.classifier)
        *layers, last = task.chain.layers
        self.layers = tuple(map(window_layer, layers, self.shapes[:-1]))
        self.rows = flat(last.weight.unflatten(1, self.shapes[-1]), 1).contiguous()
        self.offsets = bias(last)
        self.sizes = np.array(task.steps.sizes())
        # While points can still cross the box, most of them move, and full products are faster,
        # unless all weights stay in the cache.
        self.crossing = int((np.cumsum(self.sizes) < WIDTH - 1e-6).sum()) + 1
        small = all(layer.weight.numel() <= LARGEST_CACHED for layer in layers)
        self.full = 0 if small else self.crossing

    def climb(self, piece: slice, points: Tensor, best: Tensor, scores: Tensor) -> None:
        """Take all steps from some samples' points; keep the best of them."""
        for size in self.sizes[: self.full]:
            self._run(piece, points, best, scores, size)
        self._run(piece, points, best, scores, None)

    def _run(
        self, piece: slice, points: Tensor, best: Tensor, scores: Tensor, size: float | None
    ) -> None:
        """Take one step of some size, or all steps that are left."""
        from tightrope.attacks import increments_kernel as kernel

        hidden, slopes = self._observe(points[piece], piece)
        # Two states of a large network would not fit into the cache.
        two = len(self.layers) >= SMALLEST_DEPTH and not self.full
        crossing = self.crossing if two else len(self.sizes)
        last = (self.rows.numpy(), self.offsets.numpy())
        task = self.task
        each = (points, *task.box.corners, best, scores, task.labels, task.targets)
        numbers = [t[piece].numpy() for t in each]

        def run(part: slice) -> None:
            *search, labels, targets = (t[part] for t in numbers)
            readout = kernel.Readout(*last, labels, targets)
            if size is not None:
                kernel.step(*search, hidden[-1][part], slopes[0][part], readout, size)
                return
            kernel.climb(
                *search,
                tuple(t[part] for t in hidden),
                tuple(t[part] for t in slopes),
                self.layers,
                readout,
                self.sizes[self.full :],
                crossing,
                self._state(points.dtype),
                self._changes(points.dtype),
            )

        list(task.pool.map(run, task.share(len(numbers[0]))))

    def _observe(self, points: Tensor, piece: slice) -> tuple[list[Array], list[Array]]:
        """Return the pre-activations, and the gradients of the margins, of all layers."""
        targets, hidden = self.task.targets[piece], self.task.chain.affine[:-1]
        before, count = [i - 1 for i in hidden], targets.shape[1]
        goal = Targeted(self.task.labels[piece].repeat_interleave(count), targets.flatten())
        with torch.enable_grad():
            start = image(points.flatten(0, 1), self.shapes[0]).detach().requires_grad_()
            values = self.graph.propagate(self.rules, start, keep={*hidden, *before})
            score = goal(values[len(self.graph.nodes) - 1]).sum()
            slopes = torch.autograd.grad(score, [values[i] for i in before])
        return (
            [self._array(values[i], count) for i in hidden],
            [self._array(t, count) for t in slopes],
        )

    def _array(self, t: Tensor, count: int) -> Array:
        return flat(t.detach(), 1).contiguous().unflatten(0, (-1, count)).numpy()

    @property
    def _windows(self) -> list[int]:
        return [len(layer.backwards.runs) for layer in self.layers]

    def _state(self, dtype: torch.dtype) -> State:
        """Make room for the state of one estimator at two points."""
        from tightrope.attacks.changes_kernel import State

        point, *behind = [math.prod(shape) for shape in self.shapes]

        def room(sizes: list[int]) -> tuple[Array, ...]:
            return tuple(torch.empty(2, n, dtype=dtype).numpy() for n in sizes)

        return State(
            point=room([point])[0],
            hidden=room(behind),
            slopes=room([point, *behind[:-1]]),
            active=room(behind),
            passed=room(behind),
            alive=tuple(np.zeros((2, n), np.int64) for n in self._windows),
        )

    def _changes(self, dtype: torch.dtype) -> Changes:
        """Make room for what changes in one step."""
        from tightrope.attacks.changes_kernel import Changes

        values = [math.prod(shape) for shape in self.shapes]
        # Behind the first level, the pixels are the windows of the layer before.
        first = math.prod(self.shapes[0][1:])
        joints = [joint for layer in self.layers for joint in (layer.forwards, layer.backwards)]
        patches = [joint.weights.shape[1] for joint in joints if joint.short]
        return Changes(
            moved=torch.empty(values[0], dtype=dtype).numpy(),
            touched=tuple(np.zeros(n, np.bool_) for n in self._windows),
            stale=tuple(np.zeros(n, np.bool_) for n in [first, *self._windows[:-1]]),
            places=np.empty((2, max(values)), np.int64),
            amounts=torch.empty((2, max(values)), dtype=dtype).numpy(),
            dense=torch.zeros(max(values), dtype=dtype).numpy(),
            patch=torch.empty(max(patches, default=0), dtype=dtype).numpy(),
        )
