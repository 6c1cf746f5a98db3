"""Zonotope bounds computed backwards: the dual network of Wong and Kolter (2018).

Pulled back through strips of one slope, a linear function of a node becomes `a . x + b ± s`: the
slopes are those of both lines, and the radii of the strips add up in s, weighted by absolute
coefficients. These are the bounds of a zonotope with a new error term for every unstable neuron,
sum for sum. Which way is cheaper depends on the shape of the network: forwards every error term
goes through all later layers, backwards every neuron of a layer through all earlier ones, and
layers of convolutional networks grow towards the input.

Differentiable in the parameters, in plain floating-point arithmetic: nothing here reaches a
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.batch import SampleRows
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.patches import Patches, is_plain
from tightrope.domains.linear.relaxations import kinked
from tightrope.domains.linear.rules import RULES, Pass, backward
from tightrope.domains.strips import Strip, strip
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES


def relu_inputs(graph: Graph) -> tuple[int, ...]:
    """Return the positions that ReLUs read, in order: their bounds are needed."""
    return tuple(sorted({node.inputs[0] for node in graph.nodes if kinked(node.op)}))


def bounds(graph: Graph, box: Box) -> dict[int, Box]:
    """Return the bounds of a zonotope (DeepZ) on what each ReLU reads."""
    found: dict[int, Box] = {}
    for i in relu_inputs(graph):
        shape = graph.nodes[i].shape
        if is_convolutional(graph, i):
            center, spread = _by_patches(graph, i, box, found)
            found[i] = Box.around(center.view(-1, *shape), spread.view(-1, *shape))
            continue
        units = torch.eye(math.prod(shape), dtype=box.lower.dtype, device=box.lower.device)
        rows = units.view(1, -1, *shape)
        center, spread = _pulled(graph, i, rows, box, found)
        found[i] = Box.around(center.unflatten(1, shape), spread.unflatten(1, shape))
    return found


def margins(graph: Graph, box: Box, labels: Tensor, known: Mapping[int, Box]) -> Tensor:
    """Return lower bounds on `o_y - o_i` for all classes i, of shape [batch, classes].

    `known` are bounds on what ReLUs read. Whatever they are, the rest is exact.
    """
    units = torch.eye(graph.output_shape[0], dtype=box.lower.dtype, device=box.lower.device)
    rows = units[labels].unsqueeze(1) - units
    center, spread = _pulled(graph, len(graph.nodes) - 1, rows, box, known)
    return center - spread


def numbers_kept(graph: Graph) -> int:
    """Return about how many numbers the bounds of one sample keep for the gradient."""
    total = 0
    for i in relu_inputs(graph):
        before = graph.nodes[:i]
        if is_convolutional(graph, i):
            total += _patched_numbers(graph, i)
        else:
            total += math.prod(graph.nodes[i].shape) * sum(math.prod(n.shape) for n in before)
    outputs = math.prod(graph.output_shape)
    return KEPT * (total + outputs * sum(math.prod(node.shape) for node in graph.nodes))


def _patched_numbers(graph: Graph, target: int) -> int:
    """Return how many coefficients the neurons of a convolution have in all layers before it."""
    side, total, rows = [1, 1], 0, math.prod(graph.nodes[target].shape)
    i = target
    while i:
        op = graph.nodes[i].op
        (i,) = graph.nodes[i].inputs
        if isinstance(op, ops.Conv2d):
            kernel = op.weight.shape[2:]
            side = [(n - 1) * s + k for n, s, k in zip(side, op.stride, kernel, strict=True)]
        total += rows * graph.nodes[i].shape[0] * math.prod(side)
    return total


AFFINE = (
    *(ops.Input, ops.Linear, ops.Conv2d, ops.ConvTranspose2d, ops.BatchNorm, ops.Shift, ops.Scale),
    *(ops.AvgPool, ops.Reshape, ops.Permute, ops.Pad, ops.Slice, ops.Take),
    *(ops.Concat, ops.Add, ops.Sub),
)
KNOWN = (*AFFINE, ops.Relu, ops.LeakyRelu)
KEPT = 2  # tensors of the size of coefficients, for each layer that they pass
PATCHED = (ops.Relu, ops.LeakyRelu, ops.Shift, ops.Scale, ops.BatchNorm)


def is_convolutional(graph: Graph, target: int) -> bool:
    """Return whether a convolution is reached by convolutions and what keeps neurons in place."""
    if not is_plain(graph.nodes[target].op):
        return False
    while target:
        node = graph.nodes[target]
        if len(node.inputs) != 1 or not (is_plain(node.op) or isinstance(node.op, PATCHED)):
            return False
        (target,) = node.inputs
    return True


def _by_patches(
    graph: Graph, target: int, box: Box, known: Mapping[int, Box]
) -> tuple[Tensor, Tensor]:
    """Return centre and spread of all neurons of a convolution: [batch, filters, places]."""
    first = graph.nodes[target].op
    assert isinstance(first, ops.Conv2d)
    a = Patches.of(first, graph.nodes[target].shape)
    center, spread = _bias(first, box.center), torch.zeros_like(box.center[:1, :1, :1, 0])
    (i,) = graph.nodes[target].inputs
    inside = False  # whether nothing is left of patches outside of the map
    while i:
        node = graph.nodes[i]
        op, one = (
            node.op,
            torch.ones(1, *node.shape, dtype=box.center.dtype, device=box.center.device),
        )
        (before,) = node.inputs
        if isinstance(op, ops.Conv2d):
            if op.bias is not None:
                center = center + a.dot(op.bias.view(1, -1, 1, 1) * one)
            a = (a if inside else a.times(one)).through(op)
        elif kinked(op):
            negative = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
            a, middle, radius = a.bent(strip("deepz", known[before], negative=negative))
            center, spread = center + middle, spread + radius
        else:  # a factor and an offset of each neuron
            offset = POINT_RULES[type(op)](op, 0 * one)
            center = center + a.dot(offset)
            factor = POINT_RULES[type(op)](op, one) - offset
            a = a.times(factor)
        i, inside = before, not isinstance(op, ops.Conv2d)
    return center + a.dot(box.center), spread + a.reach(box.radius)


def _bias(op: ops.Conv2d, like: Tensor) -> Tensor:
    filters = op.weight.shape[0]
    bias = like.new_zeros(filters) if op.bias is None else op.bias
    return bias.view(1, filters, 1)


@dataclass
class Strips:
    """Pulls coefficients through the strips of ReLUs, and adds up what their radii come to."""

    known: Mapping[int, Box]
    found: dict[int, Strip] = field(default_factory=dict)
    spread: Tensor | float = 0.0

    def __call__(self, op: ops.Op, a: Coefficients, i: int, state: Pass) -> Coefficients:
        """Return the coefficients before ReLU i."""
        assert isinstance(a, SampleRows)
        before = self.known[state.graph.nodes[i].inputs[0]]
        negative = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        slope, middle, radius = strip("deepz", before, negative=negative)
        state.add_number(a.dot(middle))
        self.spread = self.spread + a.like(a.values.abs()).dot(radius)
        rows = a.values.unflatten(0, (-1, a.each))
        return a.like((rows * slope.unsqueeze(1)).flatten(0, 1))


def _pulled(
    graph: Graph, target: int, rows: Tensor, box: Box, known: Mapping[int, Box]
) -> tuple[Tensor, Tensor]:
    """Return centre and spread of linear functions of a node: [batch, rows] of [batch, rows, ...].

    Rows that are the same for all samples are given once.
    """
    batch, each = len(box.center), rows.shape[1]
    start, first, constant = _before_activations(graph, target, rows)
    strips = Strips(known)
    values = start.values.unflatten(0, (-1, each)).expand(batch, -1, *start.values.shape[1:])
    form = backward(
        graph, first, start.like(values.flatten(0, 1)), {}, boxes=dict(known), activation=strips
    )
    a = form.coefficients
    found = SampleRows(a.values, None, each)
    center = (form.constant + found.dot(box.center)).view(batch, each) + constant.view(-1, each)
    spread = strips.spread + found.like(found.values.abs()).dot(box.radius)
    return center, spread.view(batch, each)


def _before_activations(graph: Graph, target: int, rows: Tensor) -> tuple[SampleRows, int, Tensor]:
    """Pull rows through the layers up to an activation or a sum: the same for all samples."""
    a: Coefficients = SampleRows(rows.flatten(0, 1), None, rows.shape[1])
    zero = rows.new_zeros(len(a.values))
    state = Pass(graph, {}, {}, None, 0.0, zero, zero, Strips({}))
    while target and not kinked(graph.nodes[target].op) and len(graph.nodes[target].inputs) == 1:
        node = graph.nodes[target]
        (pulled,) = RULES[type(node.op)](node.op, a, target, state)
        assert pulled is not None
        a = pulled
        (target,) = node.inputs
    assert isinstance(a, SampleRows)
    return a, target, state.constant
