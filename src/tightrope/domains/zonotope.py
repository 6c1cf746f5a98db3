"""Zonotopes (DeepZ): affine forms over shared error terms, one rule per operation.

A zonotope is the set `centre + sum_e generator_e * noise_e` with every noise in [-1, 1].
Affine operations are exact on it. An activation is enclosed between two parallel lines
`slope * x + middle ± radius`; the radius becomes a new error term of that neuron.

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

from tightrope.box import Box, flat
from tightrope.domains import interval
from tightrope.domains.linear.curves import parallel_lines
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map
from tightrope.graph.windows import pooled_places


@dataclass(frozen=True, eq=False)
class Zonotope:
    """A centre [batch, *shape] and generators [batch, error terms, *shape].

    `terms` names the error term of each generator, in increasing order: branches of a network
    make terms of their own, and only generators of the same term add up where they join.
    """

    center: Tensor
    generators: Tensor
    terms: Tensor

    @property
    def box(self) -> Box:
        """The smallest box around the zonotope."""
        return Box.around(self.center, self.generators.abs().sum(1))


class Counter:
    """Hands out the names of error terms."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, count: int) -> Tensor:
        """Return `count` names that nobody has."""
        self.used += count
        return torch.arange(self.used - count, self.used)


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
) -> tuple[Box, dict[int, Box]]:
    """Return bounds on the output and on the nodes at the positions in `keep`.

    `slopes` maps positions of ReLU and LeakyReLU nodes to the slopes of the lines around
    unstable neurons, [batch, *shape] or anything that broadcasts to it; by default the
    slope is that of the chord from the lower to the upper bound, `u / (u - l)` for a ReLU.
    Any slope is sound; those from 0 to 1 are useful for a ReLU.
    """
    zonotopes = propagate(graph, box, keep=keep, slopes=slopes)
    boxes = {i: zonotope.box for i, zonotope in zonotopes.items()}
    return boxes[len(graph.nodes) - 1], boxes


def margins(
    graph: Graph,
    box: Box,
    labels: Tensor,
    *,
    keep: Collection[int] = (),
    slopes: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, dict[int, Box]]:
    """Return lower bounds on `o_y - o_i` for all classes i, of shape [batch, classes].

    The outputs share their error terms, so the differences are taken term by term; the
    entry of the true class y is zero. Positions in `keep` are bounded and returned, too.
    """
    zonotopes = propagate(graph, box, keep=keep, slopes=slopes)
    output = zonotopes[len(graph.nodes) - 1]
    own = labels.view(-1, 1, 1).expand(-1, output.generators.shape[1], 1)
    spread = (output.generators.gather(2, own) - output.generators).abs().sum(1)
    lower = output.center.gather(1, labels[:, None]) - output.center - spread
    return lower, {i: zonotopes[i].box for i in {*keep}}


def propagate(
    graph: Graph,
    box: Box,
    *,
    keep: Collection[int] = (),
    slopes: Mapping[int, Tensor] | None = None,
) -> dict[int, Zonotope]:
    """Return the zonotopes of the output node and of the positions in `keep`."""
    sloped: dict[int, ops.Op] = {}
    for i, slope in (slopes or {}).items():
        op = graph.nodes[i].op
        if not isinstance(op, ops.Relu | ops.LeakyRelu):
            raise ValueError(f"node {i} is no ReLU or LeakyReLU and takes no slopes")
        sloped[i] = _Sloped(op, slope)
    counter = Counter()
    rules = {**RULES, _Sloped: _sloped}
    start = _of_box(box, counter)
    return graph.replace_ops(sloped).propagate(rules, start, keep=keep, counter=counter)


def _of_box(box: Box, counter: Counter) -> Zonotope:
    """Return a box as a zonotope: one error term for each neuron."""
    center, radius = box.middle
    everywhere = torch.ones(center[0].numel(), dtype=torch.bool, device=center.device)
    nothing = Zonotope(center, center.new_zeros(len(center), 0, *center.shape[1:]), counter.take(0))
    return _with_errors(nothing, radius, everywhere, counter)


def _with_errors(zonotope: Zonotope, radius: Tensor, mask: Tensor, counter: Counter) -> Zonotope:
    """Add one error term of size `radius` to each neuron in `mask` (flat, for all samples)."""
    neurons = mask.nonzero()[:, 0]
    count = len(neurons)
    fresh = radius.new_zeros(len(radius), count, len(mask))
    fresh[:, torch.arange(count, device=mask.device), neurons] = flat(radius)[:, neurons]
    generators = torch.cat(
        (zonotope.generators, fresh.reshape(*fresh.shape[:2], *radius.shape[1:])), 1
    )
    return Zonotope(zonotope.center, generators, torch.cat((zonotope.terms, counter.take(count))))


