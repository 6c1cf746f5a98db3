"""Condensing a network: what each operation does to the rows that its values are.

One rule per operation; activations and products become neurons (`Condenser`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import check_time
from tightrope.domains.boxes.condensed import TINY, Condensed, Condenser, Value, diagonal
from tightrope.domains.linear.rules import growth
from tightrope.domains.reduced.reduction import reducible
from tightrope.graph import Graph, ops
from tightrope.graph.dense import convolution_entries, transposed_entries, transposed_shape
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map

MOST_ENTRIES = 1 << 25
MOST_PRODUCTS = 256
UNITS = 256  # inputs that are put through a pool at a time, to see what they become


def condense(
    graph: Graph, boxes: dict[int, Box], matrix: Tensor, offset: Tensor, *, rounding: float
) -> Condensed | None:
    """Condense a float64 network; None if it bends otherwise than ReLUs and products, or is large.

    `boxes` are proved bounds of nodes (batch 1): of the input, and of what activations read.
    """
    products = [i for i, node in enumerate(graph.nodes) if isinstance(node.op, ops.Mul)]
    if sum(math.prod(graph.nodes[i].shape) for i in products) > MOST_PRODUCTS:
        return None
    if not reducible(graph, besides=(ops.Mul,)):
        return None
    with np.errstate(all="ignore"):  # what is not finite proves nothing later on
        return _condense(graph, boxes, matrix, offset, rounding)


def _condense(
    graph: Graph, boxes: dict[int, Box], matrix: Tensor, offset: Tensor, rounding: float
) -> Condensed | None:
    condenser = Condenser(graph, boxes, rounding)
    values: dict[int, Value] = {0: condenser.start()}
    for i, node in enumerate(graph.nodes[1:], start=1):
        check_time()
        inputs = [values[j] for j in node.inputs]
        if isinstance(node.op, ops.Relu | ops.LeakyRelu):
            read = condenser.write_out(inputs[0])
            values[i] = condenser.activate(node.op, read, boxes[node.inputs[0]])
        else:
            shapes = [graph.nodes[j].shape for j in node.inputs]
            values[i] = RULES[type(node.op)](condenser, node.op, inputs, shapes)
        if values[i].matrix.nnz + condenser.entries > MOST_ENTRIES or condenser.full:
            return None
    last = values[len(graph.nodes) - 1]
    rows = sparse.csr_array(matrix.double().numpy())
    # The rows may have been rounded to float64.
    found = condenser.finish(condenser.affine(rows, offset.double().numpy(), last, extra=1))
    return None if condenser.full else found


# --- one rule per operation -------------------------------------------------------------------

_Shapes = list[tuple[int, ...]]


def _linear(c: Condenser, op: ops.Linear, values: list[Value], shapes: _Shapes) -> Value:
    weight = sparse.csr_array(op.weight.numpy())
    copies = math.prod(shapes[0][:-1])
    bias = np.zeros(weight.shape[0]) if op.bias is None else op.bias.numpy()
    if copies > 1:
        weight = sparse.csr_array(sparse.kron(sparse.eye_array(copies), weight))
        bias = np.tile(bias, copies)
    return c.affine(weight, bias, values[0])


def _conv(c: Condenser, op: ops.Conv2d, values: list[Value], shapes: _Shapes) -> Value:
    row, column, tap, outputs = convolution_entries(op, shapes[0])
    data = op.weight.flatten()[tap].numpy()
    shape = (outputs, math.prod(shapes[0]))
    weight = sparse.csr_array((data, (row.numpy(), column.numpy())), shape)
    bias = np.zeros(outputs)
    if op.bias is not None:
        bias = np.repeat(op.bias.numpy(), outputs // len(op.bias))
    return c.affine(weight, bias, values[0])


def _conv_transpose(
    c: Condenser, op: ops.ConvTranspose2d, values: list[Value], shapes: _Shapes
) -> Value:
    after = tuple(transposed_shape(op, shapes[0]))
    column, row, tap = transposed_entries(op, after)
    entries = (op.weight.flatten()[tap].numpy(), (row.numpy(), column.numpy()))
    weight = sparse.csr_array(entries, (math.prod(after), math.prod(shapes[0])))
    bias = 0.0 if op.bias is None else np.repeat(op.bias.numpy(), math.prod(after[1:]))
    return c.affine(weight, bias, values[0])


def _batch_norm(c: Condenser, op: ops.BatchNorm, values: list[Value], shapes: _Shapes) -> Value:
    each = math.prod(shapes[0][1:])
    factor, offset = (np.repeat(t.numpy(), each) for t in batchnorm_map(op))
    # The offset is mean times factor and the bias: what is rounded there grows with them.
    mean = np.repeat(np.abs(op.mean.numpy()), each) * np.abs(factor)
    bias = 0.0 if op.bias is None else np.repeat(np.abs(op.bias.numpy()), each)
    found = c.affine(diagonal(factor), offset, values[0], extra=16)
    # The factor itself may underflow, and it meets the mean and whatever comes in.
    met = TINY * (c.size(values[0]) + np.repeat(np.abs(op.mean.numpy()), each))
    slack = found.slack + 16 * c.rounding * (mean + bias) + met
    return Value(found.matrix, found.constant, slack)


def _shift(c: Condenser, op: ops.Shift, values: list[Value], shapes: _Shapes) -> Value:
    offset = op.offset.double().expand(1, *shapes[0]).flatten().numpy()
    return c.affine(diagonal(np.ones(len(offset))), -offset if op.subtract else offset, values[0])


def _scale(c: Condenser, op: ops.Scale, values: list[Value], shapes: _Shapes) -> Value:
    factor = op.factor.double().expand(1, *shapes[0]).flatten().numpy()
    return c.affine(diagonal(1 / factor if op.divide else factor), 0.0, values[0], extra=2)


def _pool(c: Condenser, op: ops.AvgPool, values: list[Value], shapes: _Shapes) -> Value:
    size = math.prod(shapes[0])
    parts = []
    for place in torch.arange(size).split(UNITS):
        check_time()
        units = torch.zeros(len(place), size, dtype=torch.float64)
        units[torch.arange(len(place)), place] = 1.0
        shares = POINT_RULES[ops.AvgPool](op, units.view(-1, *shapes[0])).flatten(1)
        parts.append(sparse.csr_array(shares.numpy()))
    return c.affine(sparse.csr_array(sparse.vstack(parts).T), 0.0, values[0], extra=4)


def _moved(c: Condenser, op: ops.Op, values: list[Value], shapes: _Shapes) -> Value:
    """Operations that move numbers about: they tell where to by moving the numbers' places."""
    places, end = [], 1
    for shape in shapes:
        count = math.prod(shape)
        places.append(torch.arange(end, end + count, dtype=torch.float64).view(1, *shape))
        end += count
    mover = ops.Pad(op.pads, 0.0) if isinstance(op, ops.Pad) else op
    place = POINT_RULES[type(op)](mover, *places).flatten().long().numpy()
    blank = sparse.csr_array((1, c.columns))
    matrix = sparse.csr_array(sparse.vstack([blank, *(v.matrix for v in values)]))[place]
    padding = [op.value if isinstance(op, ops.Pad) else 0.0]
    constant = np.concatenate([padding, *(v.constant for v in values)])[place]
    slack = np.concatenate([[0.0], *(v.slack for v in values)])[place]
    return Value(sparse.csr_array(matrix), constant, slack)


