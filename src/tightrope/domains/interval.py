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
from tightrope.domains.relu_box import relu_box
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map
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
    if rounding and box.centered:
        box = _around(*box.middle, rounding)  # strict rules start from corners
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

    The radius needs `|W_y - W_i| r` for each sample's own y. All pairs of classes that occur
    are multiplied at once and each sample picks its row: cheaper than one matrix per sample.
    """
    weight, bias = layer.weight, layer.bias
    center, radius = box.middle
    present, row = labels.unique(return_inverse=True)
    gap = weight[present].unsqueeze(1) - weight.unsqueeze(0)
    growth = _growth(weight.shape[1] + 2, rounding)
    if rounding:
        radius = _widened(center, radius, growth)
    spread = F.linear(radius, gap.abs().flatten(0, 1)).unflatten(1, gap.shape[:2])
    spread = spread[torch.arange(len(labels), device=labels.device), row]
    if not rounding:
        outputs = F.linear(center, weight, bias)
        return outputs.gather(1, labels[:, None]) - outputs - spread
    # In strict mode the centre goes through the same differences, so that what is left of
    # a cancellation between W_y and W_i is as small as the differences themselves.
    middle = F.linear(center, gap.flatten(0, 1)).unflatten(1, gap.shape[:2])
    middle = middle[torch.arange(len(labels), device=labels.device), row]
    if bias is not None:
        # Off by a unit of the difference, which is no larger than the sum and the product
        # together: there is room for it in what both of them get.
        middle = middle + (bias[labels].unsqueeze(1) - bias)
    spread = spread * (1 + growth) + 4 * rounding * middle.abs() + _tiny(spread)
    lower = _down(middle - spread)
    return lower.scatter(1, labels[:, None], 0.0)


def _differences(output: Box, labels: Tensor) -> Tensor:
    """Margins of a network that does not end in a linear layer: sound, but looser."""
    gap = output.lower.gather(1, labels[:, None]) - output.upper
    return _down(gap).scatter(1, labels[:, None], 0.0)


def row_bounds(output: Box, matrix: Tensor, *, rounding: float = 0.0) -> Tensor:
    """Return lower bounds on `matrix @ o`, one per row, where o lies in a box (of batch size 1)."""
    lower, upper = (t.flatten() for t in output.corners)
    bounds = matrix.clamp(min=0) @ lower + matrix.clamp(max=0) @ upper
    if not rounding:
        return bounds
    size = matrix.abs() @ torch.maximum(lower.abs(), upper.abs())
    return _down(bounds - _growth(2 * matrix.shape[1], rounding) * size - _tiny(size))


# --- rounding -------------------------------------------------------------------------------


def _growth(terms: int, rounding: float) -> float:
    """Relative error of a sum of `terms` products, with a few more for what surrounds it."""
    steps = (terms + 8) * rounding
    return steps / (1 - steps)


def _widened(center: Tensor, radius: Tensor, growth: float) -> Tensor:
    """Return a radius that covers the rounding of products with the centre.

    What is rounded of the radius itself, here and in products with it, is covered by the factor
    `1 + growth` that each of them gets in the end.
    """
    return radius + growth * center.abs() + _tiny(radius)


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny  # covers underflow


def _down(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, -torch.inf))


def _up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def _outward(lower: Tensor, upper: Tensor, rounding: float) -> Box:
    return Box(_down(lower), _up(upper)) if rounding else Box(lower, upper)


def _around(center: Tensor, radius: Tensor, rounding: float) -> Box:
    if not rounding:
        return Box.around(center, radius)
    return Box(_down(center - radius), _up(center + radius))


# --- affine rules ---------------------------------------------------------------------------


def _affine(op: ops.Linear | ops.Conv2d, box: Box, *, rounding: float) -> Box:
    point_rule = POINT_RULES[type(op)]
    center, radius = box.middle
    magnitude = op.map_tensors(torch.abs)
    if not rounding:
        return Box.around(point_rule(op, center), point_rule(_unbiased(magnitude), radius))
    growth = _growth(op.weight[0].numel() + 1, rounding)
    spread = point_rule(_unbiased(magnitude), _widened(center, radius, growth))
    if magnitude.bias is not None:
        shape = (-1,) + (1,) * (2 if isinstance(op, ops.Conv2d) else 0)
        spread = spread + growth * magnitude.bias.view(shape)
    return _around(point_rule(op, center), spread * (1 + growth) + _tiny(spread), rounding)


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
        spread = spread + _tiny(spread) * (factor.abs() + reach)
        spread = spread + 16 * rounding * (reach * factor.abs() + bias) + _tiny(spread)
    return _around(middle, spread, rounding)


def _shift(op: ops.Shift, box: Box, *, rounding: float) -> Box:
    if box.centered and not rounding:
        return Box.around(POINT_RULES[ops.Shift](op, box.center), box.radius)
    lower, upper = (POINT_RULES[ops.Shift](op, t) for t in box.corners)
    return _outward(lower, upper, rounding)


def _scale(op: ops.Scale, box: Box, *, rounding: float) -> Box:
    ends = [POINT_RULES[ops.Scale](op, t) for t in box.corners]
    return _outward(torch.minimum(*ends), torch.maximum(*ends), rounding)


def _add(op: ops.Add, a: Box, b: Box, *, rounding: float) -> Box:
    return _outward(a.lower + b.lower, a.upper + b.upper, rounding)


def _sub(op: ops.Sub, a: Box, b: Box, *, rounding: float) -> Box:
    return _outward(a.lower - b.upper, a.upper - b.lower, rounding)


def _avg_pool(op: ops.AvgPool, box: Box, *, rounding: float) -> Box:
    pooled = box.map(lambda t: POINT_RULES[ops.AvgPool](op, t))
    if not rounding:
        return pooled
    growth = _growth(op.kernel[0] * op.kernel[1], rounding)
    size = torch.maximum(box.lower.abs(), box.upper.abs())
    slack = growth * POINT_RULES[ops.AvgPool](op, size) * (1 + growth) + _tiny(size)
    return _outward(pooled.lower - slack, pooled.upper + slack, rounding)


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
    return _outward(image.lower, image.upper, rounding)


def _squash(op: ops.Sigmoid | ops.Tanh, box: Box, *, rounding: float) -> Box:
    image = _monotone(op, box, rounding=rounding)
    if not rounding:
        return image
    # The library's exponential may be off by a few units in the last place.
    floor = 0.0 if isinstance(op, ops.Sigmoid) else -1.0
    slack = [8 * rounding * t.abs() + _tiny(t) for t in image.corners]
    lower = _down(image.lower - slack[0]).clamp(min=floor)
    return Box(lower, _up(image.upper + slack[1]).clamp(max=1.0))


def _concat(op: ops.Concat, *boxes: Box, rounding: float) -> Box:
    lowers, uppers = zip(*(box.corners for box in boxes), strict=True)
    return Box(torch.cat(lowers, op.dim), torch.cat(uppers, op.dim))


RULES: dict[type[ops.Op], Callable[..., Box]] = {
    ops.Linear: _affine,
    ops.Conv2d: _affine,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: _avg_pool,
    ops.MaxPool: _monotone,
    ops.Reshape: _rearrange,
    ops.Permute: _rearrange,
    ops.Pad: _monotone,
    ops.Slice: _rearrange,
    ops.Concat: _concat,
    ops.Add: _add,
    ops.Sub: _sub,
    ops.Relu: _relu,
    ops.LeakyRelu: _leaky_relu,
    ops.Sigmoid: _squash,
    ops.Tanh: _squash,
}
