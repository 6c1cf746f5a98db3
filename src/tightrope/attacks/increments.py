"""The latent attack on chains of layers, worked out from what changes in a step.

Sign steps of a fifth of the width bring nearly all coordinates of a latent point to a corner
within five steps. From then on few coordinates move and few ReLUs flip, so neither the outputs
nor the gradients need to be computed anew: changes are followed through the network, one
estimator at a time (`increments_kernel`).

This is for chains `affine, ReLU, ..., affine` on a CPU, where an affine layer is a convolution or
a linear one. Values are kept with channels last, flattened.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightrope.attacks.goals import Targeted
from tightrope.attacks.layouts import Shape, flat, image, matrix_layer, window_layer
from tightrope.attacks.pgd import WIDTH, Steps
from tightrope.attacks.points import prepare
from tightrope.box import Box
from tightrope.graph import Graph, ops

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.changes_kernel import Changes, State

# Classifiers with fewer products than this are evaluated in full faster.
SMALLEST_WORK = 1 << 11
# Layers with at most this many pairs of inputs and outputs are taken as one matrix.
LARGEST_MATRIX = 1 << 15
# The weights of a small layer stay in the processor's cache.
LARGEST_CACHED = 1 << 16
# Changes of a single layer are followed so fast that a second state does not pay.
SMALLEST_DEPTH = 2
# Pieces of work per thread: some take longer than others.
PIECES = 4
# Streams of random numbers: a fixed number, so that threads have no influence on the points.
STREAMS = 32

Array = NDArray[Any]


@dataclass(frozen=True)
class Chain:
    """A classifier `affine, ReLU, ..., affine`, and where its affine layers are."""

    classifier: Graph
    affine: tuple[int, ...]

    @property
    def layers(self) -> list[ops.Conv2d | ops.Linear]:
        """The affine layers."""
        found = [self.classifier.nodes[i].op for i in self.affine]
        return [op for op in found if isinstance(op, ops.Conv2d | ops.Linear)]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the points and of the hidden values."""
        nodes = self.classifier.nodes
        return [nodes[0].shape, *(nodes[i].shape for i in self.affine[:-1])]

    @property
    def tiny(self) -> bool:
        """Whether all layers but the last are small enough to be taken as matrices."""
        sizes = list(map(math.prod, self.shapes))
        return all(n * m <= LARGEST_MATRIX for n, m in pairwise(sizes))

    @property
    def worthwhile(self) -> bool:
        """Whether there is enough to save."""
        sizes = [math.prod(self.classifier.nodes[i].shape) for i in self.affine]
        weights = [op.weight[0].numel() for op in self.layers]
        return sum(map(mul, sizes, weights)) >= SMALLEST_WORK


def chain(classifier: Graph) -> Chain | None:
    """Return the classifier as a chain, if it is one."""
    affine, activated, spatial = [], True, len(classifier.input_shape) == 3
    for i, node in enumerate(classifier.nodes[1:], start=1):
        op = node.op
        if node.inputs != (i - 1,):
            return None
        if isinstance(op, ops.Reshape) and spatial and activated and len(op.shape) == 1:
            spatial = False
        elif isinstance(op, ops.Relu) and not activated:
            activated = True
        elif activated and (_is_plain(op) if spatial else isinstance(op, ops.Linear)):
            affine.append(i)
            activated = False
        else:
            return None
    ends = len(affine) > 1 and not activated and not spatial
    return Chain(classifier, tuple(affine)) if ends and len(classifier.input_shape) != 2 else None


def _is_plain(op: ops.Op) -> bool:
    return isinstance(op, ops.Conv2d) and op.groups == 1 and op.dilation == (1, 1)


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
        # Drawn for the whole batch, so that the pieces have no influence on the points.
        fresh = _draw(box, count, pool) if start is None else _project(box, flat(start, 2))
        best = fresh.clone()
        scores = best.new_full(targets.shape, -torch.inf)
        each = 4 * count * sum(map(math.prod, shapes)) * best.element_size()
        size = max(1, memory // each)
        search = _Search(classifier, box, labels, targets, steps, pool)
        for restart in range(restarts):
            points = fresh if restart == 0 else _draw(box, count, pool)
            for begin in range(0, len(labels), size):
                search.climb(slice(begin, begin + size), points, best, scores)
    return image(best, shapes[0])


def _draw(box: Box, count: int, pool: ThreadPoolExecutor) -> Tensor:
    """Draw points as `Box.sample` does, on all threads."""
    points = box.lower.new_empty(len(box.lower), count, box.lower.shape[1])
    seeds = np.random.SeedSequence(int(torch.randint(1 << 62, ()))).spawn(STREAMS)
    parts = zip(*(np.array_split(t.numpy(), STREAMS) for t in (points, *box.corners)), strict=True)

    def fill(seed: np.random.SeedSequence, arrays: tuple[Array, ...]) -> None:
        part, lower, upper = arrays
        np.random.Generator(np.random.SFC64(seed)).random(out=part, dtype=part.dtype.type)
        lower, upper = lower[:, None], upper[:, None]
        np.multiply(part, upper - lower, out=part)
        np.add(part, lower, out=part)
        # Rounding may lead out of the box by a unit in the last place.
        np.clip(part, lower, upper, out=part)

    list(pool.map(fill, seeds, parts))
    return points


def _project(box: Box, points: Tensor) -> Tensor:
    lower, upper = (t.unsqueeze(1) for t in box.corners)
    return torch.clamp(points, lower, upper).contiguous()


class _Search:
    """The compiled search with all that it needs to know."""

    def __init__(
        self,
        classifier: Chain,
        box: Box,
        labels: Tensor,
        targets: Tensor,
        steps: Steps,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.pool = pool
        self.chain, self.box, self.labels, self.targets = classifier, box, labels, targets
        self.shapes = classifier.shapes
        self.graph, self.rules = prepare(classifier.classifier)
        *layers, last = classifier.layers
        lay_out = matrix_layer if classifier.tiny else window_layer
        self.layers = tuple(map(lay_out, layers, self.shapes[:-1]))
        rows = last.weight.unflatten(1, self.shapes[-1])
        self.rows = flat(rows, 1).contiguous()
        self.offsets = rows.new_zeros(len(rows)) if last.bias is None else last.bias
        self.sizes = np.array(steps.sizes())
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
        each = (points, *self.box.corners, best, scores, self.labels, self.targets)
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

        samples = len(numbers[0])
        parts = min(samples, PIECES * torch.get_num_threads())
        ends = [samples * i // parts for i in range(parts + 1)]
        list(self.pool.map(run, map(slice, ends[:-1], ends[1:])))

    def _observe(self, points: Tensor, piece: slice) -> tuple[list[Array], list[Array]]:
        """Return the pre-activations, and the gradients of the margins, of all layers."""
        count = self.targets.shape[1]
        goal = Targeted(self.labels[piece].repeat_interleave(count), self.targets[piece].flatten())
        hidden, before = self.chain.affine[:-1], [i - 1 for i in self.chain.affine[:-1]]
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
        first = 1 if self.chain.tiny else math.prod(self.shapes[0][1:])
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
