"""Bounds on every neuron of a network: CROWN-IBP, CROWN and alpha-CROWN.

`relax` walks the network once. Interval bounds come first at every node; before an activation,
rows of linear bounds tighten the neurons that are still undecided (none for CROWN-IBP), with
slopes optimised or not. What it returns, a `Relaxation`, bounds any linear function of the
outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.alpha import optimize_slopes, work_per_row
from tightrope.domains.coefficients import Coefficients, unit_rows
from tightrope.domains.linear import ACTIVATIONS, Extra, backward
from tightrope.domains.magnitudes import magnitudes
from tightrope.domains.relaxations import Lines, lines, unstable
from tightrope.graph import Graph, ops

MEMORY = 1 << 30  # bytes for the coefficients of one chunk of rows
WORK = 1e11  # multiply-adds that optimising the slopes of one layer may take
COPIES = 8  # of its coefficients that a row needs on its way back


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    `iterations` optimises slopes (0: CROWN with the default ones, None: CROWN-IBP, interval
    bounds before all activations). Layers whose optimisation would take more than `work`
    multiply-adds keep default slopes.
    """

    iterations: int | None = 20
    rate: float = 0.25
    memory: int = MEMORY
    work: float = WORK


ALPHA = Effort()
CROWN = Effort(iterations=0)
CROWN_IBP = Effort(iterations=None)


@dataclass(frozen=True)
class Relaxation:
    """A network on a batch of boxes: bounds on its nodes and lines of its activations."""

    graph: Graph
    boxes: dict[int, Box]
    lines: dict[int, Lines]
    rounding: float

    @property
    def output(self) -> int:
        """Position of the output."""
        return len(self.graph.nodes) - 1

    @cached_property
    def magnitudes(self) -> dict[int, Tensor] | None:
        """What rounding errors are measured by; None where they don't matter."""
        last = max(self.boxes)
        return magnitudes(self.graph, self.boxes, upto=last) if self.rounding else None

    @cached_property
    def rough(self) -> Relaxation:
        """The same in float32, to search with."""
        boxes = {i: Box(b.lower.float(), b.upper.float()) for i, b in self.boxes.items()}
        rough = {i: Lines(*(t.float() for t in line)) for i, line in self.lines.items()}
        return Relaxation(self.graph.to(torch.float32), boxes, rough, 0.0)

    def select(self, index: Tensor) -> Relaxation:
        """Return the relaxation of some batch elements."""
        boxes = {i: box[index] for i, box in self.boxes.items()}
        chosen = {i: Lines(*(t[index] for t in line)) for i, line in self.lines.items()}
        return Relaxation(self.graph, boxes, chosen, self.rounding)

    def known(self, element: int) -> dict[int, Box]:
        """Return the bounds of one batch element that `relaxed` needs to start from."""
        nodes = self.graph.nodes
        needed = {0, self.output, *(nodes[i].inputs[0] for i in self.lines)}
        pools = (node.inputs[0] for node in nodes if isinstance(node.op, ops.MaxPool))
        return {i: self.boxes[i][element : element + 1] for i in sorted(needed.union(pools))}

    def lower(
        self,
        target: int,
        rows: Coefficients,
        *,
        slopes: Mapping[int, Tensor] | None = None,
        extras: Mapping[int, Extra] | None = None,
    ) -> Tensor:
        """Return lower bounds of linear functions of a node, one per row."""
        form = backward(
            self.graph,
            target,
            rows,
            self.lines,
            boxes=self.boxes,
            slopes=slopes,
            extras=extras,
            magnitudes=self.magnitudes,
            rounding=self.rounding,
        )
        return form.minimum(self.boxes[0], rounding=self.rounding)


def relax(graph: Graph, box: Box, *, effort: Effort = ALPHA, rounding: float = 0.0) -> Relaxation:
    """Bound all nodes of a network on a batch of boxes.

    For proofs, `graph` and `box` are float64 and `rounding` is `torch.finfo(float64).eps`.
    """
    readers = graph.consumers()
    if rounding and box.centered:
        # The true corners may lie between floating-point numbers.
        center, radius = box.middle
        infinity = torch.full_like(center, torch.inf)
        box = Box(
            torch.nextafter(center - radius, -infinity), torch.nextafter(center + radius, infinity)
        )
    found = Relaxation(graph, {0: box}, {}, rounding)
    for i, node in enumerate(graph.nodes[1:], start=1):
        inputs = [found.boxes[j] for j in node.inputs]
        bounds = interval.RULES[type(node.op)](node.op, *inputs, rounding=rounding)
        bounds = Box(*bounds.corners)
        if isinstance(node.op, ACTIVATIONS):
            found.lines[i] = lines(node.op, found.boxes[node.inputs[0]], rounding=rounding)
        elif effort.iterations is not None and found.lines:
            needs = _needed(bounds, [graph.nodes[j].op for j in readers[i]])
            if needs is not None:
                bounds = _tighten(found, i, bounds, needs, effort)
        found.boxes[i] = bounds
    return found


