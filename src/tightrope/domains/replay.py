"""Strict bounds of subproblems, on the network itself.

The search runs on a reduced network in float32. What it finds, the slopes and multipliers of a
subproblem, is replayed here in one backward pass through the whole network in float64 with every
rounding error accounted for. Only this bound is a proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.coefficients import Coefficients
from tightrope.domains.crown import MEMORY, Relaxation
from tightrope.domains.linear import Extra, backward, growth
from tightrope.domains.reduced import Layer, Reduced
from tightrope.domains.relaxations import Lines, lines
from tightrope.domains.splits import Cuts, Subproblems


def strict_bounds(
    relaxation: Relaxation,
    network: Reduced,
    matrix: Tensor,
    offset: Tensor,
    weights: Tensor,
    problems: Subproblems,
    cuts: Cuts | None = None,
) -> Tensor:
    """Return proved lower bounds of `weights @ (matrix @ output + offset)`, one per subproblem.

    `weights`, [D, R], are not negative. `relaxation` is strict and of batch size 1; `network` is
    its reduction.
    """
    sizes = [torch.Size(node.shape).numel() for node in relaxation.graph.nodes]
    per_problem = 8 * 8 * (sum(sizes) + max(sizes))
    chunk = max(1, MEMORY // per_problem)
    parts = [
        _Replay(relaxation, network, problems[start : start + chunk], cuts).bounds(
            matrix, offset, weights[start : start + chunk]
        )
        for start in range(0, len(problems), chunk)
    ]
    return torch.cat(parts) if parts else offset.new_zeros(0)


@dataclass(frozen=True)
class _Replay:
    relaxation: Relaxation
    network: Reduced
    problems: Subproblems
    cuts: Cuts | None

    def bounds(self, matrix: Tensor, offset: Tensor, weights: Tensor) -> Tensor:
        root, rows = self.relaxation, weights @ matrix
        leaf_lines: dict[int, Lines] = dict(root.lines)
        slopes: dict[int, Tensor] = {}
        extras: dict[int, Extra] = {}
        for layer in self.network.layers:
            leaf_lines[layer.position] = self._lines(layer)
            slopes[layer.position] = self._scatter(layer, self._slopes(layer))
            extras[layer.position] = self._extra(layer)
        shape = root.graph.output_shape
        form = backward(
            root.graph,
            root.output,
            Coefficients(rows.reshape(len(rows), *shape), None),
            leaf_lines,
            boxes=root.boxes,
            slopes=slopes,
            extras=extras,
            magnitudes=root.magnitudes,
            rounding=root.rounding,
        )
        bound = form.minimum(root.boxes[0], rounding=root.rounding) + weights @ offset
        # Combining the rows rounds, and the matrix may have been rounded to float64 before.
        output = torch.maximum(*(t.abs() for t in root.boxes[root.output].corners)).flatten()
        size = weights @ (matrix.abs() @ output + offset.abs()) + bound.abs()
        return bound - growth(len(offset) + 4, root.rounding) * size

    def _lines(self, layer: Layer) -> Lines:
        """Return the lines of a layer with its split neurons fixed."""
        node = self.relaxation.graph.nodes[layer.position]
        box = self.relaxation.boxes[node.inputs[0]]
        sign = self._scatter(layer, self.problems.sign[:, layer.span].to(box.lower))
        lower = torch.where(sign > 0, box.lower.clamp(min=0.0), box.lower)
        upper = torch.where(sign < 0, box.upper.clamp(max=0.0), box.upper)
        return lines(node.op, Box(lower, upper), rounding=self.relaxation.rounding)

    def _slopes(self, layer: Layer) -> Tensor:
        """The slope of `left h + (1 - left) y` where y is bounded by `alpha h`."""
        alpha = self.problems.alpha[:, layer.span].double()
        return layer.left + (1 - layer.left) * alpha

    def _extra(self, layer: Layer) -> Extra:
        span = layer.span
        # Multipliers are not negative: with that, any numbers whatsoever give a sound bound.
        beta = self.problems.beta[:, span].double().clamp(min=0.0)
        after = -beta * self.problems.sign[:, span]
        if self.cuts is None:
            return Extra(after=self._scatter(layer, after))
        gamma = self.problems.gamma.double().clamp(min=0.0)
        cuts = self.cuts
        # Cuts are about y = relu(h); the activation is z = left h + (1 - left) y.
        before = gamma @ cuts.on_outputs[:, span] / (1 - layer.left)
        inside = gamma @ cuts.on_inputs[:, span] - layer.left * before
        root = self.relaxation
        assert root.magnitudes is not None
        node = root.graph.nodes[layer.position]
        seen = root.magnitudes[node.inputs[0]].flatten()[layer.places]
        steep = (1 + layer.left) / (1 - layer.left)
        size = gamma @ (steep * cuts.on_outputs[:, span].abs() + cuts.on_inputs[:, span].abs())
        # A cut may be about several layers; its constant counts once, at the first of them.
        first = gamma * _begins(cuts, span)
        constant = first @ cuts.constant
        total = size @ seen + first @ cuts.constant.abs()
        slack = growth(len(cuts.constant) + 8, root.rounding) * total * (1 + 1e-9)
        return Extra(
            before=self._scatter(layer, before),
            after=self._scatter(layer, after + inside),
            constant=constant,
            slack=slack + 4 * root.rounding * (after.abs() @ seen),
        )

    def _scatter(self, layer: Layer, values: Tensor) -> Tensor:
        """Put values of unstable neurons at their places in the layer."""
        shape = self.relaxation.graph.nodes[layer.position].shape
        whole = values.new_zeros(len(values), torch.Size(shape).numel())
        whole[:, layer.places] = values
        return whole.view(len(values), *shape)


def _begins(cuts: Cuts, span: slice) -> Tensor:
    """Return which cuts have their first neuron in a span."""
    touched = (cuts.on_outputs != 0) | (cuts.on_inputs != 0)
    return touched[:, span].any(1) & ~touched[:, : span.start].any(1)
