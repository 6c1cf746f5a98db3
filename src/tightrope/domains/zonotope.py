"""Zonotopes (DeepZ) and hybrid zonotopes (DiffAI): affine forms, one rule per operation.

A hybrid zonotope is the set `centre + sum_e generator_e * noise_e + rest * noise`, with every noise
in [-1, 1]: error terms that neurons share, and for each neuron an error of its own of size `rest`
(DiffAI's beta). Affine operations are exact on error terms and treat the rest like a box. An
activation is enclosed between two parallel lines `slope * x + middle ± radius`; the radius becomes
a new error term of that neuron, or goes into the rest. Plain zonotopes have no rest.

The rules are plain floating-point arithmetic, differentiable in the parameters: zonotopes are
for training and for comparison and never give a verdict. Their memory grows with the
number of error terms times the size of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.error_terms import Errors, Group, Own
from tightrope.domains.hybrid import (
    Zonotope,
    aligned,
    between_lines,
    differences,
    somewhere,
    spread_rest,
    with_errors,
)
from tightrope.domains.linear.curves import parallel_lines
from tightrope.domains.strips import Strip, around, strip
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map
from tightrope.graph.windows import pooled_places


@dataclass(frozen=True, eq=False)
class _Sloped(ops.Op):
    """An activation with the slopes of its enclosing lines."""

    activation: ops.Relu | ops.LeakyRelu
    slope: Tensor


def bounds(
    graph: Graph,
    box: Box,
    *,
    keep: Collection[int] = (),
    slopes: Mapping[int, Tensor] | None = None,
    errors: Errors | None = None,
) -> tuple[Box, dict[int, Box]]:
    """Return bounds on the output and on the nodes at the positions in `keep`.

    `slopes` maps positions of ReLU and LeakyReLU nodes to the slopes of the lines around
    unstable neurons, [batch, *shape] or anything that broadcasts to it; by default the
    slope is that of the chord from the lower to the upper bound, `u / (u - l)` for a ReLU.
    Any slope is sound; those from 0 to 1 are useful for a ReLU. `errors` says which hybrid
    zonotopes to take, by default plain ones.
    """
    zonotopes = propagate(graph, box, keep=keep, slopes=slopes, errors=errors)
    boxes = {i: zonotope.box for i, zonotope in zonotopes.items()}
    return boxes[len(graph.nodes) - 1], boxes


def margins(
    graph: Graph,
    box: Box,
    labels: Tensor,
    *,
    keep: Collection[int] = (),
    slopes: Mapping[int, Tensor] | None = None,
    errors: Errors | None = None,
) -> tuple[Tensor, dict[int, Box]]:
    """Return lower bounds on `o_y - o_i` for all classes i, of shape [batch, classes].

    The outputs share their error terms, so the differences are taken term by term; those of a
    last linear layer are merged with it, so that no neuron counts twice. The entry of the true
    class y is zero. Positions in `keep` are bounded and returned, too.
    """
    last = graph.nodes[-1]
    end = len(graph.nodes) - 1
    if not isinstance(last.op, ops.Linear) or len(last.shape) != 1:
        zonotopes = propagate(graph, box, keep=keep, slopes=slopes, errors=errors)
        lower = differences(zonotopes[end], labels)
        return lower, {i: zonotopes[i].box for i in {*keep}}
    body = Graph(graph.nodes[:-1])
    inside = {*keep} - {end}
    zonotopes = propagate(body, box, keep=inside | {*last.inputs}, slopes=slopes, errors=errors)
    latent = zonotopes[last.inputs[0]]
    boxes = {i: zonotopes[i].box for i in inside}
    if end in keep:
        boxes[end] = _affine(last.op, latent, errors=Errors()).box
    return linear_margins(last.op, latent, labels), boxes


def linear_margins(layer: ops.Linear, latent: Zonotope, labels: Tensor) -> Tensor:
    """Return lower bounds on `o_y - o_i` where `o = W z + b`."""
    # What moves one neuron only counts by `|W_y - W_i|`, as in a box.
    alone = [g.size() for g in latent.groups.values() if isinstance(g, Own)]
    alone += [] if latent.rest is None else [latent.rest]
    radius = sum(alone, start=torch.zeros_like(latent.center))
    lower = interval.linear_margins(layer, Box.around(latent.center, radius), labels)
    shared = {n: g for n, g in latent.groups.items() if not isinstance(g, Own)}
    turned = Zonotope(torch.zeros_like(latent.center), shared)
    plain = replace(layer, bias=None)
    return lower + differences(_affine(plain, turned, errors=Errors()), labels)


def propagate(
    graph: Graph,
    box: Box,
    *,
    keep: Collection[int] = (),
    slopes: Mapping[int, Tensor] | None = None,
    errors: Errors | None = None,
) -> dict[int, Zonotope]:
    """Return the zonotopes of the output node and of the positions in `keep`."""
    sloped: dict[int, ops.Op] = {}
    for i, slope in (slopes or {}).items():
        op = graph.nodes[i].op
        if not isinstance(op, ops.Relu | ops.LeakyRelu):
            raise ValueError(f"node {i} is no ReLU or LeakyReLU and takes no slopes")
        sloped[i] = _Sloped(op, slope)
    errors = errors or Errors()
    rules = {**RULES, _Sloped: _sloped}
    start = Zonotope(box.center, *errors.of_input(box))
    return graph.replace_ops(sloped).propagate(rules, start, keep=keep, errors=errors)


# --- affine rules ---------------------------------------------------------------------------


def _affine(op: Any, z: Zonotope, *, errors: Errors) -> Zonotope:
    plain = replace(op, bias=None)
    return z.through(op, lambda group: group.through(_on_samples(plain)), plain)


def _rearrange(op: ops.Op, z: Zonotope, *, errors: Errors) -> Zonotope:
    return z.through(op, lambda group: group.through(_on_samples(op)), op)


def _in_place(op: ops.Op, z: Zonotope, *, errors: Errors) -> Zonotope:
    """Every neuron stays one, in the same order."""
    return z.through(op, lambda group: group.along(_on_samples(op)), op)


def _pad(op: ops.Pad, z: Zonotope, *, errors: Errors) -> Zonotope:
    zeros = ops.Pad(op.pads, 0.0)
    return z.through(op, lambda group: group.through(_on_samples(zeros)), zeros)


def _batch_norm(op: ops.BatchNorm, z: Zonotope, *, errors: Errors) -> Zonotope:
    factor = batchnorm_map(op)[0].view((-1,) + (1,) * (z.center.dim() - 2))
    return z.through(op, lambda group: group.along(lambda t: t * factor), op)


def _shift(op: ops.Shift, z: Zonotope, *, errors: Errors) -> Zonotope:
    return Zonotope(POINT_RULES[ops.Shift](op, z.center), z.groups, z.rest)


def _on_samples(op: ops.Op) -> Callable[[Tensor], Tensor]:
    rule = POINT_RULES[type(op)]
    return lambda samples: rule(op, samples)


def _join(op: ops.Op, *zonotopes: Zonotope, errors: Errors) -> Zonotope:
    """Add, subtract or concatenate, error term by error term."""
    rule = POINT_RULES[type(op)]
    center = rule(op, *(z.center for z in zonotopes))
    groups: dict[int, Group] = {}
    for name in sorted({name for z in zonotopes for name in z.groups}):
        rows = aligned(name, zonotopes)
        batch = rows[0].values.shape[:2]
        values = rule(op, *(row.values.flatten(0, 1) for row in rows)).unflatten(0, batch)
        groups[name] = replace(rows[0], values=values)
    return Zonotope(center, groups, spread_rest(op, *zonotopes))


# --- activations ----------------------------------------------------------------------------


def _kinked(op: ops.Op, z: Zonotope, *, errors: Errors, chosen: Tensor | None = None) -> Zonotope:
    """ReLU and LeakyReLU: linear but for the kink at zero."""
    negative = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
    if chosen is None:
        lines = strip(errors.relu, z.box, negative=negative)
    else:
        lines = around(z.box, chosen.expand_as(z.center), negative=negative)
    lower, upper = z.box.corners
    return between_lines(z, lines, somewhere((lower < 0) & (upper > 0)), errors)


def _sloped(op: _Sloped, z: Zonotope, *, errors: Errors) -> Zonotope:
    return _kinked(op.activation, z, errors=errors, chosen=op.slope)


def _squash(op: ops.Sigmoid | ops.Tanh, z: Zonotope, *, errors: Errors) -> Zonotope:
    """Lines of the smaller derivative of the two ends: the gap to them only grows."""
    lower, upper = z.box.corners
    at_lower, at_upper = (POINT_RULES[type(op)](op, t) for t in (lower, upper))
    slope = torch.minimum(_derivative(op, lower), _derivative(op, upper))
    first, last = at_lower - slope * lower, at_upper - slope * upper
    radius = ((last - first) / 2).clamp(min=0)
    lines = Strip(slope, (first + last) / 2, radius)
    return between_lines(z, lines, somewhere(upper > lower), errors)


def _derivative(op: ops.Sigmoid | ops.Tanh, x: Tensor) -> Tensor:
    if isinstance(op, ops.Sigmoid):
        return torch.sigmoid(x) * torch.sigmoid(-x)
    value = torch.tanh(x)
    return (1 - value) * (1 + value)


def _function(op: ops.Function, z: Zonotope, *, errors: Errors) -> Zonotope:
    """Lines of the chord's slope on both sides."""
    lower, upper = z.box.corners
    slope, low, high = parallel_lines(op, lower, upper)
    radius = ((high - low) / 2).clamp(min=0)
    lines = Strip(slope, (low + high) / 2, radius)
    return between_lines(z, lines, somewhere(radius > 0), errors)