def relaxed(graph: Graph, boxes: dict[int, Box], *, rounding: float = 0.0) -> Relaxation:
    """Return the relaxation that follows from bounds on the input of every activation."""
    chosen = {
        i: lines(node.op, boxes[node.inputs[0]], rounding=rounding)
        for i, node in enumerate(graph.nodes)
        if isinstance(node.op, ACTIVATIONS)
    }
    return Relaxation(graph, boxes, chosen, rounding)


def _needed(bounds: Box, readers: list[ops.Op]) -> Tensor | None:
    """Return which neurons an activation that reads them would like to know better."""
    masks = []
    for op in readers:
        if isinstance(op, ops.Relu | ops.LeakyRelu):
            masks.append(unstable(bounds))
        elif isinstance(op, ops.Sigmoid | ops.Tanh | ops.MaxPool):
            masks.append(bounds.lower < bounds.upper)
    if not masks:
        return None
    return torch.stack(masks).any(0)


def _tighten(found: Relaxation, target: int, bounds: Box, needs: Tensor, effort: Effort) -> Box:
    """Intersect interval bounds of some neurons with linear ones."""
    so_far = Relaxation(found.graph, dict(found.boxes), dict(found.lines), found.rounding)
    so_far.boxes[target] = bounds  # for the magnitudes
    lower, upper = (t.clone() for t in bounds.corners)
    for sign in (1.0, -1.0):
        if not needs.any():
            break
        owner, position = needs.flatten(1).nonzero(as_tuple=True)
        found_lower = torch.cat(
            [
                _bound_units(so_far, target, sign, owner[part], position[part], effort)
                for part in _chunks(so_far, target, owner, position, effort)
            ]
        )
        side = lower if sign > 0 else upper
        flat = side.flatten(1)
        held = flat[owner, position]
        new = sign * found_lower
        # A bound that is not a number is no bound.
        new = torch.where(torch.isfinite(new), new, held)
        flat[owner, position] = torch.maximum(held, new) if sign > 0 else torch.minimum(held, new)
        side.copy_(flat.view_as(side))
        if _bends_only(found.graph, target):
            needs = needs & (lower < 0)
    return Box(lower, torch.maximum(lower, upper))


def _bends_only(graph: Graph, target: int) -> bool:
    """Whether all that reads a node are ReLUs: then a positive lower bound is all they need."""
    kinds = (ops.Relu, ops.LeakyRelu)
    return all(isinstance(graph.nodes[j].op, kinds) for j in graph.consumers()[target])


def _bound_units(
    found: Relaxation,
    target: int,
    sign: float,
    owner: Tensor,
    position: Tensor,
    effort: Effort,
) -> Tensor:
    shape = found.graph.nodes[target].shape
    batch = len(found.boxes[0].lower)
    mine = None if batch == 1 else owner
    like = found.boxes[target].lower
    if not effort.iterations or not _affordable(found.graph, target, len(owner), effort):
        rows = unit_rows(shape, position, mine, like, windows=True)
        return found.lower(target, rows.like(rows.values * sign))
    rows = unit_rows(shape, position, mine, like, windows=False)
    rows = rows.like(rows.values * sign)
    rough = rows.like(rows.values.float())
    slopes = optimize_slopes(
        found.rough, target, rough, iterations=effort.iterations, rate=effort.rate
    )
    return found.lower(target, rows, slopes={i: t.to(like.dtype) for i, t in slopes.items()})


def _affordable(graph: Graph, target: int, rows: int, effort: Effort) -> bool:
    assert effort.iterations
    return rows * work_per_row(graph, target) * 2 * effort.iterations <= effort.work


def _chunks(
    found: Relaxation, target: int, owner: Tensor, position: Tensor, effort: Effort
) -> Iterator[slice]:
    """Split rows so that the coefficients of each part fit into memory."""
    nodes = found.graph.nodes[: target + 1]
    if effort.iterations and _affordable(found.graph, target, len(owner), effort):
        per_row = 2 * sum(torch.Size(node.shape).numel() for node in nodes)
    else:
        probe = unit_rows(
            nodes[target].shape,
            position[:1],
            owner[:1],
            found.boxes[target].lower,
            windows=True,
        )
        form = backward(found.graph, target, probe, found.lines, boxes=found.boxes)
        per_row = COPIES * form.largest
    size = max(1, int(effort.memory // (per_row * found.boxes[0].lower.element_size())))
    for start in range(0, len(owner), size):
        yield slice(start, start + size)