def _aligned(zonotopes: tuple[Zonotope, ...]) -> tuple[list[Tensor], Tensor]:
    """Return generators over the union of the error terms, and the union."""
    terms = torch.cat([z.terms for z in zonotopes]).unique()
    aligned = []
    for z in zonotopes:
        if len(z.terms) == len(terms):
            aligned.append(z.generators)
            continue
        place = torch.searchsorted(terms, z.terms).to(z.generators.device)
        size = (len(z.center), len(terms), *z.center.shape[1:])
        aligned.append(z.generators.new_zeros(size).index_copy(1, place, z.generators))
    return aligned, terms


# --- affine rules ---------------------------------------------------------------------------


def _on_generators(zonotope: Zonotope, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a linear map of samples to every generator."""
    generators = zonotope.generators
    batch, count = generators.shape[:2]
    if count == 0:  # convolutions and pools refuse empty batches
        return rule(zonotope.center).unsqueeze(1)[:, :0]
    return rule(generators.flatten(0, 1)).unflatten(0, (batch, count))


def _linear_map(op: ops.Op, zonotope: Zonotope, linear: ops.Op) -> Zonotope:
    rule = POINT_RULES[type(op)]
    generators = _on_generators(zonotope, lambda t: rule(linear, t))
    return Zonotope(rule(op, zonotope.center), generators, zonotope.terms)


def _affine(op: Any, z: Zonotope, *, counter: Counter) -> Zonotope:
    return _linear_map(op, z, replace(op, bias=None))


def _rearrange(op: ops.Op, z: Zonotope, *, counter: Counter) -> Zonotope:
    return _linear_map(op, z, op)


def _pad(op: ops.Pad, z: Zonotope, *, counter: Counter) -> Zonotope:
    return _linear_map(op, z, ops.Pad(op.pads, 0.0))


def _batch_norm(op: ops.BatchNorm, z: Zonotope, *, counter: Counter) -> Zonotope:
    shape = (-1,) + (1,) * (z.center.dim() - 2)
    factor = batchnorm_map(op)[0].view(shape)
    return Zonotope(POINT_RULES[type(op)](op, z.center), z.generators * factor, z.terms)


def _shift(op: ops.Shift, z: Zonotope, *, counter: Counter) -> Zonotope:
    return Zonotope(POINT_RULES[ops.Shift](op, z.center), z.generators, z.terms)


def _join(op: ops.Op, *zonotopes: Zonotope, counter: Counter) -> Zonotope:
    """Add, subtract or concatenate, error term by error term."""
    rule = POINT_RULES[type(op)]
    aligned, terms = _aligned(zonotopes)
    center = rule(op, *(z.center for z in zonotopes))
    size = (len(center), len(terms))
    generators = rule(op, *(g.flatten(0, 1) for g in aligned)).view(*size, *center.shape[1:])
    return Zonotope(center, generators, terms)


# --- activations ----------------------------------------------------------------------------


def _between_lines(
    z: Zonotope, slope: Tensor, middle: Tensor, radius: Tensor, mask: Tensor, counter: Counter
) -> Zonotope:
    """Enclose by `slope * x + middle ± radius`; the radius is zero outside of `mask`."""
    scaled = Zonotope(slope * z.center + middle, slope.unsqueeze(1) * z.generators, z.terms)
    return _with_errors(scaled, radius, flat(mask).any(0), counter)


def _kinked(op: ops.Op, z: Zonotope, *, counter: Counter, chosen: Tensor | None = None) -> Zonotope:
    """ReLU and LeakyReLU: linear but for the kink at zero."""
    negative = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
    lower, upper = z.box.corners
    unstable = (lower < 0) & (upper > 0)
    at_lower, at_upper = negative * lower, upper
    if chosen is None:
        # No epsilon: the width of an unstable neuron is positive, and others take no quotient.
        slope = (at_upper - at_lower) / torch.where(unstable, upper - lower, 1.0)
    else:
        slope = chosen.expand_as(lower)
    # The gap to a line of that slope is piecewise linear: extreme at an end or at the kink.
    gaps = torch.stack(
        (at_lower - slope * lower, torch.zeros_like(lower), at_upper - slope * upper)
    )
    highest, lowest = gaps.amax(0), gaps.amin(0)
    # What lies on one side of the kink is scaled exactly.
    exact = torch.where(lower >= 0, torch.ones_like(lower), negative)
    slope = torch.where(unstable, slope, exact)
    middle = torch.where(unstable, (highest + lowest) / 2, 0.0)
    radius = torch.where(unstable, (highest - lowest) / 2, 0.0)
    return _between_lines(z, slope, middle, radius, unstable, counter)


def _sloped(op: _Sloped, z: Zonotope, *, counter: Counter) -> Zonotope:
    return _kinked(op.activation, z, counter=counter, chosen=op.slope)


def _squash(op: ops.Sigmoid | ops.Tanh, z: Zonotope, *, counter: Counter) -> Zonotope:
    """Lines of the smaller derivative of the two ends: the gap to them only grows."""
    lower, upper = z.box.corners
    at_lower, at_upper = (POINT_RULES[type(op)](op, t) for t in (lower, upper))
    slope = torch.minimum(_derivative(op, lower), _derivative(op, upper))
    first, last = at_lower - slope * lower, at_upper - slope * upper
    radius = ((last - first) / 2).clamp(min=0)
    return _between_lines(z, slope, (first + last) / 2, radius, upper > lower, counter)


def _derivative(op: ops.Sigmoid | ops.Tanh, x: Tensor) -> Tensor:
    if isinstance(op, ops.Sigmoid):
        return torch.sigmoid(x) * torch.sigmoid(-x)
    value = torch.tanh(x)
    return (1 - value) * (1 + value)


def _function(op: ops.Function, z: Zonotope, *, counter: Counter) -> Zonotope:
    """Lines of the chord's slope on both sides."""
    lower, upper = z.box.corners
    slope, low, high = parallel_lines(op, lower, upper)
    radius = ((high - low) / 2).clamp(min=0)
    return _between_lines(z, slope, (low + high) / 2, radius, radius > 0, counter)


def _product(op: ops.Op, a: Zonotope, b: Zonotope, *, counter: Counter) -> Zonotope:
    """Linear in both but for the product of the deviations, which becomes an error term."""
    rule = POINT_RULES[type(op)]
    (left, right), terms = _aligned((a, b))
    size = (len(a.center), len(terms))

    def each(first: Tensor, second: Tensor) -> Tensor:
        first, second = (t.expand(*size, *t.shape[2:]).flatten(0, 1) for t in (first, second))
        return rule(op, first, second).unflatten(0, size)

    generators = each(left, b.center.unsqueeze(1)) + each(a.center.unsqueeze(1), right)
    center, radius = rule(op, a.center, b.center), rule(op, a.box.radius, b.box.radius)
    everywhere = torch.ones(center[0].numel(), dtype=torch.bool, device=center.device)
    return _with_errors(Zonotope(center, generators, terms), radius, everywhere, counter)


def _max_pool(op: ops.MaxPool, z: Zonotope, *, counter: Counter) -> Zonotope:
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
    flat = z.generators.flatten(2)
    picked = flat.gather(2, winner.unsqueeze(1).expand(-1, flat.shape[1], -1))
    generators = torch.where(dominated.unsqueeze(1), picked.unflatten(2, shape), 0.0)
    radius = torch.where(dominated, 0.0, (high - low) / 2)
    pooled = Zonotope(torch.where(dominated, center, (high + low) / 2), generators, z.terms)
    return _with_errors(pooled, radius, ~dominated.flatten(1).all(0), counter)


def by_intervals(op: ops.Op, *zonotopes: Zonotope, counter: Counter) -> Zonotope:
    """An operation without a rule of its own: the box of what it makes of boxes."""
    box = interval.RULES[type(op)](op, *(z.box for z in zonotopes), rounding=0.0)
    return _of_box(box, counter)


# Operations for which `by_intervals` has to do.
BY_INTERVALS: tuple[type[ops.Op], ...] = (
    *(ops.Softmax, ops.Standardize, ops.Step, ops.Where, ops.ArgMax),
)

RULES: dict[type[ops.Op], Callable[..., Any]] = {
    ops.Linear: _affine,
    ops.Conv2d: _affine,
    ops.ConvTranspose2d: _affine,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _rearrange,
    ops.AvgPool: _rearrange,
    ops.MaxPool: _max_pool,
    ops.Reshape: _rearrange,
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
