"""How the coefficients of subproblems go through activations.

Stable neurons pass on or are zero, whatever the subproblem; so each layer is one product with the
slopes of its stable neurons, and only its unstable ones are looked at by themselves. Of several
boxes those count that are unstable on any; where one is stable its lines are what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.box import flat
from tightrope.domains.branches.subproblems import Branches
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.relaxations import unstable
from tightrope.domains.linear.rules import ACTIVATIONS, Pass, growth
from tightrope.graph import Graph, ops


@dataclass(frozen=True)
class Layer:
    """The unstable neurons of one activation: their places in it and among all of them."""

    places: Tensor
    span: slice
    left: float  # slope below zero
    slope: Tensor  # of stable neurons, [boxes, *shape]; zero where unstable on any box


@dataclass(frozen=True)
class Neurons:
    """The unstable neurons of a network in one precision, by the position of their activation."""

    layers: dict[int, Layer]
    chord: Tensor  # [boxes, U]: slope of the upper line
    peak: Tensor  # [boxes, U]: its intercept
    bends: Tensor  # [boxes, U]: where it is unstable

    @classmethod
    def of(cls, relaxation: Relaxation, end: int) -> Neurons:
        """Collect those before a position, in a relaxation of a ReLU network."""
        layers: dict[int, Layer] = {}
        empty = flat(relaxation.box.lower)[:, :0]
        chord, peak, bends, start = [empty], [empty], [empty > 0], 0
        for i in (i for i in activations(relaxation.graph) if i < end):
            node, line = relaxation.graph.nodes[i], relaxation.lines[i]
            mine = unstable(relaxation.boxes[node.inputs[0]])
            anywhere = mine.any(0)
            places = anywhere.flatten().nonzero()[:, 0]
            left = node.op.slope if isinstance(node.op, ops.LeakyRelu) else 0.0
            span = slice(start, start + len(places))
            layers[i] = Layer(places, span, left, line.lower_slope.masked_fill(anywhere, 0.0))
            chord.append(flat(line.upper_slope)[:, places])
            peak.append(flat(line.upper_intercept)[:, places])
            bends.append(flat(mine)[:, places])
            start = span.stop
        return cls(layers, *(torch.cat(parts, 1) for parts in (chord, peak, bends)))

    def rough(self, graph: Graph) -> Neurons:
        """Return the same in float32, for a graph with the same activations in their order."""
        layers = [replace(layer, slope=layer.slope.float()) for layer in self.layers.values()]
        positions = activations(graph)[: len(layers)]
        return Neurons(
            dict(zip(positions, layers, strict=True)),
            self.chord.float(),
            self.peak.float(),
            self.bends,
        )

    def seen_by(self, field: Tensor, box: Tensor) -> Tensor:
        """Return a quantity held per box, [boxes, ...], as subproblems of these boxes see it."""
        return field if len(self.chord) == 1 else field[box]


def activations(graph: Graph) -> list[int]:
    """Return the positions of all activations, in their order."""
    return [i for i, node in enumerate(graph.nodes) if isinstance(node.op, ACTIVATIONS)]


class BranchRule:
    """How coefficients of some subproblems go through activations; notes the lines they use.

    `box` says which box each subproblem is about, [D].
    """

    def __init__(self, neurons: Neurons, problems: Branches, box: Tensor) -> None:
        self.neurons, self.box, dtype = neurons, box, neurons.chord.dtype
        self.chord, self.peak = (neurons.seen_by(t, box) for t in (neurons.chord, neurons.peak))
        self.alpha = problems.alpha.to(dtype).clamp(0.0, 1.0)
        if len(neurons.chord) > 1:
            self.alpha = torch.where(neurons.bends[box], self.alpha, self.chord)
        beta = problems.beta.to(dtype).clamp(min=0.0)
        owner, slot = problems.sign.nonzero(as_tuple=True)
        self.owner, self.place = owner, problems.neuron[owner, slot].long()
        self.active = problems.sign[owner, slot] > 0
        self.pressure = torch.where(self.active, beta[owner, slot], -beta[owner, slot])
        self.coefficients = torch.zeros_like(self.alpha)
        self.slope, self.rise = torch.zeros_like(self.alpha), torch.zeros_like(self.alpha)

    def __call__(self, op: ops.Op, a: Coefficients, i: int, state: Pass) -> Coefficients:
        """Pull coefficients back through one activation."""
        layer, values = self.neurons.layers[i], flat(a.values)
        span = layer.span
        part = values.index_select(1, layer.places)
        below = part < 0
        low = self.alpha[:, span].clamp(min=layer.left) if layer.left else self.alpha[:, span]
        slope = torch.where(below, self.chord[:, span], low)
        rise = torch.where(below, self.peak[:, span], 0.0)
        mine = (self.place >= span.start) & (self.place < span.stop)
        owner, place = self.owner[mine], self.place[mine] - span.start
        slope[owner, place] = torch.where(self.active[mine], 1.0, layer.left).to(slope)
        rise[owner, place] = 0.0
        pulled = part * slope
        pulled[owner, place] -= self.pressure[mine]
        stable = self.neurons.seen_by(flat(layer.slope), self.box)
        through = (values * stable).index_copy_(1, layer.places, pulled)
        self.coefficients[:, span] = part
        self.slope[:, span], self.rise[:, span] = slope, rise
        gained = part * rise
        state.add_number(gained.sum(1))
        if state.magnitudes is not None:
            # A product and a sum for each coefficient; products and their sum for the constants.
            # Where a multiplier cancels a product, what that was rounded by is among the eight
            # roundings that `growth` counts for the operation behind, to spare.
            before = state.magnitudes[state.graph.nodes[i].inputs[0]]
            state.lose(a.like(through.view_as(a.values)).reach(before), 4 * state.rounding)
            state.lose(gained.abs().sum(1), growth(len(layer.places), state.rounding))
        return a.like(through.view_as(a.values))
