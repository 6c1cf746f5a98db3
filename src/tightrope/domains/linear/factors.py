"""Which numbers of a network vary on a box by more than rounding errors, and which products do.

A product with a number that does not vary is linear in its other factor, whose bounds then make no
difference: masks that are given with the input, or sums of them that are divided by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, ops

# Narrower boxes, relative to their size, are numbers.
THIN = 2.0**-40
TINY = 1e-200
PRODUCTS = (ops.Mul, ops.MatMul)


def varies(box: Box) -> Tensor:
    """Return which numbers of a box vary by more than rounding errors."""
    lower, upper = box.corners
    size = torch.maximum(lower.abs(), upper.abs())
    return ~(upper - lower <= THIN * size + TINY)  # what is not a number may be anything


class Factors:
    """Which factors of products vary, as far as intervals can tell."""

    def __init__(self, graph: Graph, box: Box, rounding: float) -> None:
        self.graph = graph
        nodes = graph.nodes
        factors = {j for node in nodes if isinstance(node.op, PRODUCTS) for j in node.inputs}
        self.varies: dict[int, Tensor] = {}
        if not factors:
            return
        boxes = {0: box}
        for i, node in enumerate(nodes[: max(factors) + 1]):
            if i:
                inputs = [boxes[j] for j in node.inputs]
                boxes[i] = interval.RULES[type(node.op)](node.op, *inputs, rounding=rounding)
            if i in factors:
                self.varies[i] = varies(boxes[i])

    def bend(self, i: int, product: int) -> Tensor:
        """Return at which numbers of node i a product that reads it is not linear in them."""
        node, shape = self.graph.nodes[product], self.graph.nodes[i].shape
        first, second = node.inputs
        other = self.varies[second if first == i else first]
        if isinstance(node.op, ops.MatMul):
            some = other.flatten(1).any(1)
            return some.view(-1, *(1 for _ in shape)).expand(-1, *shape)
        for d, size in enumerate(shape, start=1):
            if size == 1 and other.shape[d] > 1:  # it meets all of them
                other = other.any(d, keepdim=True)
        return other.expand(-1, *shape)
