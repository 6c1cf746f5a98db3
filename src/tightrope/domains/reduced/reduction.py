"""A network on one box, reduced to its unstable neurons.

Between unstable ReLUs everything is linear on the box: stable neurons pass their input on or
are zero. So the unstable pre-activations are `h = inner y + outer x + constant` with
`y = relu(h)`, where `inner` is block-triangular over the layers, and each row of the property is
a linear function of y and x, too. Bounds are optimised, and branch and bound searches, on these
few dense matrices, whatever the network was made of.

The matrices carry their own rounding errors: with `slack` per row, `h` lies within `slack` of
what they say for every input of the box, in exact arithmetic.

LeakyReLU is `slope h + (1 - slope) relu(h)`: the first part is linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.domains.linear.bounded import MEMORY, Relaxation
from tightrope.domains.linear.coefficients import Coefficients, unit_rows
from tightrope.domains.linear.magnitudes import largest
from tightrope.domains.linear.relaxations import Lines, lines, unstable
from tightrope.domains.reduced.factors import Factor
from tightrope.domains.rounding import growth
from tightrope.graph import Graph, ops
from tightrope.graph.graph import Node


@dataclass(frozen=True)
class Rows:
    """Linear functions `inner y + outer x + constant`, off by at most `slack`."""

    inner: Tensor  # [rows, U]
    outer: Tensor  # [rows, n]
    constant: Tensor  # [rows]
    slack: Tensor  # [rows]

    def __len__(self) -> int:
        return len(self.constant)

    def __getitem__(self, index: Tensor) -> Rows:
        return Rows(self.inner[index], self.outer[index], self.constant[index], self.slack[index])

    def __neg__(self) -> Rows:
        return Rows(-self.inner, -self.outer, -self.constant, self.slack)

    def to(self, dtype: torch.dtype) -> Rows:
        """Return the rows in another precision."""
        return Rows(*(t.to(dtype) for t in vars(self).values()))

    def widened(self, neurons: int) -> Rows:
        """Return the same with zeros for neurons that came later."""
        extra = self.inner.new_zeros(len(self), neurons - self.inner.shape[1])
        return replace(self, inner=torch.cat((self.inner, extra), 1))


def join_rows(parts: list[Rows]) -> Rows:
    """Put rows together."""
    return Rows(*(torch.cat(p) for p in zip(*(vars(r).values() for r in parts), strict=True)))


@dataclass(frozen=True)
class Layer:
    """The unstable neurons of one activation: its position in the graph and their places."""

    position: int
    places: Tensor
    span: slice
    left: float  # slope of the activation below zero
    bias: Tensor  # of the affine operation right before, zero if there is none


@dataclass(frozen=True)
class Reduced:
    """The matrices of U unstable neurons and of some rows to be bounded; n inputs."""

    layers: tuple[Layer, ...]
    neurons: Rows
    lower: Tensor  # [U]
    upper: Tensor  # [U]
    rows: Rows
    box: Box  # flat, batch 1
    rounding: float

    @property
    def size(self) -> int:
        """Number of unstable neurons."""
        return len(self.lower)

    def to(self, dtype: torch.dtype) -> Reduced:
        """Return the same in another precision; for a search, not for proofs."""
        return replace(
            self,
            neurons=self.neurons.to(dtype),
            lower=self.lower.to(dtype),
            upper=self.upper.to(dtype),
            rows=self.rows.to(dtype),
            box=self.box.map(lambda t: t.to(dtype)),
            rounding=0.0,
        )

    @cached_property
    def outer(self) -> Factor:
        """The neurons' coefficients of the input, to multiply with."""
        return Factor(self.neurons.outer)

    @cached_property
    def work(self) -> float:
        """How many products one pass back over the neurons takes, about."""
        inner = sum((la.span.stop - la.span.start) * la.span.start for la in self.layers)
        return self.outer.work + inner

    @cached_property
    def lines(self) -> Lines:
        """The lines of all neurons, [U]."""
        return lines(ops.Relu(), Box(self.lower, self.upper), rounding=self.rounding)

    @cached_property
    def reach(self) -> Tensor:
        """The largest outputs of the neurons, [U]."""
        return self.upper.clamp(min=0.0)

    @cached_property
    def magnitude(self) -> Tensor:
        """The size of the terms of each neuron, [U]."""
        return self.magnitude_of(self.neurons)

    def magnitude_of(self, rows: Rows) -> Tensor:
        """Return the size of the terms of some rows."""
        outputs, inputs = self.reach, largest(self.box)[0]
        return (
            rows.inner.abs() @ outputs
            + rows.outer.abs() @ inputs
            + rows.constant.abs()
            + rows.slack
        )


# What is linear; of everything else only ReLUs and LeakyReLUs with a slope below 1 can be reduced.
LINEAR = (
    ops.Input,
    ops.Linear,
    ops.Conv2d,
    ops.ConvTranspose2d,
    ops.BatchNorm,
    ops.Shift,
    ops.Scale,
    ops.AvgPool,
    ops.Reshape,
    ops.Permute,
    ops.Pad,
    ops.Slice,
    ops.Take,
    ops.Concat,
    ops.Add,
    ops.Sub,
)


def reducible(graph: Graph, besides: tuple[type[ops.Op], ...] = ()) -> bool:
    """Return whether all nonlinear operations are ReLUs or LeakyReLUs with slope below 1.

    Or others, `besides` them.
    """
    return all(
        isinstance(node.op, (*LINEAR, ops.Relu, *besides))
        or (isinstance(node.op, ops.LeakyRelu) and node.op.slope < 1)
        for node in graph.nodes
    )


