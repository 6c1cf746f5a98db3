"""A network on one box, reduced to its unstable neurons.

Between unstable ReLUs everything is linear on the box: stable neurons pass their input on or
are zero. So the unstable pre-activations are `h = inner y + outer x + constant` with
`y = relu(h)`, where `inner` is block-triangular over the layers, and each row of the property is
a linear function of y and x, too. Branch and bound searches on these few dense matrices,
whatever the network was made of; what it finds is proved on the network itself.

LeakyReLU is `slope h + (1 - slope) relu(h)`: the first part is linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.alpha import ancestors
from tightrope.domains.coefficients import Coefficients, unit_rows
from tightrope.domains.crown import COPIES, MEMORY, Relaxation
from tightrope.domains.linear import backward
from tightrope.domains.relaxations import Lines, unstable
from tightrope.graph import ops


@dataclass(frozen=True)
class Layer:
    """The unstable neurons of one activation: its position in the graph and their places."""

    position: int
    places: Tensor
    span: slice
    left: float  # slope of the activation below zero


@dataclass(frozen=True)
class Reduced:
    """The matrices; U unstable neurons, n inputs, R rows of the property."""

    layers: tuple[Layer, ...]
    inner: Tensor  # [U, U]
    outer: Tensor  # [U, n]
    constant: Tensor  # [U]
    lower: Tensor  # [U]
    upper: Tensor  # [U]
    row_inner: Tensor  # [R, U]
    row_outer: Tensor  # [R, n]
    row_constant: Tensor  # [R]
    box: Box  # flat, batch 1

    @property
    def neurons(self) -> int:
        """Number of unstable neurons."""
        return len(self.constant)

    def float(self) -> Reduced:
        """Return the same in float32."""
        return replace(
            self,
            inner=self.inner.float(),
            outer=self.outer.float(),
            constant=self.constant.float(),
            lower=self.lower.float(),
            upper=self.upper.float(),
            row_inner=self.row_inner.float(),
            row_outer=self.row_outer.float(),
            row_constant=self.row_constant.float(),
            box=self.box.map(Tensor.float),
        )

    @cached_property
    def chord(self) -> Tensor:
        """Slope of the upper line of each neuron."""
        return self.upper / (self.upper - self.lower)

    @cached_property
    def peak(self) -> Tensor:
        """Intercept of the upper line of each neuron."""
        return -self.lower * self.chord


def reducible(relaxation: Relaxation) -> bool:
    """Return whether all nonlinear operations are ReLUs or LeakyReLUs with slope below 1."""
    return all(
        not isinstance(node.op, ops.Sigmoid | ops.Tanh | ops.MaxPool)
        and not (isinstance(node.op, ops.LeakyRelu) and node.op.slope >= 1)
        for node in relaxation.graph.nodes
    )


def reduce(
    relaxation: Relaxation, matrix: Tensor, offset: Tensor, *, memory: int = MEMORY
) -> Reduced:
    """Reduce a relaxation of batch size 1; the property's rows are `matrix @ output + offset`."""
    graph = relaxation.graph
    layers = _layers(relaxation)
    blocked = dict(relaxation.lines)
    for layer in layers:
        blocked[layer.position] = _blocked(relaxation.lines[layer.position], layer)
    builder = _Builder(relaxation, layers, blocked, memory)
    parts = [
        builder.pull_units(graph.nodes[layer.position].inputs[0], layer.places) for layer in layers
    ]
    shape = graph.output_shape
    rows = Coefficients(matrix.reshape(len(matrix), *shape), None)
    row_inner, row_outer, row_constant = builder.pull(len(graph.nodes) - 1, rows)
    like = row_constant
    count = layers[-1].span.stop if layers else 0
    inputs = torch.Size(graph.input_shape).numel()
    bounds = [relaxation.boxes[graph.nodes[layer.position].inputs[0]] for layer in layers]
    pick = [
        (b.lower.flatten()[k.places], b.upper.flatten()[k.places])
        for b, k in zip(bounds, layers, strict=True)
    ]
    empty = like.new_zeros(0)
    return Reduced(
        layers=tuple(layers),
        inner=torch.cat([p[0] for p in parts]) if parts else like.new_zeros(0, count),
        outer=torch.cat([p[1] for p in parts]) if parts else like.new_zeros(0, inputs),
        constant=torch.cat([p[2] for p in parts]) if parts else empty,
        lower=torch.cat([p[0] for p in pick]) if pick else empty,
        upper=torch.cat([p[1] for p in pick]) if pick else empty,
        row_inner=row_inner,
        row_outer=row_outer,
        row_constant=row_constant + offset,
        box=relaxation.boxes[0].map(lambda t: t.reshape(1, -1)),
    )


def _layers(relaxation: Relaxation) -> list[Layer]:
    layers: list[Layer] = []
    total = 0
    for i in sorted(ancestors(relaxation.graph, relaxation.output) & relaxation.lines.keys()):
        node = relaxation.graph.nodes[i]
        places = unstable(relaxation.boxes[node.inputs[0]]).flatten().nonzero()[:, 0]
        if len(places):
            left = node.op.slope if isinstance(node.op, ops.LeakyRelu) else 0.0
            layers.append(Layer(i, places, slice(total, total + len(places)), left))
            total += len(places)
    return layers


def _blocked(line: Lines, layer: Layer) -> Lines:
    """Return lines that stop at unstable neurons (apart from LeakyReLU's linear part)."""

    def put(t: Tensor, value: float) -> Tensor:
        flat = t.flatten(1).clone()
        flat[:, layer.places] = value
        return flat.view_as(t)

    slope = put(line.lower_slope, layer.left)
    zero = torch.zeros_like(slope)
    return Lines(slope, zero, slope, zero)


@dataclass(frozen=True)
class _Builder:
    """Pulls rows back to the unstable neurons and the input."""

    relaxation: Relaxation
    layers: list[Layer]
    lines: dict[int, Lines]
    memory: int

    def pull(self, target: int, rows: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' coefficients on all unstable neurons, on the input, and constants."""
        graph = self.relaxation.graph
        form = backward(graph, target, rows, self.lines, boxes=self.relaxation.boxes)
        count = self.layers[-1].span.stop if self.layers else 0
        inner = rows.values.new_zeros(len(rows.values), count)
        for layer in self.layers:
            if layer.position in form.passed:
                passed = form.passed[layer.position].dense().values.flatten(1)
                inner[:, layer.span] = passed[:, layer.places] * (1 - layer.left)
        return inner, form.coefficients.dense().values.flatten(1), form.constant

    def pull_units(self, target: int, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do so for single neurons of a node."""
        nodes = self.relaxation.graph.nodes
        largest = max(torch.Size(node.shape).numel() for node in nodes[: target + 1])
        like = self.relaxation.boxes[0].lower
        size = max(1, self.memory // (COPIES * largest * like.element_size()))
        parts = [
            self.pull(
                target,
                unit_rows(nodes[target].shape, part, None, like, windows=True),
            )
            for part in places.split(size)
        ]
        return tuple(torch.cat(p) for p in zip(*parts, strict=True))  # type: ignore[return-value]
