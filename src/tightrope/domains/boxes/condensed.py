"""A network as sparse rows: every activation as a linear function of the inputs and of others.

Whatever lies between two activations (convolutions, joins, slices, whole chains of linear layers)
becomes one sparse row per neuron, and so does each row of a property. Inputs that hardly vary are
no variables at all: their middle goes into the constant and their width into the slack.

`slack` says how far a row can be from the true value for any input of the box that the network was
condensed for, in exact arithmetic: rounding errors of the condensation are in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import check_time
from tightrope.domains.linear.rules import growth
from tightrope.domains.reduced.reduction import reducible
from tightrope.graph import Graph, ops
from tightrope.graph.dense import convolution_entries, transposed_entries, transposed_shape
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map

Array = NDArray[Any]

# Narrower inputs, relative to their size, are not worth a variable.
THIN = 2.0**-40
TINY = 1e-300
MOST_ENTRIES = 1 << 25
UNITS = 256  # inputs that are put through a pool at a time, to see what they become


@dataclass(frozen=True)
class Condensed:
    """Rows of neurons, in an order in which each reads earlier ones only, then of a property.

    Row i is `bias + weight . source` over the entries `pointer[i]` to `pointer[i + 1]`; sources
    below `inputs` are variables, others outputs of neurons. `left` is the slope of each activation
    below zero, `varying` says which inputs the variables are.
    """

    inputs: int
    neurons: int
    pointer: Array
    source: Array
    weight: Array
    bias: Array
    slack: Array
    left: Array
    varying: Array

    @property
    def rows(self) -> int:
        """How many rows the property has."""
        return len(self.bias) - self.neurons


@dataclass(frozen=True)
class _Value:
    """A node's values: `matrix z + constant`, off by at most `slack`."""

    matrix: Any
    constant: Array
    slack: Array


def varying_inputs(box: Box) -> Array:
    """Return which inputs of a box (batch 1) vary by more than a rounding error, flat."""
    lower, upper = (t.flatten().double().numpy() for t in box.corners)
    size = np.maximum(np.abs(lower), np.abs(upper))
    result: Array = ~(upper - lower <= THIN * size)
    return result


def condense(
    graph: Graph, boxes: dict[int, Box], matrix: Tensor, offset: Tensor, *, rounding: float
) -> Condensed | None:
    """Condense a float64 network; None if it has other bends than ReLUs or is too large.

    `boxes` are proved bounds of nodes (batch 1): of the input, and of what activations read.
    """
    if not reducible(graph):
        return None
    with np.errstate(all="ignore"):  # what is not finite proves nothing later on
        return _condense(graph, boxes, matrix, offset, rounding)


def _condense(
    graph: Graph, boxes: dict[int, Box], matrix: Tensor, offset: Tensor, rounding: float
) -> Condensed | None:
    condenser = _Condenser(graph, boxes, rounding)
    values: dict[int, _Value] = {0: condenser.start()}
    for i, node in enumerate(graph.nodes[1:], start=1):
        check_time()
        inputs = [values[j] for j in node.inputs]
        if isinstance(node.op, ops.Relu | ops.LeakyRelu):
            values[i] = condenser.activate(node.op, inputs[0], boxes[node.inputs[0]])
        else:
            shapes = [graph.nodes[j].shape for j in node.inputs]
            values[i] = RULES[type(node.op)](condenser, node.op, inputs, shapes)
        if values[i].matrix.nnz + condenser.entries > MOST_ENTRIES:
            return None
    last = values[len(graph.nodes) - 1]
    rows = sparse.csr_array(matrix.double().numpy())
    # The rows may have been rounded to float64.
    return condenser.finish(condenser.affine(rows, offset.double().numpy(), last, extra=1))


