"""How much is computed: multiply-adds of operations and of whole networks, for one input."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tightrope.graph import ops
from tightrope.graph.graph import Node


def fan_in(op: ops.Op) -> int:
    """Return how many numbers are multiplied, or looked at, for each number of the result."""
    weight = getattr(op, "weight", None)
    if weight is not None and weight.dim() > 1:
        return int(weight[0].numel())
    return math.prod(getattr(op, "kernel", ()))


def products(nodes: Sequence[Node]) -> int:
    """Return how many numbers are multiplied, or looked at, by some nodes."""
    return sum(math.prod(node.shape) * fan_in(node.op) for node in nodes)


def heaviest(nodes: Sequence[Node]) -> int:
    """Return how many are by the one that takes most."""
    return max(math.prod(node.shape) * fan_in(node.op) for node in nodes)