def _sum(c: Condenser, op: ops.Add | ops.Sub, values: list[Value], shapes: _Shapes) -> Value:
    a, b = values
    size = c.size(a) + c.size(b)
    slack = (a.slack + b.slack + growth(2, c.rounding) * size) * (1 + 1e-9)
    if isinstance(op, ops.Sub):
        return Value(sparse.csr_array(a.matrix - b.matrix), a.constant - b.constant, slack)
    return Value(sparse.csr_array(a.matrix + b.matrix), a.constant + b.constant, slack)


def _product(c: Condenser, op: ops.Mul, values: list[Value], shapes: _Shapes) -> Value:
    """Products of numbers, each factor repeated as often as the other one asks for."""
    places = [torch.arange(math.prod(s)).view(1, *s) for s in shapes]
    a, b = (
        c.affine(sparse.csr_array(sparse.eye_array(len(v.constant)))[p.flatten().numpy()], 0.0, v)
        for v, p in zip(values, torch.broadcast_tensors(*places), strict=True)
    )
    return c.multiply(c.write_out(a), c.write_out(b))


RULES: dict[type[ops.Op], Callable[..., Value]] = {
    ops.Linear: _linear,
    ops.Conv2d: _conv,
    ops.ConvTranspose2d: _conv_transpose,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: _pool,
    ops.Reshape: _moved,
    ops.Permute: _moved,
    ops.Pad: _moved,
    ops.Slice: _moved,
    ops.Take: _moved,
    ops.Concat: _moved,
    ops.Add: _sum,
    ops.Sub: _sum,
    ops.Mul: _product,
}