class _Condenser:
    """Holds the neurons found so far, and what rounding errors are measured by."""

    def __init__(self, graph: Graph, boxes: dict[int, Box], rounding: float) -> None:
        self.graph, self.rounding = graph, rounding
        self.box = boxes[0]
        self.varying = np.flatnonzero(varying_inputs(boxes[0]))
        activations = [n for n in graph.nodes if isinstance(n.op, ops.Relu | ops.LeakyRelu)]
        self.columns = len(self.varying) + sum(math.prod(node.shape) for node in activations)
        self.reach = np.zeros(self.columns)
        self.filled = len(self.varying)
        self.parts: list[_Value] = []
        self.left: list[Array] = []
        self.entries = 0

    def start(self) -> _Value:
        """Return the input: variables, and numbers that stand for what hardly varies."""
        lower, upper = (t.flatten().double().numpy() for t in self.box.corners)
        count = len(self.varying)
        self.reach[:count] = np.maximum(np.abs(lower), np.abs(upper))[self.varying]
        middle = lower / 2 + upper / 2
        # At least the larger distance to an end, whatever was rounded.
        slack = np.maximum(upper - middle, middle - lower) * (1 + 4 * self.rounding)
        slack = np.where(upper > lower, slack + TINY, 0.0)
        middle = np.where(upper > lower, middle, lower)
        middle[self.varying], slack[self.varying] = 0.0, 0.0
        places = (np.ones(count), (self.varying, np.arange(count)))
        return _Value(sparse.csr_array(places, (len(lower), self.columns)), middle, slack)

    def activate(self, op: ops.Op, value: _Value, box: Box) -> _Value:
        """Make neurons of what bends; what cannot bend on the whole box is passed on or zero."""
        left = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        # A value that depends on nothing is its constant, whatever rounding says.
        fixed = (np.diff(value.matrix.indptr) == 0) & (value.slack == 0)
        corners = (t.flatten().double().numpy() for t in box.corners)
        lower, upper = (np.where(fixed, value.constant, t) for t in corners)
        factor = np.where(lower >= 0, 1.0, np.where(upper <= 0, left, np.nan))
        passed = np.isfinite(factor) & self._short(value, factor)
        twin, sign = _twins(value, ~passed)
        first = ~passed & (twin == np.arange(len(twin)))
        place = np.zeros(len(twin), np.int64)
        place[first] = np.arange(self.filled, self.filled + first.sum())
        self.filled += int(first.sum())
        reach = np.maximum(np.maximum(upper, 0.0), -left * lower) * (1 + 1e-9)
        self.reach[place[first]] = reach[first]
        self.parts.append(_Value(value.matrix[first], value.constant[first], value.slack[first]))
        self.entries += self.parts[-1].matrix.nnz
        self.left.append(np.full(int(first.sum()), left))
        # f(-h) is f(h) - (1 + left) h.
        factor = np.where(passed, factor, np.where(sign < 0, -(1 + left), 0.0))
        own = np.where(passed, np.arange(len(twin)), twin)
        scaled = self._scaled(factor, _pick(value, own))
        rest = np.flatnonzero(~passed)
        units = (np.ones(len(rest)), (rest, place[twin[rest]]))
        matrix = scaled.matrix + sparse.csr_array(units, scaled.matrix.shape)
        # Twins are the same but for what each of them may be off; activations are 1-Lipschitz.
        apart = np.where(passed | first, 0.0, value.slack + value.slack[own]) * (1 + 1e-9)
        still = passed & (factor == 0)
        slack = np.where(first | still, 0.0, scaled.slack + apart)
        return _Value(sparse.csr_array(matrix), np.where(first, 0.0, scaled.constant), slack)

    def _short(self, value: _Value, factor: Array) -> Array:
        """Return which neurons that do not bend had better be written out wherever they go."""
        entries = np.diff(value.matrix.indptr)
        many = len(self.varying) + self.filled <= 2 * int((factor > 0).sum())
        result: Array = (factor == 0) | (entries <= len(self.varying)) | many
        return result

    def size(self, value: _Value) -> Array:
        """Return how large the terms of a node's values can be."""
        result: Array = abs(value.matrix) @ self.reach + np.abs(value.constant) + value.slack
        return result

    def affine(self, weight: Any, bias: Array | float, value: _Value, extra: int = 0) -> _Value:
        """Apply a matrix and a bias; `extra` roundings went into each of its entries."""
        terms = int(np.diff(weight.indptr).max(initial=0)) + extra + 4
        size = abs(weight) @ self.size(value) + np.abs(bias)
        slack = abs(weight) @ value.slack + growth(terms, self.rounding) * size
        slack = slack * (1 + 1e-9) + TINY * (1 + self.reach.sum())
        matrix = sparse.csr_array(weight @ value.matrix)
        if not extra:
            slack = np.where(_copied(weight, value, matrix), 0.0, slack)
        matrix.eliminate_zeros()
        return _Value(matrix, weight @ value.constant + bias, slack)

    def _scaled(self, factor: Array, value: _Value) -> _Value:
        """Multiply each value by a number; by one, minus one or zero, nothing is rounded."""
        found = self.affine(_diagonal(factor), 0.0, value, extra=2)
        exact = np.isin(factor, (-1.0, 0.0, 1.0))
        return replace(found, slack=np.where(exact, np.abs(factor) * value.slack, found.slack))

    def finish(self, rows: _Value) -> Condensed:
        """Put the rows of neurons and of the property together."""
        parts = [*self.parts, rows]
        matrix = sparse.csr_array(sparse.vstack([p.matrix for p in parts]))[:, : self.filled]
        matrix.eliminate_zeros()
        matrix.sort_indices()
        return Condensed(
            inputs=len(self.varying),
            neurons=self.filled - len(self.varying),
            pointer=matrix.indptr.astype(np.int64),
            source=matrix.indices.astype(np.int64),
            weight=matrix.data.astype(np.float64),
            bias=np.concatenate([p.constant for p in parts]),
            slack=np.concatenate([p.slack for p in parts]),
            left=np.concatenate([*self.left, np.zeros(len(rows.constant))]),
            varying=self.varying,
        )