def _product(op: ops.Op, a: Zonotope, b: Zonotope, *, errors: Errors) -> Zonotope:
    """Linear in both but for the product of the deviations, which becomes an error term."""
    rule = POINT_RULES[type(op)]
    groups: dict[int, Group] = {}
    for name in sorted({*a.groups, *b.groups}):
        left, right = aligned(name, (a, b))
        size = left.values.shape[:2]

        def each(first: Tensor, second: Tensor, size: torch.Size = size) -> Tensor:
            pair = (t.expand(*size, *t.shape[2:]).flatten(0, 1) for t in (first, second))
            return rule(op, *pair).unflatten(0, size)

        values = each(left.values, b.center.unsqueeze(1)) + each(
            a.center.unsqueeze(1), right.values
        )
        groups[name] = replace(left, values=values)
    center, radius = rule(op, a.center, b.center), rule(op, a.box.radius, b.box.radius)
    if a.rest is not None:
        radius = radius + rule(op, a.rest, b.center.abs())
    if b.rest is not None:
        radius = radius + rule(op, a.center.abs(), b.rest)
    return with_errors(Zonotope(center, groups), radius, None, errors)


def _max_pool(op: ops.MaxPool, z: Zonotope, *, errors: Errors) -> Zonotope:
    """Pass on an input that no other of its window can exceed; otherwise take the hull."""
    lower, upper = z.box.corners
    low, high = (POINT_RULES[ops.MaxPool](op, t) for t in (lower, upper))
    window = pooled_places(op, tuple(lower.shape[1:])).to(lower.device)
    outside = window < 0
    places = window.clamp(min=0).flatten()

    def look(t: Tensor) -> Tensor:  # [batch, window, *output shape]
        values = t.flatten(1)[:, places].unflatten(1, tuple(window.shape))
        return values.masked_fill(outside, -torch.inf)

    with torch.no_grad():
        best = look(lower).argmax(1, keepdim=True)
        others = look(upper).scatter(1, best, -torch.inf).amax(1)
        dominated = low >= others
    shape = low.shape[1:]
    winner = window.expand(len(lower), *window.shape).gather(1, best).flatten(1)
    center = z.center.flatten(1).gather(1, winner).view_as(low)

    def picked(values: Tensor) -> Tensor:
        """Take the winners out of [batch, rows, *shape]."""
        rows = values.flatten(2)
        rows = rows.gather(2, winner.unsqueeze(1).expand(-1, rows.shape[1], -1))
        return torch.where(dominated.unsqueeze(1), rows.unflatten(2, shape), 0.0)

    groups: dict[int, Group] = {}
    for name, group in z.groups.items():
        before = group.spread()
        groups[name] = replace(before, values=picked(before.values))
    rest = None if z.rest is None else picked(z.rest.unsqueeze(1)).squeeze(1)
    radius = torch.where(dominated, 0.0, (high - low) / 2)
    pooled = Zonotope(torch.where(dominated, center, (high + low) / 2), groups, rest)
    return with_errors(pooled, radius, somewhere(~dominated), errors)


