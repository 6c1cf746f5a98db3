"""Points that are hard to enclose, and the check that bounds enclose them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from networks import points_in
from torch import Tensor

from tightrope.attacks import Steps, pgd
from tightrope.box import Box
from tightrope.graph import Graph, evaluate, ops

OPERATIONS = [op for op in ops.ALL_OPS if op is not ops.Input]
STEPS = Steps(5, size=0.7, milestones=(0.6,))


@dataclass(frozen=True)
class Extreme:
    """Maximise one output per sample (or minimise it, with a sign of -1)."""

    index: Tensor
    sign: Tensor

    def __call__(self, outputs: Tensor) -> Tensor:
        return self.sign * outputs.gather(1, self.index[:, None])[:, 0]

    def reached(self, outputs: Tensor) -> Tensor:
        return torch.zeros(len(outputs), dtype=torch.bool)

    def select(self, index: Tensor) -> Extreme:
        return Extreme(self.index[index], self.sign[index])


def copies(box: Box, count: int) -> Box:
    """Return `count` copies of a batch of boxes, one after the other."""
    return box.map(lambda t: t.repeat(count, *[1] * (t.dim() - 1)))


def attacked_points(graph: Graph, box: Box) -> Tensor:
    """Return points that push each output (at most six of them) up and down."""
    outputs = min(6, graph.output_shape[0])
    batch = len(box.lower)
    index = torch.arange(outputs).repeat_interleave(2 * batch)
    sign = torch.tensor([1.0, -1.0]).repeat_interleave(batch).repeat(outputs)
    goal = Extreme(index, sign.to(box.lower.dtype))
    return pgd(graph.detach(), copies(box, 2 * outputs), goal, steps=STEPS)


def hard_points(graph: Graph, box: Box) -> Tensor:
    """Return corners, points near faces, and attacked points; always whole rounds of boxes."""
    torch.manual_seed(0)
    return torch.cat((points_in(box, 8), attacked_points(graph, box)))


def assert_inside(
    graph: Graph,
    bounds: dict[int, Box],
    points: Tensor,
    slack: dict[int, Tensor] | None = None,
) -> None:
    """Check the value of each node at each point against the node's bounds."""
    values = graph.propagate(evaluate.RULES, points, keep=range(len(graph.nodes)))
    for i, node in enumerate(graph.nodes):
        lower, upper = bounds[i].corners
        rounds = len(points) // len(lower)
        assert lower.shape[1:] == node.shape and (lower <= upper).all()
        lower, upper = copies(Box(lower.double(), upper.double()), rounds).corners
        allowed = 0.0 if slack is None else slack[i].repeat(rounds, *[1] * len(node.shape))
        value = values[i].double()
        assert torch.isfinite(value).all()
        assert (value >= lower - allowed).all(), f"below node {i}, {node.op}"
        assert (value <= upper + allowed).all(), f"above node {i}, {node.op}"
