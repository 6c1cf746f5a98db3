"""A network as a short list of operations in topological order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightrope.deadline import check_time
from tightrope.errors import UserError
from tightrope.graph import evaluate, ops

Rules = Mapping[type[ops.Op], Callable[..., Any]]


@dataclass(frozen=True, eq=False)
class Node:
    """One operation in place: its name in the user's module, its inputs, its output shape."""

    name: str
    op: ops.Op
    inputs: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced network. The first node is the input, the last one the output."""

    nodes: tuple[Node, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input sample."""
        return self.nodes[0].shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one output."""
        return self.nodes[-1].shape

    @property
    def relus(self) -> tuple[int, ...]:
        """Positions of the ReLU nodes."""
        return tuple(i for i, node in enumerate(self.nodes) if isinstance(node.op, ops.Relu))

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the network on a batch of points."""
        return self.propagate(evaluate.RULES, x)[len(self.nodes) - 1]

    def propagate(
        self, rules: Rules, value: Any, *, keep: Collection[int] = (), **context: Any
    ) -> dict[int, Any]:
        """Push `value` through the network with a domain's `rules`, one call per node.

        Returns the values of the output node and of the positions in `keep`; everything else
        is dropped after its last use so that memory stays bounded by the widest cut.
        """
        last_use = {j: i for i, node in enumerate(self.nodes) for j in node.inputs}
        wanted = {len(self.nodes) - 1, *keep}
        values: dict[int, Any] = {0: value}
        for i, node in enumerate(self.nodes[1:], start=1):
            check_time()
            arguments = [values[j] for j in node.inputs]
            values[i] = rules[type(node.op)](node.op, *arguments, **context)
            for j in set(node.inputs):
                if last_use[j] == i and j not in wanted:
                    del values[j]
        return {i: values[i] for i in wanted}

    def replace_ops(self, replacements: Mapping[int, ops.Op]) -> Graph:
        """Return the graph with other operations at the given positions."""
        nodes = (
            replace(node, op=replacements.get(i, node.op)) for i, node in enumerate(self.nodes)
        )
        return Graph(tuple(nodes))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Graph:
        """Return the graph with `function` applied to every tensor it holds."""
        return Graph(tuple(replace(n, op=n.op.map_tensors(function)) for n in self.nodes))

    def detach(self) -> Graph:
        """Return the graph cut off from its parameters' gradients."""
        return self.map_tensors(torch.Tensor.detach)

    def to(self, target: torch.dtype | torch.device | str) -> Graph:
        """Return a copy on another device, or with floating-point tensors in another dtype."""
        if isinstance(target, torch.dtype):
            return self.map_tensors(lambda t: t.to(target) if t.is_floating_point() else t)
        return self.map_tensors(lambda t: t.to(target))

    def consumers(self) -> list[list[int]]:
        """For each node, the positions of the nodes that read it."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in node.inputs:
                readers[j].append(i)
        return readers

    def without(self, positions: Collection[int]) -> Graph:
        """Return the graph with the given one-input nodes cut out."""
        target: dict[int, int] = {}
        nodes: list[Node] = []
        for i, node in enumerate(self.nodes):
            inputs = tuple(target[j] for j in node.inputs)
            if i in positions:
                target[i] = inputs[0]
            else:
                target[i] = len(nodes)
                nodes.append(replace(node, inputs=inputs))
        return Graph(tuple(nodes))

    def fold_batchnorm(self) -> Graph:
        """Merge each BatchNorm into the linear or convolution layer right before it.

        The merged weights stay differentiable. A BatchNorm with no such layer before it (or
        whose layer is read elsewhere, too) stays a node of its own.
        """
        readers = self.consumers()
        merged: dict[int, ops.Op] = {}
        folded = set()
        for i, node in enumerate(self.nodes):
            if not isinstance(node.op, ops.BatchNorm):
                continue
            layer = node.inputs[0]
            op = self.nodes[layer].op
            if len(readers[layer]) != 1 or not _foldable(op, len(self.nodes[layer].shape)):
                continue
            merged[layer] = _merge(op, node.op)
            folded.add(i)
        return self.replace_ops(merged).without(folded)

    def split(self, relus: int) -> tuple[Graph, Graph]:
        """Cut into a feature extractor and a classifier that holds the last `relus` ReLUs.

        The cut lies right behind a ReLU (or the input), moved past operations on which
        boxes are exact (normalisation, flatten), at a node that every path goes through.
        """
        cuts = self.cuts()
        if relus not in cuts:
            choices = ", ".join(str(n) for n in sorted(cuts))
            raise UserError(
                f"the network has no split with {relus} ReLUs in the classifier; "
                f"possible numbers: {choices}"
            )
        cut = cuts[relus]
        start = Node("latent", ops.Input(), (), self.nodes[cut].shape)
        rest = (
            replace(node, inputs=tuple(j - cut for j in node.inputs))
            for node in self.nodes[cut + 1 :]
        )
        return Graph(self.nodes[: cut + 1]), Graph((start, *rest))

    def cuts(self) -> dict[int, int]:
        """Map each possible number of classifier ReLUs to the position of its cut."""
        exact_on_boxes = (ops.Reshape, ops.Permute, ops.Shift, ops.Scale)
        last_use = {j: i for i, node in enumerate(self.nodes) for j in node.inputs}
        found: dict[int, int] = {}
        behind, before_is_cut, furthest = len(self.relus), False, -1
        for i, node in enumerate(self.nodes[:-1]):
            behind -= isinstance(node.op, ops.Relu)
            crossed = furthest > i  # a later node reads something from before this one
            behind_relu = isinstance(node.op, ops.Relu | ops.Input)
            moved = before_is_cut and isinstance(node.op, exact_on_boxes)
            before_is_cut = not crossed and (behind_relu or moved)
            if before_is_cut:
                found[behind] = i
            furthest = max(furthest, last_use.get(i, -1))
        return found


def prune(nodes: Sequence[Node], output: int) -> tuple[Graph, dict[int, int]]:
    """Keep what the output depends on, with the output last; also say where each node went."""
    needed = {0, output}
    for i in range(output, -1, -1):
        if i in needed:
            needed.update(nodes[i].inputs)
    order = sorted(needed)
    place = {old: new for new, old in enumerate(order)}
    kept = (
        Node(nodes[i].name, nodes[i].op, tuple(place[j] for j in nodes[i].inputs), nodes[i].shape)
        for i in order
    )
    return Graph(tuple(kept)), place


def _foldable(op: ops.Op, dims: int) -> bool:
    # A Linear on more than one dimension puts its features last, BatchNorm its channels first.
    return isinstance(op, ops.Conv2d) or (isinstance(op, ops.Linear) and dims == 1)


def _merge(layer: ops.Op, norm: ops.BatchNorm) -> ops.Op:
    assert isinstance(layer, ops.Linear | ops.Conv2d)
    factor, offset = evaluate.batchnorm_map(norm)
    weight = layer.weight * factor.view(-1, *[1] * (layer.weight.dim() - 1))
    bias = offset if layer.bias is None else layer.bias * factor + offset
    return replace(layer, weight=weight, bias=bias)
