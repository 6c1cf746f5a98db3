"""Interval bound propagation (IBP): one rule per operation on boxes.

Affine rules work on centre and radius: `c' = W c + b`, `r' = |W| r`, two products instead
of four. All rules are differentiable in the parameters, so the same code trains and
certifies.

With `rounding = 0` (training) the rules are plain floating-point arithmetic. With
`rounding = torch.finfo(dtype).eps` every rule also covers its own rounding errors: the box
it returns contains the exact, real-number image of the box it was given. A dot product of
length n computed in any order is off by at most `g = n u / (1 - n u)` times the sum of
absolute values, so an affine rule widens the radius it multiplies by `g |c|`; elementwise
rules step outward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.box import Box
from tightrope.devices import launches
from tightrope.domains.composites import difference_box, softmax_box, standardized_box
from tightrope.domains.curves import function_box
from tightrope.domains.distances import distance_box
from tightrope.domains.products import matmul_box, product_box
from tightrope.domains.relu_box import relu_box
from tightrope.domains.rounding import around, cornered, down, growth, outward, summed, tiny, up
from tightrope.domains.step_boxes import choice_box, place_box, step_box
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map, transposed_terms
from tightrope.graph.graph import Rules


def bounds(
    graph: Graph,
    box: Box,
    *,
    keep: Collection[int] = (),
    rounding: float = 0.0,
    rules: Rules | None = None,
) -> tuple[Box, dict[int, Box]]:
    """Return bounds on the output and on the nodes at the positions in `keep`.

    `rules` are others than this module's, for training with bounds that are not sound.
    """
    if rounding:
        box = cornered(box, rounding)  # strict rules start from corners
    boxes = graph.propagate(rules or RULES, box, keep=keep, rounding=rounding)
    return boxes[len(graph.nodes) - 1], boxes


def margins(
    graph: Graph,
    box: Box,
    labels: Tensor,
    *,
    keep: Collection[int] = (),
    rounding: float = 0.0,
    rules: Rules | None = None,
) -> tuple[Tensor, dict[int, Box]]:
    """Return lower bounds on `o_y - o_i` for all classes i, of shape [batch, classes].

    The final linear layer is merged with the differences (its rows become `W_y - W_i`)
    before bounds are taken; the entry of the true class y is zero. Positions in `keep` are
    bounded along the way and returned, too.
    """
    last = graph.nodes[-1]
    if not isinstance(last.op, ops.Linear) or len(last.shape) != 1:
        output, boxes = bounds(graph, box, keep=keep, rounding=rounding, rules=rules)
        return _differences(output, labels), boxes
    body = Graph(graph.nodes[:-1])
    end = len(graph.nodes) - 1
    latent, boxes = bounds(body, box, keep={*keep} - {end}, rounding=rounding, rules=rules)
    if end in keep:
        boxes[end] = _affine(last.op, latent, rounding=rounding)
    return linear_margins(last.op, latent, labels, rounding=rounding), boxes


def linear_margins(layer: ops.Linear, box: Box, labels: Tensor, *, rounding: float = 0.0) -> Tensor:
    """Return lower bounds on `o_y - o_i` where `o = W z + b` and z lies in `box`.

    The radius needs `|W_y - W_i| r` for each sample's own y.
    """
    weight, bias = layer.weight, layer.bias
    center, radius = box.middle
    through = _own_differences(weight, labels) if launches(weight) else _pairs(weight, labels)
    share = growth(weight.shape[1] + 2, rounding)
    if rounding:
        radius = _widened(center, radius, share)
    spread = through(radius, torch.abs)
    if not rounding:
        outputs = F.linear(center, weight, bias)
        return outputs.gather(1, labels[:, None]) - outputs - spread
    # In strict mode the centre goes through the same differences, so that what is left of
    # a cancellation between W_y and W_i is as small as the differences themselves.
    middle = through(center, lambda gap: gap)
    if bias is not None:
        # Off by a unit of the difference, which is no larger than the sum and the product
        # together: there is room for it in what both of them get.
        middle = middle + (bias[labels].unsqueeze(1) - bias)
    spread = spread * (1 + share) + 4 * rounding * middle.abs() + tiny(spread)
    lower = down(middle - spread)
    return lower.scatter(1, labels[:, None], 0.0)


Through = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def _pairs(weight: Tensor, labels: Tensor) -> Through:
    """Return the products of vectors with (functions of) the differences `W_y - W_i`.

    All pairs of classes that occur are multiplied at once and each sample picks its row: cheaper
    than one matrix per sample.
    """
    present, row = labels.unique(return_inverse=True)
    gap = weight[present].unsqueeze(1) - weight.unsqueeze(0)

    def through(vectors: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        found = F.linear(vectors, function(gap).flatten(0, 1)).unflatten(1, gap.shape[:2])
        return found[torch.arange(len(labels), device=labels.device), row]

    return through


def _own_differences(weight: Tensor, labels: Tensor) -> Through:
    """The same with a matrix for each sample: which classes occur need not be known."""
    gap = weight[labels].unsqueeze(1) - weight

    def through(vectors: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.bmm(function(gap), vectors.unsqueeze(2)).squeeze(2)

    return through


def _differences(output: Box, labels: Tensor) -> Tensor:
    """Margins of a network that does not end in a linear layer: sound, but looser."""
    gap = output.lower.gather(1, labels[:, None]) - output.upper
    return down(gap).scatter(1, labels[:, None], 0.0)


def row_bounds(output: Box, matrix: Tensor, *, rounding: float = 0.0) -> Tensor:
    """Return lower bounds on `matrix @ o`, one per row, where o lies in a box (of batch size 1)."""
    lower, upper = (t.flatten() for t in output.corners)
    bounds = matrix.clamp(min=0) @ lower + matrix.clamp(max=0) @ upper
    if not rounding:
        return bounds
    size = matrix.abs() @ torch.maximum(lower.abs(), upper.abs())
    return down(bounds - growth(2 * matrix.shape[1], rounding) * size - tiny(size))


# --- affine rules ---------------------------------------------------------------------------


def _widened(center: Tensor, radius: Tensor, share: float) -> Tensor:
    """Return a radius that covers the rounding of products with the centre.

    What is rounded of the radius itself, here and in products with it, is covered by the factor
    `1 + share` that each of them gets in the end.
    """
    return radius + share * center.abs() + tiny(radius)


def _affine(op: ops.Linear | ops.Conv2d | ops.ConvTranspose2d, box: Box, *, rounding: float) -> Box:
    point_rule = POINT_RULES[type(op)]
    center, radius = box.middle
    magnitude = op.map_tensors(torch.abs)
    if not rounding:
        return Box.around(point_rule(op, center), point_rule(_unbiased(magnitude), radius))
    terms = transposed_terms(op) if isinstance(op, ops.ConvTranspose2d) else op.weight[0].numel()
    share = growth(terms + 1, rounding)
    spread = point_rule(_unbiased(magnitude), _widened(center, radius, share))
    if magnitude.bias is not None:
        shape = (-1,) + (1,) * (op.weight.dim() - 2)
        spread = spread + share * magnitude.bias.view(shape)
    return around(point_rule(op, center), spread * (1 + share) + tiny(spread), rounding)


def _unbiased(op: Any) -> Any:
    return type(op)(**{**vars(op), "bias": None})


def _batch_norm(op: ops.BatchNorm, box: Box, *, rounding: float) -> Box:
    center, radius = box.middle
    shape = (-1,) + (1,) * (center.dim() - 2)
    factor, offset = (t.view(shape) for t in batchnorm_map(op))
    middle = center * factor + offset
    spread = radius * factor.abs()
    if rounding:
        # factor: a sum, a root and a product; offset: a product and a sum.
        bias = 0 if op.bias is None else op.bias.abs().view(shape)
        reach = center.abs() + radius + op.mean.abs().view(shape)
        # Centre and radius may underflow, and so may the factor, which meets all of the reach.
        spread = spread + tiny(spread) * (factor.abs() + reach)
        spread = spread + 16 * rounding * (reach * factor.abs() + bias) + tiny(spread)
    return around(middle, spread, rounding)


def _shift(op: ops.Shift, box: Box, *, rounding: float) -> Box:
    if box.centered and not rounding:
        return Box.around(POINT_RULES[ops.Shift](op, box.center), box.radius)
    offset = (-op.offset if op.subtract else op.offset).to(box.lower.dtype)
    return summed(Box(*box.corners), Box(offset, offset), rounding)


def _scale(op: ops.Scale, box: Box, *, rounding: float) -> Box:
    ends = [POINT_RULES[ops.Scale](op, t) for t in box.corners]
    return outward(torch.minimum(*ends), torch.maximum(*ends), rounding)


def _add(op: ops.Add, a: Box, b: Box, *, rounding: float) -> Box:
    return summed(a, b, rounding)


def _sub(op: ops.Sub, a: Box, b: Box, *, rounding: float) -> Box:
    return summed(a, Box(-b.upper, -b.lower), rounding)


def _avg_pool(op: ops.AvgPool, box: Box, *, rounding: float) -> Box:
    pooled = box.map(lambda t: POINT_RULES[ops.AvgPool](op, t))
    if not rounding:
        return pooled
    share = growth(op.kernel[0] * op.kernel[1], rounding)
    size = torch.maximum(box.lower.abs(), box.upper.abs())
    slack = share * POINT_RULES[ops.AvgPool](op, size) * (1 + share) + tiny(size)
    return outward(pooled.lower - slack, pooled.upper + slack, rounding)


# --- shapes and activations -----------------------------------------------------------------


def _rearrange(op: ops.Op, box: Box, *, rounding: float) -> Box:
    return box.map(lambda t: POINT_RULES[type(op)](op, t))


def _monotone(op: ops.Op, box: Box, *, rounding: float) -> Box:
    """Pass both corners through an increasing operation that rounds nothing."""
    lower, upper = (POINT_RULES[type(op)](op, t) for t in box.corners)
    return Box(lower, upper)


def _relu(op: ops.Relu, box: Box, *, rounding: float) -> Box:
    if box.centered and not rounding:
        return Box.around(*relu_box(*box.middle))
    return _monotone(op, box, rounding=rounding)


def _leaky_relu(op: ops.LeakyRelu, box: Box, *, rounding: float) -> Box:
    image = _monotone(op, box, rounding=rounding)
    return outward(image.lower, image.upper, rounding)


def _squash(op: ops.Sigmoid | ops.Tanh, box: Box, *, rounding: float) -> Box:
    image = _monotone(op, box, rounding=rounding)
    if not rounding:
        return image
    # The library's exponential may be off by a few units in the last place.
    floor = 0.0 if isinstance(op, ops.Sigmoid) else -1.0
    slack = [8 * rounding * t.abs() + tiny(t) for t in image.corners]
    lower = down(image.lower - slack[0]).clamp(min=floor)
    return Box(lower, up(image.upper + slack[1]).clamp(max=1.0))


def _concat(op: ops.Concat, *boxes: Box, rounding: float) -> Box:
    lowers, uppers = zip(*(box.corners for box in boxes), strict=True)
    return Box(torch.cat(lowers, op.dim), torch.cat(uppers, op.dim))


RULES: dict[type[ops.Op], Callable[..., Box]] = {
    ops.Linear: _affine,
    ops.Conv2d: _affine,
    ops.ConvTranspose2d: _affine,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: _avg_pool,
    ops.MaxPool: _monotone,
    ops.Reshape: _rearrange,
    ops.Permute: _rearrange,
    ops.Pad: _monotone,
    ops.Slice: _rearrange,
    ops.Take: _rearrange,
    ops.Concat: _concat,
    ops.Add: _add,
    ops.Sub: _sub,
    ops.Relu: _relu,
    ops.LeakyRelu: _leaky_relu,
    ops.Sigmoid: _squash,
    ops.Tanh: _squash,
    ops.Function: function_box,
    ops.Mul: product_box,
    ops.MatMul: matmul_box,
    ops.Differences: difference_box,
    ops.Softmax: softmax_box,
    ops.Standardize: standardized_box,
    ops.Step: step_box,
    ops.Where: choice_box,
    ops.ArgMax: place_box,
    ops.Distance: distance_box,
}
