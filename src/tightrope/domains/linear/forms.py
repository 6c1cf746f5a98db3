"""Affine forms of every node over the inputs that vary, front to back: cheap where these are few.

A node's value is `center + sum_e generator_e noise_e`, with one noise in [-1, 1] for each input
that varies, up to `radius`: what activations add, and every rounding error. One pass costs as much
as evaluating the network once for each such input, and knows what intervals forget: that all
neurons are made of the same few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.domains.linear.relaxations import Lines, kinked
from tightrope.domains.rounding import around, growth, tiny
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map

FEW_INPUTS = 64


@dataclass(frozen=True)
class Form:
    """The affine forms of a node's neurons on a batch of boxes."""

    center: Tensor  # [batch, *shape]
    generators: Tensor  # [batch, inputs, *shape]
    radius: Tensor  # [batch, *shape]

    @property
    def spread(self) -> Tensor:
        """How far the noises lead, [batch, *shape]."""
        return self.generators.abs().sum(1)

    @property
    def count(self) -> int:
        """The number of noises."""
        return self.generators.shape[1]

    def box(self, rounding: float) -> Box:
        """Return the bounds of all neurons."""
        reach = self.spread + self.radius
        share = growth(self.count + 1, rounding) if rounding else 0.0
        return around(self.center, reach * (1 + share), rounding)


class Forms:
    """The forms of a network's nodes; those that nobody reads any more are forgotten."""

    def __init__(self, graph: Graph, box: Box, noises: int, rounding: float) -> None:
        self.graph, self.rounding = graph, rounding
        self.left = [len(readers) for readers in graph.consumers()]
        self.noises = noises
        lower, upper = box.corners
        half = flat(upper / 2 - lower / 2)
        generators = half.new_zeros(len(half), self.noises, half.shape[1])
        # Each box numbers the inputs that vary in it.
        varies = flat(lower < upper)
        owner, place = varies.nonzero(as_tuple=True)
        generators[owner, varies.cumsum(1)[owner, place] - 1, place] = half[owner, place]
        center, slack = lower / 2 + upper / 2, self._slack(box)
        shape = (len(half), self.noises, *center.shape[1:])
        self.held = {0: Form(center, generators.view(shape), slack)}

    def visit(self, i: int, bounds: Box, before: Box, line: Lines | None) -> Box:
        """Return what the form of a node says of it.

        `bounds` are known of the node, `before` of its first input; activations have lines.
        """
        node = self.graph.nodes[i]
        inputs = [self.held[j] for j in node.inputs]
        rule = RULES.get(type(node.op))
        if line is not None:
            form = self._activation(node.op, inputs[0], before, line)
        elif rule is not None:
            form = rule(node.op, inputs, self.rounding)
        else:
            form = self._constant(bounds)
        self.held[i] = form
        for j in node.inputs:
            self.left[j] -= 1
            if not self.left[j]:
                self.held.pop(j, None)
        return form.box(self.rounding)

    def tighten(self, i: int, box: Box) -> None:
        """Take note of better bounds of a node, where a constant is narrower than its form."""
        form, constant = self.held[i], self._constant(box)
        worse = ~(form.radius <= constant.radius)
        self.held[i] = Form(
            torch.where(worse, constant.center, form.center),
            torch.where(worse[:, None], 0.0, form.generators),
            torch.where(worse, constant.radius, form.radius),
        )

    def _slack(self, box: Box) -> Tensor:
        """Return what is rounded in finding the middle of a box."""
        lower, upper = box.corners
        least = tiny(lower) if self.rounding else 0.0
        return 4 * self.rounding * (lower.abs() + upper.abs()) + least

    def _constant(self, box: Box) -> Form:
        """Return a form without noises."""
        lower, upper = box.corners
        center = lower / 2 + upper / 2
        nothing = center.new_zeros(len(center), self.noises, *center.shape[1:])
        return Form(center, nothing, upper / 2 - lower / 2 + self._slack(box))

    def _activation(self, op: ops.Op, form: Form, before: Box, line: Lines) -> Form:
        """Between two parallel lines of the upper one's slope."""
        slope, lowest, highest = line.upper_slope, line.lower_intercept, line.upper_intercept
        if not kinked(op):
            tilt = line.lower_slope - slope
            lowest = lowest + torch.minimum(tilt * before.lower, tilt * before.upper)
            reach = torch.maximum(before.lower.abs(), before.upper.abs())
            size = (tilt.abs() + slope.abs()) * reach + lowest.abs() + line.lower_intercept.abs()
            lowest = lowest - 8 * self.rounding * size
        center = slope * form.center + (highest / 2 + lowest / 2)
        radius = slope.abs() * form.radius + (highest / 2 - lowest / 2)
        if self.rounding:
            size = slope.abs() * (form.center.abs() + form.spread + form.radius)
            size = size + highest.abs() + lowest.abs()
            count = form.count + 8
            radius = radius + growth(count, self.rounding) * size + count * tiny(size)
        return Form(center, slope[:, None] * form.generators, radius)


def few_inputs(graph: Graph, box: Box, rounding: float) -> Forms | None:
    """Return affine forms over the inputs if few of them vary in each box, and some do."""
    lower, upper = box.corners
    noises = int(flat(lower < upper).sum(1).max())
    return Forms(graph, box, noises, rounding) if 0 < noises <= FEW_INPUTS else None


