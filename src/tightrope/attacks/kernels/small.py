"""Small networks on a CPU, many points at a time.

Where a network has only a few channels, the library's convolutions cannot keep the processor
busy. Here 16 points share the registers instead: the tiny network of the paper's precision figure
is attacked several times faster.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.attacks.kernels.chains import FOLLOWED, Array, Chain, chain, flat, image
from tightrope.attacks.kernels.windows import lay_out
from tightrope.compiling import in_time
from tightrope.devices import launches
from tightrope.graph import Graph, ops

# Networks with more products per point than this are faster in the library.
LARGEST_WORK = 1 << 14


def small_network(graph: Graph) -> SmallNetwork | None:
    """Return a small chain of layers, behind a normalisation, ready for points."""
    cut = len(graph.relus)
    if cut not in graph.cuts():
        return None
    before, behind = graph.split(cut)
    found = chain(behind)
    if found is None or found.products > LARGEST_WORK:
        return None
    if not any(isinstance(op, ops.Conv2d) for op in found.layers):
        return None
    kinds = {(op.weight.device.type, op.weight.dtype) for op in found.layers}
    fits = len(kinds) == 1 and kinds <= {("cpu", dtype) for dtype in FOLLOWED}
    return SmallNetwork(before, found) if fits else None


class SmallNetwork:
    """A network `normalisation, affine, ReLU, ..., affine` without parameter gradients."""

    def __init__(self, before: Graph, behind: Chain) -> None:
        self.before, self.shape = before, behind.shapes[0]
        self.layers = tuple(map(lay_out, behind.layers, behind.shapes))
        self.dtype = behind.layers[0].weight.dtype
        sizes = [*map(math.prod, behind.shapes), *behind.classifier.output_shape]
        self.classes = sizes[-1]
        self.levels = np.cumsum([0, *(n + 1 for n in sizes)])

    def suits(self, points: Tensor) -> bool:
        """Return whether points can be evaluated here."""
        if launches(points) or points.dtype != self.dtype:
            return False
        from tightrope.attacks.kernels.small_kernel import backwards, forwards

        return in_time(forwards) and in_time(backwards)

    def __call__(self, points: Tensor) -> Tensor:
        """Evaluate a batch of points."""
        outputs: Tensor = _Evaluation.apply(self.before(points), self)
        return outputs

    def rows(self, *lead: int) -> Array:
        """Make room for the values of 16 points."""
        from tightrope.attacks.kernels.lanes_kernel import LANES

        return torch.zeros(*lead, int(self.levels[-1]) * LANES, dtype=self.dtype).numpy()


class _Evaluation(torch.autograd.Function):
    """The compiled evaluation and its gradient."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, network: SmallNetwork) -> Tensor:
        from tightrope.attacks.kernels.lanes_kernel import LANES
        from tightrope.attacks.kernels.small_kernel import forwards

        ctx.network, ctx.values = network, network.rows(-(-len(points) // LANES))
        outputs = points.new_empty(len(points), network.classes)
        numbers = flat(points.detach(), 1).contiguous().numpy()
        forwards(numbers, network.layers, network.levels, ctx.values, outputs.numpy())
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from tightrope.attacks.kernels.small_kernel import backwards

        network = ctx.network
        result = grads[0].new_empty(len(grads[0]), math.prod(network.shape))
        gradients = grads[0].contiguous().numpy()
        arguments = (network.layers, network.levels, ctx.values, network.rows(), result.numpy())
        backwards(gradients, *arguments)
        return image(result, network.shape), None
