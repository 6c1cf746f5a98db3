"""A network as sparse rows: every activation as a linear function of the inputs and of others.

Whatever lies between two activations (convolutions, joins, slices, whole chains of linear layers)
becomes one sparse row per neuron, and so does each row of a property. Inputs that hardly vary are
no variables at all: their middle goes into the constant and their width into the slack.

`slack` says how far a row can be from the true value for any input of the box that the network was
condensed for, in exact arithmetic: rounding errors of the condensation are in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from tightrope.box import Box
from tightrope.domains.boxes.quadratic import as_squares
from tightrope.domains.linear.rules import growth
from tightrope.graph import Graph, ops

Array = NDArray[Any]

# Narrower inputs, relative to their size, are not worth a variable.
THIN = 2.0**-40
TINY = 1e-300
SQUARES = 6  # for each product that there may be


@dataclass(frozen=True)
class Condensed:
    """Rows of neurons, in an order in which each reads earlier ones only, then of a property.

    Row i is `bias + weight . source` over the entries `pointer[i]` to `pointer[i + 1]`; sources
    below `inputs` are variables, others outputs of neurons. `left` is the slope of each activation
    below zero, `varying` says which inputs the variables are; neurons that are `square` are the
    squares of their rows.
    """

    inputs: int
    neurons: int
    pointer: Array
    source: Array
    weight: Array
    bias: Array
    slack: Array
    left: Array
    square: Array
    varying: Array

    @property
    def rows(self) -> int:
        """How many rows the property has."""
        return len(self.bias) - self.neurons


@dataclass(frozen=True)
class Value:
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


class Condenser:
    """Holds the neurons found so far, and what rounding errors are measured by."""

    def __init__(self, graph: Graph, boxes: dict[int, Box], rounding: float) -> None:
        self.graph, self.rounding = graph, rounding
        self.box = boxes[0]
        self.varying = np.flatnonzero(varying_inputs(boxes[0]))
        activations = [n for n in graph.nodes if isinstance(n.op, ops.Relu | ops.LeakyRelu)]
        products = [math.prod(n.shape) for n in graph.nodes if isinstance(n.op, ops.Mul)]
        # Neurons, then products that are not yet written as squares of neurons' rows.
        self.room = SQUARES * sum(products)  # for squares: activations have theirs besides
        self.first = len(self.varying) + sum(math.prod(node.shape) for node in activations)
        self.first += self.room
        self.columns = self.first + sum(products)
        self.reach = np.zeros(self.columns)
        self.radius = np.zeros(self.columns)  # by which they vary, about
        self.filled = len(self.varying)
        self.parts: list[Value] = []
        self.left: list[Array] = []
        self.square: list[Array] = []
        self.entries = 0
        self.factors: list[tuple[Value, Value]] = []
        self.squares: dict[bytes, int] = {}
        self.full = False  # whether there are more squares than there is room for

    def start(self) -> Value:
        """Return the input: variables, and numbers that stand for what hardly varies."""
        lower, upper = (t.flatten().double().numpy() for t in self.box.corners)
        count = len(self.varying)
        self.reach[:count] = np.maximum(np.abs(lower), np.abs(upper))[self.varying]
        self.radius[:count] = (upper / 2 - lower / 2)[self.varying]
        middle = lower / 2 + upper / 2
        # At least the larger distance to an end, whatever was rounded.
        slack = np.maximum(upper - middle, middle - lower) * (1 + 4 * self.rounding)
        slack = np.where(upper > lower, slack + TINY, 0.0)
        middle = np.where(upper > lower, middle, lower)
        middle[self.varying], slack[self.varying] = 0.0, 0.0
        places = (np.ones(count), (self.varying, np.arange(count)))
        return Value(sparse.csr_array(places, (len(lower), self.columns)), middle, slack)

    def activate(self, op: ops.Op, value: Value, box: Box) -> Value:
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
        assert self.filled <= self.first  # beyond that are products
        reach = np.maximum(np.maximum(upper, 0.0), -left * lower) * (1 + 1e-9)
        self.reach[place[first]] = reach[first]
        self.radius[place[first]] = reach[first] / 2
        self.parts.append(Value(value.matrix[first], value.constant[first], value.slack[first]))
        self.entries += self.parts[-1].matrix.nnz
        self.left.append(np.full(int(first.sum()), left))
        self.square.append(np.zeros(int(first.sum()), bool))
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
        return Value(sparse.csr_array(matrix), np.where(first, 0.0, scaled.constant), slack)

    def multiply(self, a: Value, b: Value) -> Value:
        """Return products of two values, number by number."""
        begin = self.first + sum(len(left.constant) for left, _ in self.factors)
        self.factors.append((a, b))
        count = len(a.constant)
        place = np.arange(begin, begin + count)
        self.reach[place] = self.size(a) * self.size(b) * (1 + 1e-9) + TINY
        units = (np.ones(count), (np.arange(count), place))
        matrix = sparse.csr_array(units, (count, self.columns))
        return Value(matrix, np.zeros(count), np.zeros(count))

    def write_out(self, value: Value) -> Value:
        """Return values without products: squares instead, each of them a neuron."""
        products = value.matrix[:, self.first :]
        if not products.nnz:
            return value
        matrix = sparse.lil_array(value.matrix)
        matrix[:, self.first :] = 0.0
        constant, slack = value.constant.copy(), value.slack.copy()
        a, b = (_stack([pair[k] for pair in self.factors]) for k in (0, 1))
        for i in np.flatnonzero(np.diff(products.indptr)):
            span = slice(products.indptr[i], products.indptr[i + 1])
            used, weight = products.indices[span], products.data[span]
            linear, more, lost = self._quadratic(weight, _pick(a, used), _pick(b, used))
            matrix[[i]] = sparse.lil_array(matrix[[i]] + linear)
            # Two sums were rounded, each of numbers that the sizes count.
            size = abs(linear) @ self.reach + np.abs(more) + np.abs(constant[i])
            size = size + (abs(matrix[[i]]) @ self.reach)
            constant[i] += more
            slack[i] = (slack[i] + lost + growth(4, self.rounding) * size[0]) * (1 + 1e-9)
        return Value(sparse.csr_array(matrix), constant, slack)

    def _quadratic(self, weight: Array, a: Value, b: Value) -> tuple[Any, float, float]:
        """Return `sum_k weight_k a_k b_k` as a row of neurons, a constant and what it is off."""
        sizes, heavy = [self.size(v) for v in (a, b)], np.abs(weight)
        used = np.flatnonzero((abs(a.matrix) + abs(b.matrix)).sum(0))
        left, right = (v.matrix[:, used].toarray() for v in (a, b))
        row = np.zeros(self.columns)
        row[used] = (weight * b.constant) @ left + (weight * a.constant) @ right
        lost = heavy @ (sizes[0] * b.slack + sizes[1] * a.slack)  # slacks are part of sizes
        # All that is rounded are sums of products of three numbers, which the sizes bound.
        lost += growth(len(weight) + 8, self.rounding) * 4 * (heavy @ (sizes[0] * sizes[1]))
        squares = as_squares(weight, left, right, self.radius[used], self.rounding)
        lost += self.reach[used] @ squares.error @ self.reach[used]
        for part, sign in zip(squares.rows, squares.sign, strict=True):
            whole = np.zeros(self.columns)
            whole[used] = part
            row[self._square(whole)] += sign
        lost = lost * (1 + 1e-9) + TINY * (1 + self.reach.sum())
        constant = float((weight * a.constant) @ b.constant)
        return sparse.csr_array(row[None]), constant, lost if not self.full else np.inf

    def _square(self, row: Array) -> int:
        """Return the neuron that is the square of a row."""
        row = row if row[np.flatnonzero(row)[0]] > 0 else 0.0 - row
        place = self.squares.get(row.tobytes())
        if place is not None:
            return place
        if len(self.squares) == self.room:
            self.full = True
            return self.first - 1
        value = Value(sparse.csr_array(row[None]), np.zeros(1), np.zeros(1))
        place = self.squares[row.tobytes()] = self.filled
        self.filled += 1
        self.reach[place] = float(self.size(value)[0]) ** 2 * (1 + 1e-9) + TINY
        self.radius[place] = self.reach[place] / 2
        self.parts.append(value)
        self.entries += value.matrix.nnz
        self.left.append(np.zeros(1))
        self.square.append(np.ones(1, bool))
        return place

    def _short(self, value: Value, factor: Array) -> Array:
        """Return which neurons that do not bend had better be written out wherever they go."""
        entries = np.diff(value.matrix.indptr)
        many = len(self.varying) + self.filled <= 2 * int((factor > 0).sum())
        result: Array = (factor == 0) | (entries <= len(self.varying)) | many
        return result

    def size(self, value: Value) -> Array:
        """Return how large the terms of a node's values can be."""
        result: Array = abs(value.matrix) @ self.reach + np.abs(value.constant) + value.slack
        return result

    def affine(self, weight: Any, bias: Array | float, value: Value, extra: int = 0) -> Value:
        """Apply a matrix and a bias; `extra` roundings went into each of its entries."""
        terms = int(np.diff(weight.indptr).max(initial=0)) + extra + 4
        size = abs(weight) @ self.size(value) + np.abs(bias)
        slack = abs(weight) @ value.slack + growth(terms, self.rounding) * size
        slack = slack * (1 + 1e-9) + TINY * (1 + self.reach.sum())
        matrix = sparse.csr_array(weight @ value.matrix)
        if not extra:
            slack = np.where(_copied(weight, value, matrix), 0.0, slack)
        matrix.eliminate_zeros()
        return Value(matrix, weight @ value.constant + bias, slack)

    def _scaled(self, factor: Array, value: Value) -> Value:
        """Multiply each value by a number; by one, minus one or zero, nothing is rounded."""
        found = self.affine(diagonal(factor), 0.0, value, extra=2)
        exact = np.isin(factor, (-1.0, 0.0, 1.0))
        return replace(found, slack=np.where(exact, np.abs(factor) * value.slack, found.slack))

    def finish(self, rows: Value) -> Condensed:
        """Put the rows of neurons and of the property together."""
        rows = self.write_out(rows)
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
            square=np.concatenate([*self.square, np.zeros(len(rows.constant), bool)]),
            varying=self.varying,
        )


def _copied(weight: Any, value: Value, product: Any) -> Array:
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


def _stack(values: list[Value]) -> Value:
    """Put values together."""
    return Value(
        sparse.csr_array(sparse.vstack([v.matrix for v in values])),
        np.concatenate([v.constant for v in values]),
        np.concatenate([v.slack for v in values]),
    )


def _pick(value: Value, index: Array) -> Value:
    return Value(value.matrix[index], value.constant[index], value.slack[index])


def _twins(value: Value, wanted: Array) -> tuple[Array, Array]:
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


def diagonal(factor: Array) -> Any:
    """Return the matrix that multiplies each number by its factor."""
    return sparse.csr_array(sparse.diags_array(factor))