def by_intervals(op: ops.Op, *zonotopes: Zonotope, errors: Errors) -> Zonotope:
    """An operation without a rule of its own: the box of what it makes of boxes."""
    box = interval.RULES[type(op)](op, *(z.box for z in zonotopes), rounding=0.0)
    groups, rest = errors.of_layer(box.radius)
    return Zonotope(box.center, groups, rest)


# Operations for which `by_intervals` has to do.
BY_INTERVALS: tuple[type[ops.Op], ...] = (
    *(ops.Softmax, ops.Standardize, ops.Step, ops.Where, ops.ArgMax, ops.Distance),
)

RULES: dict[type[ops.Op], Callable[..., Any]] = {
    ops.Linear: _affine,
    ops.Conv2d: _affine,
    ops.ConvTranspose2d: _affine,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _in_place,
    ops.AvgPool: _rearrange,
    ops.MaxPool: _max_pool,
    ops.Reshape: _in_place,
    ops.Permute: _rearrange,
    ops.Pad: _pad,
    ops.Slice: _rearrange,
    ops.Take: _rearrange,
    ops.Concat: _join,
    ops.Add: _join,
    ops.Sub: _join,
    ops.Relu: _kinked,
    ops.LeakyRelu: _kinked,
    ops.Sigmoid: _squash,
    ops.Tanh: _squash,
    ops.Function: _function,
    ops.Mul: _product,
    ops.MatMul: _product,
    ops.Differences: _rearrange,
    **dict.fromkeys(BY_INTERVALS, by_intervals),
}
