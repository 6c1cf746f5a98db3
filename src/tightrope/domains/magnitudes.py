"""How large the terms of each operation can get: what rounding errors are measured by.

For every node, `|W| |x| + |b|` with |x| the largest values its inputs take on the box. Computed
coefficients times this bound the rounding errors of a backward pass
(`tightrope.domains.linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map


def magnitudes(graph: Graph, boxes: Mapping[int, Box], *, upto: int | None = None) -> Any:
    """Return the magnitude of every node, [batch, *shape], up to a position.

    `boxes` holds at least the input's box, and whatever else is known: a node whose box is known
    hands the smaller of the two numbers on.
    """
    last = len(graph.nodes) - 1 if upto is None else upto
    terms: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    for i, node in enumerate(graph.nodes[: last + 1]):
        if i:
            inputs = [values[j] for j in node.inputs]
            terms[i] = RULES[type(node.op)](node.op, *inputs)
        if i in boxes:
            size = torch.maximum(boxes[i].lower.abs(), boxes[i].upper.abs())
            values[i] = torch.minimum(terms[i], size) if i else size
        else:
            values[i] = terms[i]
    terms[0] = values[0]
    return terms


def _affine(op: Any, x: Tensor) -> Tensor:
    return POINT_RULES[type(op)](op.map_tensors(torch.abs), x)


def _batch_norm(op: ops.BatchNorm, x: Tensor) -> Tensor:
    shape = (-1,) + (1,) * (x.dim() - 2)
    factor, _ = batchnorm_map(op)
    bias = 0.0 if op.bias is None else op.bias.abs().view(shape)
    return (x + op.mean.abs().view(shape)) * factor.abs().view(shape) + bias


def _rearrange(op: Any, *xs: Tensor) -> Tensor:
    return POINT_RULES[type(op)](op, *xs)


RULES: dict[type[ops.Op], Callable[..., Tensor]] = {
    ops.Linear: _affine,
    ops.Conv2d: _affine,
    ops.BatchNorm: _batch_norm,
    ops.Shift: lambda op, x: x + op.offset.abs(),
    ops.Scale: lambda op, x: x / op.factor.abs() if op.divide else x * op.factor.abs(),
    ops.AvgPool: _rearrange,
    ops.MaxPool: _rearrange,
    ops.Reshape: _rearrange,
    ops.Permute: _rearrange,
    ops.Pad: lambda op, x: POINT_RULES[ops.Pad](ops.Pad(op.pads, abs(op.value)), x),
    ops.Slice: _rearrange,
    ops.Concat: _rearrange,
    ops.Add: lambda op, a, b: a + b,
    ops.Sub: lambda op, a, b: a + b,
    ops.Relu: _rearrange,
    ops.LeakyRelu: lambda op, x: x * max(1.0, op.slope),
    ops.Sigmoid: lambda op, x: torch.ones_like(x),
    ops.Tanh: lambda op, x: torch.ones_like(x),
}