def _copied(weight: Any, value: _Value, product: Any) -> Array:
    """Return which rows of a product are those of the weight, exactly.

    That is so where they read values that are single variables, each another one: weights are then
    multiplied by one and added to nothing. (Those of switches are so large that any allowance for
    rounding would hide what they do.)
    """
    counts = np.diff(value.matrix.indptr)
    owner = np.repeat(np.arange(len(counts)), counts)
    single = (counts <= 1) & (value.constant == 0) & (value.slack == 0)
    single[owner[value.matrix.data != 1.0]] = False
    places = (np.ones_like(weight.data), weight.indices, weight.indptr)
    read = sparse.csr_array(places, weight.shape)
    apart = np.diff(product.indptr) == read @ counts
    result: Array = (read @ (~single).astype(float) == 0) & apart
    return result


def _pick(value: _Value, index: Array) -> _Value:
    return _Value(value.matrix[index], value.constant[index], value.slack[index])


def _twins(value: _Value, wanted: Array) -> tuple[Array, Array]:
    """Return for each row the first wanted one that equals it, or minus it, and that sign."""
    matrix = value.matrix
    matrix.sum_duplicates()
    twin, sign = np.arange(matrix.shape[0]), np.ones(matrix.shape[0])
    seen: dict[tuple[bytes, bytes, float], int] = {}
    for i in np.flatnonzero(wanted).tolist():
        span = slice(matrix.indptr[i], matrix.indptr[i + 1])
        data, place = matrix.data[span], matrix.indices[span].tobytes()
        same = (place, (data + 0.0).tobytes(), float(value.constant[i]))
        other = (place, (0.0 - data).tobytes(), -float(value.constant[i]))
        if same in seen:
            twin[i] = seen[same]
        elif other in seen:
            twin[i], sign[i] = seen[other], -1.0
        else:
            seen[same] = i
    return twin, sign


# --- one rule per operation -------------------------------------------------------------------

_Shapes = list[tuple[int, ...]]


def _linear(c: _Condenser, op: ops.Linear, values: list[_Value], shapes: _Shapes) -> _Value:
    weight = sparse.csr_array(op.weight.numpy())
    copies = math.prod(shapes[0][:-1])
    bias = np.zeros(weight.shape[0]) if op.bias is None else op.bias.numpy()
    if copies > 1:
        weight = sparse.csr_array(sparse.kron(sparse.eye_array(copies), weight))
        bias = np.tile(bias, copies)
    return c.affine(weight, bias, values[0])


