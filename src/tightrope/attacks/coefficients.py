"""Points of latent zonotopes by their error coefficients, and an attack on these.

A ball and a strip `slope * x + offset (1 ± 1)` around each neuron of the first ReLUs make a
zonotope behind these ReLUs. Its points have coordinates e in [-1, 1], one for every input and one
for every neuron of those ReLUs: begin at `centre + radius e`, and put `slope * x + offset (1 + e)`
for a ReLU. So the largest loss in the zonotope is looked for by PGD in the box of coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tightrope.attacks.goals import Goal
from tightrope.attacks.pgd import Network, Steps, pgd
from tightrope.attacks.points import prepare
from tightrope.box import Box
from tightrope.deadline import check_time
from tightrope.graph import Graph, evaluate, ops
from tightrope.graph.graph import Rules
from tightrope.precision import search_type

Line = tuple[Tensor, Tensor]  # slope and offset, [batch, *shape]


@dataclass(frozen=True, eq=False)
class _Strip(ops.Op):
    """A ReLU whose error coefficients are those of group `number`."""

    slope: Tensor
    offset: Tensor
    number: int


class LatentZonotope:
    """A network as a function of error coefficients: [batch, coefficients].

    `lines` maps positions of ReLUs to their strips; other ReLUs stay what they are.
    """

    def __init__(self, graph: Graph, ball: Box, lines: Mapping[int, Line]) -> None:
        self.ball = ball.detach()
        places = sorted(lines)
        strips = {i: _Strip(*lines[i], number) for number, i in enumerate(places, start=1)}
        self.graph = graph.replace_ops(strips).detach()
        self.shapes = [graph.input_shape, *(graph.nodes[i].shape for i in places)]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    @property
    def box(self) -> Box:
        """Where the coefficients are: each between -1 and 1."""
        ones = self.ball.center.new_ones(len(self.ball.center), sum(self.sizes))
        return Box(-ones, ones)

    def point(self, coefficients: Tensor, position: int) -> Tensor:
        """Return the point of the zonotope at a node."""
        body = Graph(self.graph.nodes[: position + 1])
        return self._evaluate(body, evaluate.RULES, coefficients)

    def worst(self, goal: Goal, steps: Steps) -> Tensor:
        """Return the coefficients to which PGD leads from a random start."""
        return pgd(self._network(), self.box, goal, steps=steps, keep="last")

    def _network(self) -> Network:
        """Return the whole network, made ready for many gradients."""

        @cache
        def prepared(kind: torch.dtype) -> tuple[Graph, Rules]:
            return prepare(self.graph.to(kind))

        def network(coefficients: Tensor) -> Tensor:
            check_time()
            kind = search_type(coefficients)
            return self._evaluate(*prepared(kind), coefficients.to(kind)).to(coefficients.dtype)

        return network

    def _evaluate(self, graph: Graph, rules: Rules, coefficients: Tensor) -> Tensor:
        """Evaluate the network where the coefficients say."""
        parts = coefficients.split(self.sizes, 1)
        errors = [_image(e, shape) for e, shape in zip(parts, self.shapes, strict=True)]

        def strip(op: _Strip, x: Tensor) -> Tensor:
            return op.slope * x + op.offset * (1 + errors[op.number])

        center, radius = (t.to(coefficients.dtype) for t in self.ball.middle)
        everything: Rules = {**rules, _Strip: strip}
        start: Any = center + radius * errors[0]
        found: Tensor = graph.propagate(everything, start)[len(graph.nodes) - 1]
        return found


def _image(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return rows of numbers as samples; images have their channels last in memory."""
    if len(shape) != 3:
        return rows.unflatten(1, shape)
    channels, height, width = shape
    return rows.unflatten(1, (height, width, channels)).permute(0, 3, 1, 2)
