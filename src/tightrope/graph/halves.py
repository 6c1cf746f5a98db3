"""One ReLU for both halves of a number: `relu(-x) = relu(x) - x`.

Absolute values and slopes below zero are written with `relu(x)` and `relu(-x)`, which boxes are
exact on. Branch and bound would split both, and linear bounds would enclose them apart.
"""

from __future__ import annotations

from dataclasses import replace

from tightrope.graph import ops
from tightrope.graph.graph import Graph, Node, prune


def share_halves(graph: Graph) -> Graph:
    """Return the same network with `relu(-x)` as a difference wherever there is a `relu(x)`."""
    rectified: dict[int, int] = {}
    nodes: list[Node] = []
    for i, node in enumerate(graph.nodes):
        if isinstance(node.op, ops.Relu):
            rectified.setdefault(node.inputs[0], i)
            source = negated(graph, node.inputs[0])
            if source is not None and source in rectified:
                node = replace(node, op=ops.Sub(), inputs=(rectified[source], source))
        nodes.append(node)
    return prune(nodes, len(nodes) - 1)[0]


def negated(graph: Graph, position: int) -> int | None:
    """Return the node that a node is minus one times of."""
    node = graph.nodes[position]
    if not isinstance(node.op, ops.Scale) or node.op.factor.numel() != 1:
        return None
    return node.inputs[0] if float(node.op.factor) == -1 else None


def below_zero(graph: Graph, position: int) -> int | None:
    """Return x if a node is `relu(x) - x`."""
    node = graph.nodes[position]
    if not isinstance(node.op, ops.Sub):
        return None
    first, second = node.inputs
    above = graph.nodes[first]
    return second if isinstance(above.op, ops.Relu) and above.inputs == (second,) else None