def tighter(bounds: Box, other: Box) -> Box:
    """Return bounds, or others where these are tighter and numbers."""
    lower = torch.where(other.lower > bounds.lower, other.lower, bounds.lower)
    upper = torch.where(other.upper < bounds.upper, other.upper, bounds.upper)
    return Box(lower, torch.maximum(lower, upper))


# --- affine operations ------------------------------------------------------------------------


def _on_generators(op: ops.Op, inputs: list[Form]) -> Tensor:
    """Apply a linear operation to every generator."""
    batch, count = inputs[0].generators.shape[:2]
    flat = (form.generators.flatten(0, 1) for form in inputs)
    result: Tensor = POINT_RULES[type(op)](op, *flat)
    return result.unflatten(0, (batch, count))


def _linear(op: Any, inputs: list[Form], rounding: float) -> Form:
    """Any operation `A x + b` whose constants are its `bias`, or that has none."""
    rule = POINT_RULES[type(op)]
    plain = replace(op, bias=None) if getattr(op, "bias", None) is not None else op
    share = growth(_terms(op), rounding) if rounding else 0.0
    radius = rule(plain.map_tensors(torch.abs), *(_widened(form, share) for form in inputs))
    if rounding:
        underflow = _terms(op) * (inputs[0].count + 2) * tiny(radius)
        radius = radius * (1 + share) + underflow
        if plain is not op:
            radius = radius + share * _channels(op.bias.abs(), op)
    return Form(rule(op, *(form.center for form in inputs)), _on_generators(plain, inputs), radius)


def _widened(form: Form, share: float) -> Tensor:
    """Return a radius that covers the rounding of products with centre and generators."""
    if not share:
        return form.radius
    return form.radius + share * (form.center.abs() + form.spread) + tiny(form.radius)


def _terms(op: Any) -> int:
    """How many products make up one number."""
    if isinstance(op, ops.AvgPool):
        return op.kernel[0] * op.kernel[1] + 1
    return op.weight[0].numel() + 1 if hasattr(op, "weight") else 2


def _channels(bias: Tensor, op: Any) -> Tensor:
    return bias.view((-1,) + (1,) * (2 if isinstance(op, ops.Conv2d) else 0))


def _difference(op: ops.Sub, inputs: list[Form], rounding: float) -> Form:
    a, b = inputs
    return _linear(ops.Add(), [a, Form(-b.center, -b.generators, b.radius)], rounding)


def _product(op: ops.Mul, inputs: list[Form], rounding: float) -> Form:
    """Around the middles of both; where one factor is a number, that is all there is."""
    a, b = inputs
    reach, other = a.spread + a.radius, b.spread + b.radius
    radius = a.center.abs() * b.radius + b.center.abs() * a.radius + reach * other
    if rounding:
        count = a.count + 8
        size = (a.center.abs() + reach) * (b.center.abs() + other)
        radius = radius + growth(count, rounding) * size + count * tiny(size)
    generators = a.center[:, None] * b.generators + b.center[:, None] * a.generators
    return Form(a.center * b.center, generators, radius)


def _rearranged(op: ops.Op, inputs: list[Form], rounding: float) -> Form:
    """Numbers take other places; none is rounded."""
    rule = POINT_RULES[type(op)]
    plain = ops.Pad(op.pads, 0.0) if isinstance(op, ops.Pad) else op
    return Form(
        rule(op, *(form.center for form in inputs)),
        _on_generators(plain, inputs),
        rule(plain, *(form.radius for form in inputs)),
    )


def _shift(op: ops.Shift, inputs: list[Form], rounding: float) -> Form:
    (form,) = inputs
    center = POINT_RULES[ops.Shift](op, form.center)
    radius = form.radius
    if rounding:
        radius = radius * (1 + 4 * rounding) + 4 * rounding * center.abs() + tiny(center)
    return replace(form, center=center, radius=radius)


def _batch_norm(op: ops.BatchNorm, inputs: list[Form], rounding: float) -> Form:
    (form,) = inputs
    shape = (-1,) + (1,) * (form.center.dim() - 2)
    factor = batchnorm_map(op)[0].view(shape)
    size = factor.abs()
    radius = size * form.radius
    if rounding:
        # As for intervals: factor and offset take a few roundings, and may underflow.
        bias = 0 if op.bias is None else op.bias.abs().view(shape)
        reach = form.center.abs() + form.spread + form.radius + op.mean.abs().view(shape)
        share = growth(form.count + 16, rounding)
        least = (form.count + 4) * tiny(reach)
        radius = radius + share * (reach * size + bias) + least * (1 + size + reach)
    return Form(POINT_RULES[ops.BatchNorm](op, form.center), factor * form.generators, radius)


# What is not listed begins with the constants that intervals know of it.
RULES: dict[type[ops.Op], Callable[[Any, list[Form], float], Form]] = {
    ops.Linear: _linear,
    ops.Conv2d: _linear,
    ops.BatchNorm: _batch_norm,
    ops.Scale: _linear,
    ops.AvgPool: _linear,
    ops.Add: _linear,
    ops.Sub: _difference,
    ops.Mul: _product,
    ops.Shift: _shift,
    ops.Reshape: _rearranged,
    ops.Permute: _rearranged,
    ops.Pad: _rearranged,
    ops.Slice: _rearranged,
    ops.Take: _rearranged,
    ops.Concat: _rearranged,
}
