"""A network on a batch of boxes: bounds on its nodes, lines of its activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.budget import fitting, rows_at_once
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.magnitudes import magnitudes
from tightrope.domains.linear.relaxations import Lines, lines
from tightrope.domains.linear.rules import (
    ACTIVATIONS,
    BOXED,
    RULES,
    ActivationRule,
    Form,
    backward,
    by_intervals,
    pull_activation,
)
from tightrope.graph import Graph, ops
from tightrope.graph.work import heaviest

MEMORY = 1 << 30  # bytes for the coefficients of one chunk of rows
COPIES = 8  # of its coefficients that a row needs on its way back


@dataclass(frozen=True)
class Relaxation:
    """What is known of a network on a batch of boxes.

    `boxes` are bounds of nodes by position, at least of the input and of what activations read;
    `lines` follow from them. With `rounding`, everything holds in exact arithmetic and `terms`
    are the magnitudes that rounding errors are measured by.
    """

    graph: Graph
    boxes: dict[int, Box]
    lines: dict[int, Lines]
    terms: dict[int, Tensor]
    rounding: float

    @property
    def box(self) -> Box:
        """The input's box."""
        return self.boxes[0]

    @property
    def output(self) -> int:
        """Position of the output."""
        return len(self.graph.nodes) - 1

    @cached_property
    def rough(self) -> Relaxation:
        """The same in float32, to search with."""
        boxes = {i: b.map(torch.Tensor.float) for i, b in self.boxes.items()}
        rough = {i: Lines(*(t.float() for t in line)) for i, line in self.lines.items()}
        return Relaxation(self.graph.to(torch.float32), boxes, rough, {}, 0.0)

    def known(self, element: int) -> dict[int, Box]:
        """Return the bounds of one batch element that `relaxed` needs to start from."""
        nodes = self.graph.nodes
        needed = {0, self.output, *(nodes[i].inputs[0] for i in self.lines)}
        needed.update(j for node in nodes if isinstance(node.op, BOXED) for j in node.inputs)
        needed.update(i for i, node in enumerate(nodes) if isinstance(node.op, ops.Function))
        jumps = [i for i, node in enumerate(nodes) if RULES.get(type(node.op)) is by_intervals]
        needed.update(jumps, (j for i in jumps for j in nodes[i].inputs))
        return {i: self.boxes[i][element : element + 1] for i in sorted(needed)}

    def pull(
        self,
        target: int,
        rows: Coefficients,
        *,
        lines: Mapping[int, Lines] | None = None,
        slopes: Mapping[int, Tensor] | None = None,
        activation: ActivationRule | None = None,
        stop: int = 0,
    ) -> Form:
        """Pull linear functions of a node back to the input, or to the node at `stop`.

        Lower slopes of unstable neurons may be given per row, or another rule for activations.
        """
        return backward(
            self.graph,
            target,
            rows,
            self.lines if lines is None else lines,
            boxes=self.boxes,
            activation=activation or partial(pull_activation, slopes=slopes),
            magnitudes=self.terms if self.rounding else None,
            rounding=self.rounding,
            stop=stop,
        )

    def lower(
        self,
        target: int,
        rows: Coefficients,
        *,
        slopes: Mapping[int, Tensor] | None = None,
        stop: int = 0,
    ) -> Tensor:
        """Return lower bounds of linear functions of a node, one per row, some rows at a time."""
        parts = rows.split(self.rows_at_once(target)) if slopes is None else [rows]
        bounds = [
            self.pull(target, part, slopes=slopes, stop=stop).minimum(
                self.box, rounding=self.rounding
            )
            for part in parts
        ]
        return bounds[0] if len(bounds) == 1 else torch.cat(bounds)

    def rows_at_once(self, target: int, memory: int = MEMORY) -> int:
        """Return how many dense rows of a node fit into memory, and into a step."""
        before, like = self.graph.nodes[: target + 1], self.box.lower
        widest = max(math.prod(node.shape) for node in before)
        each = COPIES * widest * like.element_size()
        return rows_at_once(fitting(memory, like.device), each, heaviest(before))


def relaxed(graph: Graph, boxes: Mapping[int, Box], *, rounding: float = 0.0) -> Relaxation:
    """Return the relaxation that follows from bounds on the input of every activation."""
    chosen = {
        i: lines(node.op, boxes[node.inputs[0]], rounding=rounding)
        for i, node in enumerate(graph.nodes)
        if isinstance(node.op, ACTIVATIONS)
    }
    terms = magnitudes(graph, boxes) if rounding else {}
    return Relaxation(graph, dict(boxes), chosen, terms, rounding)
