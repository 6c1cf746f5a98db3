"""Max pools written with ReLUs: `max(a, b) = a + relu(b - a)`.

Branch and bound splits ReLUs. A max pool becomes a balanced tree of such maxima over the slices
that hold the first, second, ... input of every window.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tightrope.graph import ops
from tightrope.graph.graph import Graph, Node
from tightrope.graph.windows import sides

# A maximum of more numbers would be a tree of thousands of operations.
LARGEST_WINDOW = 1024

# What only rearranges, repeats or averages values leaves them nonnegative.
_MOVE = (ops.Reshape, ops.Permute, ops.Slice, ops.Take, ops.Concat)
_KEEP_SIGN = (*_MOVE, ops.AvgPool, ops.MaxPool, ops.Add)


def expand_max_pools(graph: Graph) -> Graph:
    """Return the same network with its max pools written as slices, differences and ReLUs.

    Where windows reach over the edge, the input is padded with zeros first. That is exact only
    if it has no negative values (it comes from a ReLU); other such pools, and pools of very large
    windows, stay as they are.
    """
    writer = _Writer()
    for i, node in enumerate(graph.nodes):
        inputs = tuple(writer.target[j] for j in node.inputs)
        if isinstance(node.op, ops.MaxPool):
            pool = _Pool(node.op, graph.nodes[node.inputs[0]].shape, node.shape[1:])
            edges = pool.edges()
            exact = not any(edges) or _nonnegative(graph, node.inputs[0])
            small = math.prod(node.op.kernel) <= LARGEST_WINDOW
            if exact and small and pool.reaches_input():
                writer.target[i] = writer.expand(node, pool, inputs[0])
                continue
        writer.target[i] = writer.append(replace(node, inputs=inputs))
    return Graph(tuple(writer.nodes))


class _Pool:
    """The geometry of one max pool of images [C, H, W], with so many windows along each side."""

    def __init__(self, op: ops.MaxPool, before: tuple[int, ...], counts: tuple[int, ...]) -> None:
        self.before = before
        self.sides = tuple(zip(sides(op, before), counts, strict=True))

    def edges(self) -> tuple[int, ...]:
        """Return how far windows reach over the edges, as `Pad` wants it: right side first."""
        reach = [(side.before, side.overhang(count)) for side, count in reversed(self.sides)]
        return (*reach[0], *reach[1])

    def reaches_input(self) -> bool:
        """Return whether every window holds at least one input."""
        return all(
            any(0 <= side.start(i) + k * side.dilation < side.size for k in range(side.kernel))
            for side, count in self.sides
            for i in range(count)
        )

    def taps(self) -> list[ops.Slice]:
        """Return the slices of the padded input with one input of every window each."""
        rows, columns = (
            [side.tap(k, count) for k in range(side.kernel)] for side, count in self.sides
        )
        return [ops.Slice((slice(None), row, column)) for row in rows for column in columns]


class _Writer:
    """The new network in the making; `target` maps old positions to new ones."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.target: dict[int, int] = {}

    def append(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def expand(self, node: Node, pool: _Pool, source: int) -> int:
        """Append the tree of a max pool and return the position of its root."""
        edges = pool.edges()
        if any(edges):
            channels, height, width = pool.before
            shape = (channels, height + edges[2] + edges[3], width + edges[0] + edges[1])
            pad = Node(f"{node.name}.pad", ops.Pad(edges, 0.0), (source,), shape)
            source = self.append(pad)
        level = [
            self.append(Node(f"{node.name}.tap{k}", tap, (source,), node.shape))
            for k, tap in enumerate(pool.taps())
        ]
        count = 0
        while len(level) > 1:
            pairs = list(zip(level[::2], level[1::2], strict=False))
            left_over = level[-1:] if len(level) % 2 else []
            level = []
            for a, b in pairs:
                level.append(self._maximum(f"{node.name}.max{count}", a, b, node.shape))
                count += 1
            level += left_over
        return level[0]

    def _maximum(self, name: str, a: int, b: int, shape: tuple[int, ...]) -> int:
        gap = self.append(Node(f"{name}.gap", ops.Sub(), (b, a), shape))
        rise = self.append(Node(f"{name}.relu", ops.Relu(), (gap,), shape))
        return self.append(Node(name, ops.Add(), (a, rise), shape))


def _nonnegative(graph: Graph, position: int) -> bool:
    """Return whether a node has no negative values, whatever the input is."""
    node = graph.nodes[position]
    if isinstance(node.op, ops.Relu | ops.Sigmoid):
        return True
    padded = isinstance(node.op, ops.Pad) and node.op.value >= 0
    if padded or isinstance(node.op, _KEEP_SIGN):
        return all(_nonnegative(graph, j) for j in node.inputs)
    return False


def maximum_of(graph: Graph, position: int) -> tuple[int, int] | None:
    """Return the two nodes whose maximum a node is, if it is `a + relu(b - a)`."""
    node = graph.nodes[position]
    if not isinstance(node.op, ops.Add):
        return None
    first, bent = node.inputs
    if not isinstance(graph.nodes[bent].op, ops.Relu):
        return None
    gap = graph.nodes[graph.nodes[bent].inputs[0]]
    if not isinstance(gap.op, ops.Sub) or gap.inputs[1] != first:
        return None
    return first, gap.inputs[0]