def _conv(c: _Condenser, op: ops.Conv2d, values: list[_Value], shapes: _Shapes) -> _Value:
    row, column, tap, outputs = convolution_entries(op, shapes[0])
    data = op.weight.flatten()[tap].numpy()
    shape = (outputs, math.prod(shapes[0]))
    weight = sparse.csr_array((data, (row.numpy(), column.numpy())), shape)
    bias = np.zeros(outputs)
    if op.bias is not None:
        bias = np.repeat(op.bias.numpy(), outputs // len(op.bias))
    return c.affine(weight, bias, values[0])


def _conv_transpose(
    c: _Condenser, op: ops.ConvTranspose2d, values: list[_Value], shapes: _Shapes
) -> _Value:
    after = tuple(transposed_shape(op, shapes[0]))
    column, row, tap = transposed_entries(op, after)
    entries = (op.weight.flatten()[tap].numpy(), (row.numpy(), column.numpy()))
    weight = sparse.csr_array(entries, (math.prod(after), math.prod(shapes[0])))
    bias = 0.0 if op.bias is None else np.repeat(op.bias.numpy(), math.prod(after[1:]))
    return c.affine(weight, bias, values[0])


def _batch_norm(c: _Condenser, op: ops.BatchNorm, values: list[_Value], shapes: _Shapes) -> _Value:
    each = math.prod(shapes[0][1:])
    factor, offset = (np.repeat(t.numpy(), each) for t in batchnorm_map(op))
    # The offset is mean times factor and the bias: what is rounded there grows with them.
    mean = np.repeat(np.abs(op.mean.numpy()), each) * np.abs(factor)
    bias = 0.0 if op.bias is None else np.repeat(np.abs(op.bias.numpy()), each)
    found = c.affine(_diagonal(factor), offset, values[0], extra=16)
    # The factor itself may underflow, and it meets the mean and whatever comes in.
    met = TINY * (c.size(values[0]) + np.repeat(np.abs(op.mean.numpy()), each))
    slack = found.slack + 16 * c.rounding * (mean + bias) + met
    return _Value(found.matrix, found.constant, slack)


def _shift(c: _Condenser, op: ops.Shift, values: list[_Value], shapes: _Shapes) -> _Value:
    offset = op.offset.double().expand(1, *shapes[0]).flatten().numpy()
    return c.affine(_diagonal(np.ones(len(offset))), -offset if op.subtract else offset, values[0])


def _scale(c: _Condenser, op: ops.Scale, values: list[_Value], shapes: _Shapes) -> _Value:
    factor = op.factor.double().expand(1, *shapes[0]).flatten().numpy()
    return c.affine(_diagonal(1 / factor if op.divide else factor), 0.0, values[0], extra=2)


def _diagonal(factor: Array) -> Any:
    return sparse.csr_array(sparse.diags_array(factor))


def _pool(c: _Condenser, op: ops.AvgPool, values: list[_Value], shapes: _Shapes) -> _Value:
    size = math.prod(shapes[0])
    parts = []
    for place in torch.arange(size).split(UNITS):
        check_time()
        units = torch.zeros(len(place), size, dtype=torch.float64)
        units[torch.arange(len(place)), place] = 1.0
        shares = POINT_RULES[ops.AvgPool](op, units.view(-1, *shapes[0])).flatten(1)
        parts.append(sparse.csr_array(shares.numpy()))
    return c.affine(sparse.csr_array(sparse.vstack(parts).T), 0.0, values[0], extra=4)


def _moved(c: _Condenser, op: ops.Op, values: list[_Value], shapes: _Shapes) -> _Value:
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
    return _Value(sparse.csr_array(matrix), constant, slack)


def _sum(c: _Condenser, op: ops.Add | ops.Sub, values: list[_Value], shapes: _Shapes) -> _Value:
    a, b = values
    size = c.size(a) + c.size(b)
    slack = (a.slack + b.slack + growth(2, c.rounding) * size) * (1 + 1e-9)
    if isinstance(op, ops.Sub):
        return _Value(sparse.csr_array(a.matrix - b.matrix), a.constant - b.constant, slack)
    return _Value(sparse.csr_array(a.matrix + b.matrix), a.constant + b.constant, slack)


RULES: dict[type[ops.Op], Callable[..., _Value]] = {
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
}
