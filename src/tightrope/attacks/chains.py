"""The latent attack on chains of layers, by less work for the same result.

This is for chains `affine, ReLU, ..., affine` on a CPU, where an affine layer is a convolution or
a linear one. There are two ways. Small classifiers are reduced to what can change inside each box
(`reduced`); in large ones, what changes from step to step is followed (`increments`). Values are
kept with channels last, flattened.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightrope.attacks.pgd import Steps
from tightrope.box import Box
from tightrope.graph import Graph, ops

# Numbers that the compiled loops are for.
FOLLOWED = (torch.float32, torch.float64)
# Classifiers with fewer products than this are evaluated in full faster.
SMALLEST_WORK = 1 << 11
# Those with at most this many, and so many hidden layers, are reduced.
LARGEST_REDUCED = 1 << 20
DEEPEST_REDUCED = 2
# Streams of random numbers: a fixed number, so that threads have no influence on the points.
STREAMS = 32
# Pieces of work per thread: some take longer than others.
PIECES = 4

Shape = tuple[int, ...]
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
    def products(self) -> int:
        """How many products an evaluation takes."""
        sizes = [math.prod(self.classifier.nodes[i].shape) for i in self.affine]
        weights = [op.weight[0].numel() for op in self.layers]
        return sum(map(mul, sizes, weights))

    @property
    def worthwhile(self) -> bool:
        """Whether there is enough to save."""
        return self.products >= SMALLEST_WORK

    @property
    def reducible(self) -> bool:
        """Whether reducing it for each box takes less than it saves."""
        shallow = len(self.affine) - 1 <= DEEPEST_REDUCED
        return shallow and self.products <= LARGEST_REDUCED


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


@dataclass(frozen=True)
class Task:
    """What is searched: a margin per sample and wrong class, in boxes with channels last."""

    chain: Chain
    box: Box
    labels: Tensor
    targets: Tensor
    steps: Steps
    pool: ThreadPoolExecutor

    def share(self, samples: int) -> list[slice]:
        """Cut some samples into pieces of work."""
        parts = min(samples, PIECES * torch.get_num_threads())
        ends = [samples * i // parts for i in range(parts + 1)]
        return list(map(slice, ends[:-1], ends[1:]))


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
        # Drawn for the whole batch, so that the pieces have no influence on the points.
        fresh = _draw(box, count, pool) if start is None else _project(box, flat(start, 2))
        best = fresh.clone()
        scores = best.new_full(targets.shape, -torch.inf)
        each = 4 * count * sum(map(math.prod, shapes)) * best.element_size()
        size = max(1, memory // each)
        search = _search(Task(classifier, box, labels, targets, steps, pool))
        for restart in range(restarts):
            points = fresh if restart == 0 else _draw(box, count, pool)
            for begin in range(0, len(labels), size):
                search.climb(slice(begin, begin + size), points, best, scores)
    return image(best, shapes[0])


def _search(task: Task) -> ChainSearch:
    # They import what is above.
    from tightrope.attacks.increments import Increments
    from tightrope.attacks.reduced import Reduction

    return Reduction(task) if task.chain.reducible else Increments(task)


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


def flat(t: Tensor, lead: int) -> Tensor:
    """Flatten all but the leading dimensions, channels last."""
    return t.movedim(lead, -1).flatten(lead) if t.dim() == lead + 3 else t


def image(t: Tensor, shape: Shape) -> Tensor:
    """Undo `flat`."""
    if len(shape) == 1:
        return t
    return t.unflatten(-1, (*shape[1:], shape[0])).movedim(-1, -3)


def bias(op: ops.Conv2d | ops.Linear) -> Tensor:
    """Return the bias of a layer, zeros if it has none."""
    return op.weight.new_zeros(len(op.weight)) if op.bias is None else op.bias
