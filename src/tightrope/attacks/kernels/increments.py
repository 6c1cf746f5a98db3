"""The latent attack on chains of layers, worked out from what changes in a step.

Sign steps of a fifth of the width bring nearly all coordinates of a latent point to a corner
within five steps, for which full products are the faster way. From then on few coordinates move
and few ReLUs flip, so neither the outputs nor the gradients need to be computed anew: changes are
followed through the network, one estimator at a time (`increments_kernel`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tightrope.attacks.goals import Targeted
from tightrope.attacks.kernels.chains import Array, Task, bias, flat, image
from tightrope.attacks.kernels.last_layer import LastLayer, narrows
from tightrope.attacks.kernels.layouts import window_layer
from tightrope.attacks.pgd import WIDTH
from tightrope.attacks.points import prepare

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.kernels.changes_kernel import Changes, Layer, State
    from tightrope.attacks.kernels.increments_kernel import Readout


class Increments:
    """The compiled search with all that it needs to know."""

    def __init__(self, task: Task) -> None:
        self.task, self.shapes = task, task.chain.shapes
        self.graph, self.rules = prepare(task.chain.classifier)
        *layers, last = task.chain.layers
        self.layers = tuple(map(window_layer, layers, self.shapes[:-1]))
        rows = flat(last.weight.unflatten(1, self.shapes[-1]), 1).contiguous()
        self.readout = rows.numpy(), bias(last).numpy()
        self.sizes = np.array(task.steps.sizes())
        # While points can still cross the box, most of them move.
        self.full = int((np.cumsum(self.sizes) < WIDTH - 1e-6).sum()) + 1

    def climb(self, piece: slice, points: Tensor, best: Tensor, scores: Tensor) -> None:
        """Take all steps from some samples' points; keep the best of them."""
        for size in self.sizes[: self.full]:
            self._run(piece, points, best, scores, size)
        self._run(piece, points, best, scores, None)

    def _run(
        self, piece: slice, points: Tensor, best: Tensor, scores: Tensor, size: float | None
    ) -> None:
        """Take one step of some size, or all steps that are left."""
        from tightrope.attacks.kernels.increments_kernel import Readout, step

        task = self.task
        hidden, slopes = self._observe(points[piece], piece)
        each = (points, *task.box.corners, best, scores)
        search = [t[piece].numpy() for t in each]
        labels, targets = task.labels[piece].numpy(), task.targets[piece].numpy()
        last = None
        if size is None and narrows(task):
            last = LastLayer(task, self.layers[-1], piece, torch.from_numpy(hidden[-2]).relu())

        def run(part: slice) -> None:
            readout = Readout(*self.readout, labels[part], targets[part])
            mine = [t[part] for t in search]
            if size is not None:
                step(*mine, hidden[-1][part], slopes[0][part], readout, size)
            elif last is None:
                seen, below = ([t[part] for t in values] for values in (hidden, slopes))
                self._climb(mine, seen, below, self.layers, readout)
            else:
                for b in range(*part.indices(len(labels))):
                    layer, readout, behind = last.of(b, hidden[-1][b])
                    one = slice(b, b + 1)
                    mine, seen, below = ([t[one] for t in v] for v in (search, hidden, slopes))
                    seen[-1] = behind[None]
                    self._climb(mine, seen, below, (*self.layers[:-1], layer), readout)

        list(task.pool.map(run, task.share(len(labels))))

    def _climb(
        self,
        search: list[Array],
        hidden: list[Array],
        slopes: list[Array],
        layers: tuple[Layer, ...],
        readout: Readout,
    ) -> None:
        """Follow changes through all steps that are left."""
        from tightrope.attacks.kernels.increments_kernel import climb

        room = self._state(hidden), self._changes(hidden)
        sizes = self.sizes[self.full :]
        climb(*search, tuple(hidden), tuple(slopes), layers, readout, sizes, *room)

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

    def _state(self, hidden: list[Array]) -> State:
        """Make room for the state of one estimator."""
        from tightrope.attacks.kernels.changes_kernel import State

        point, behind = math.prod(self.shapes[0]), [t.shape[2] for t in hidden]

        def room(sizes: list[int]) -> tuple[Array, ...]:
            return tuple(np.empty(n, hidden[0].dtype) for n in sizes)

        return State(
            point=room([point])[0],
            hidden=room(behind),
            slopes=room([point, *behind[:-1]]),
            active=room(behind),
            passed=room(behind),
            alive=tuple(np.zeros(n, np.int64) for n in self._windows),
        )

    def _changes(self, hidden: list[Array]) -> Changes:
        """Make room for what changes in one step."""
        from tightrope.attacks.kernels.changes_kernel import Changes

        dtype, values = hidden[0].dtype, [math.prod(self.shapes[0]), *(t.shape[2] for t in hidden)]
        # Behind the first level, the pixels are the windows of the layer before.
        first = math.prod(self.shapes[0][1:])
        return Changes(
            moved=np.empty(values[0], dtype),
            touched=tuple(np.zeros(n, np.bool_) for n in self._windows),
            stale=tuple(np.zeros(n, np.bool_) for n in [first, *self._windows[:-1]]),
            places=np.empty((2, max(values)), np.int64),
            amounts=np.empty((2, max(values)), dtype),
        )
