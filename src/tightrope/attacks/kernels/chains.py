"""Chains of layers `affine, ReLU, ..., affine`, and what is searched in them.

An affine layer is a convolution or a linear one. The compiled loops keep values with channels
last, flattened.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import mul
from typing import Any

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