class Reducer:
    """Reduces a relaxation of batch size 1, layer by layer as its bounds become known."""

    def __init__(self, relaxation: Relaxation, *, memory: int = MEMORY) -> None:
        self.relaxation, self.memory = relaxation, memory
        self.layers: list[Layer] = []
        self.blocked: dict[int, Lines] = {}
        self.parts: list[Rows] = []
        self.seen: set[int] = set()
        self.pulled: dict[int, tuple[Tensor, Rows]] = {}

    @property
    def size(self) -> int:
        """Number of unstable neurons so far."""
        return self.layers[-1].span.stop if self.layers else 0

    def catch_up(self) -> None:
        """Take in all activations whose lines are known."""
        for position in sorted(self.relaxation.lines):
            if position not in self.seen:
                self.seen.add(position)
                self._add(position)

    def _add(self, position: int) -> None:
        nodes = self.relaxation.graph.nodes
        before, op = nodes[position].inputs[0], nodes[position].op
        line = self.relaxation.lines[position]
        places = unstable(self.relaxation.boxes[before]).flatten().nonzero()[:, 0]
        if not len(places):
            self.blocked[position] = line
            return
        rows = self.pull_units(before, places)
        left = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        span = slice(self.size, self.size + len(places))
        layer = Layer(position, places, span, left, _bias(nodes[before], places, rows.constant))
        self.layers.append(layer)
        self.parts.append(rows)
        self.blocked[position] = _blocked(line, layer)

    def pull(self, target: int, rows: Coefficients) -> Rows:
        """Return rows of a node as functions of the unstable neurons so far and of the input."""
        form = self.relaxation.pull(target, rows, lines=self.blocked)
        inner = rows.values.new_zeros(len(rows.values), self.size)
        slack = form.slack
        for layer in self.layers:
            if layer.position not in form.passed:
                continue
            passed = flat(form.passed[layer.position].dense().values)[:, layer.places]
            inner[:, layer.span] = passed * (1 - layer.left)
            if self.relaxation.rounding and layer.left:
                before = self.relaxation.graph.nodes[layer.position].inputs[0]
                reach = self.relaxation.boxes[before].upper.flatten()[layer.places]
                slack = slack + 4 * self.relaxation.rounding * (passed.abs() @ reach)
        return Rows(inner, flat(form.coefficients.dense().values), form.constant, slack)

    def pull_units(self, target: int, places: Tensor) -> Rows:
        """Do so for single neurons of a node, remembering them."""
        if target in self.pulled:
            known, rows = self.pulled[target]
            index = torch.searchsorted(known, places)
            if len(known) and bool((known[index.clamp(max=len(known) - 1)] == places).all()):
                return rows[index].widened(self.size)
        nodes = self.relaxation.graph.nodes
        like, size = self.relaxation.box.lower, self.relaxation.rows_at_once(target, self.memory)
        parts = [
            self.pull(target, unit_rows(nodes[target].shape, part, None, like, windows=True))
            for part in places.split(size)
        ]
        rows = join_rows(parts)
        self.pulled[target] = (places, rows)
        return rows

    def network(self, rows: Rows) -> Reduced:
        """Return the reduced network with rows that were pulled just now."""
        relaxation, nodes = self.relaxation, self.relaxation.graph.nodes
        empty = rows.constant[:0]
        lower, upper = [empty], [empty]
        for layer in self.layers:
            box = relaxation.boxes[nodes[layer.position].inputs[0]]
            lower.append(box.lower.flatten()[layer.places])
            upper.append(box.upper.flatten()[layer.places])
        neurons = [part.widened(self.size) for part in self.parts] or [rows[:0]]  # type: ignore[index]
        return Reduced(
            layers=tuple(self.layers),
            neurons=join_rows(neurons),
            lower=torch.cat(lower),
            upper=torch.cat(upper),
            rows=rows,
            box=relaxation.box.map(lambda t: t.reshape(1, -1)),
            rounding=relaxation.rounding,
        )


def reduce(
    relaxation: Relaxation, matrix: Tensor, offset: Tensor, *, memory: int = MEMORY
) -> Reduced:
    """Reduce a relaxation of batch size 1; the rows to be bounded are `matrix @ output + offset`.

    The matrix may have been rounded to its dtype; the slack of the rows covers that, too.
    """
    reducer = Reducer(relaxation, memory=memory)
    reducer.catch_up()
    shape = relaxation.graph.output_shape
    coefficients = Coefficients(matrix.reshape(len(matrix), *shape), None)
    rows = reducer.pull(relaxation.output, coefficients)
    slack = rows.slack
    if relaxation.rounding:
        size = matrix.abs() @ largest(relaxation.boxes[relaxation.output]).flatten()
        slack = slack + growth(2, relaxation.rounding) * (size + rows.constant.abs() + offset.abs())
    return reducer.network(replace(rows, constant=rows.constant + offset, slack=slack))


def _bias(node: Node, places: Tensor, like: Tensor) -> Tensor:
    """Return the bias that an affine node adds to some of its neurons."""
    bias = getattr(node.op, "bias", None)
    if not isinstance(node.op, ops.Linear | ops.Conv2d) or bias is None:
        return torch.zeros_like(like)
    channel = (-1,) + (1,) * (2 if isinstance(node.op, ops.Conv2d) else 0)
    return bias.view(channel).expand(node.shape).reshape(-1)[places]


def _blocked(line: Lines, layer: Layer) -> Lines:
    """Return lines that stop at unstable neurons (apart from LeakyReLU's linear part)."""
    slope = flat(line.lower_slope).clone()
    slope[:, layer.places] = layer.left
    slope = slope.view_as(line.lower_slope)
    zero = torch.zeros_like(slope)
    return Lines(slope, zero, slope, zero)
