"""Boxes of maxima, minima and absolute values, which are sums of parts that depend on each other.

Intervals would bound the parts apart. What they are made of is recognised, and its own box taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tightrope.box import Box
from tightrope.graph import Graph, ops
from tightrope.graph.halves import below_zero
from tightrope.graph.maxpool import maximum_of


def as_extremum(graph: Graph, boxes: Mapping[int, Box], i: int, bounds: Box) -> Box:
    """Tighten a node's box if it is a maximum, a minimum, `relu(-x)` or `|x|` of earlier nodes."""
    found = _known(graph, boxes, i)
    if found is None:
        return bounds
    lower = torch.maximum(bounds.lower, found.lower)
    return Box(lower, torch.maximum(lower, torch.minimum(bounds.upper, found.upper)))


def _known(graph: Graph, boxes: Mapping[int, Box], i: int) -> Box | None:
    pair = maximum_of(graph, i)
    if pair is not None:
        a, b = (boxes[j] for j in pair)
        return Box(torch.maximum(a.lower, b.lower), torch.maximum(a.upper, b.upper))
    pair = _minimum_of(graph, i)
    if pair is not None:
        a, b = (boxes[j] for j in pair)
        return Box(torch.minimum(a.lower, b.lower), torch.minimum(a.upper, b.upper))
    source = below_zero(graph, i)
    if source is not None:
        lower, upper = boxes[source].corners
        return Box((-upper).clamp(min=0), (-lower).clamp(min=0))
    source = _absolute_of(graph, i)
    if source is not None:
        lower, upper = boxes[source].corners
        return Box(torch.maximum(lower, -upper).clamp(min=0), torch.maximum(-lower, upper))
    return None


def _minimum_of(graph: Graph, i: int) -> tuple[int, int] | None:
    """Return the two nodes whose minimum a node is, if it is `a - relu(a - b)`."""
    node = graph.nodes[i]
    if not isinstance(node.op, ops.Sub):
        return None
    first, bent = node.inputs
    if not isinstance(graph.nodes[bent].op, ops.Relu):
        return None
    gap = graph.nodes[graph.nodes[bent].inputs[0]]
    if not isinstance(gap.op, ops.Sub) or gap.inputs[0] != first:
        return None
    return first, gap.inputs[1]


def _absolute_of(graph: Graph, i: int) -> int | None:
    """Return x if a node is `relu(x) + (relu(x) - x)`."""
    node = graph.nodes[i]
    if not isinstance(node.op, ops.Add):
        return None
    above, below = node.inputs
    source = below_zero(graph, below)
    return source if source is not None and graph.nodes[below].inputs[0] == above else None
