"""A network on a box as a mixed-integer linear program (Tjeng et al.).

Each node of the network is an affine expression over the variables of the model. Where an
activation is unstable it gets variables: `h` for its input (so that rows stay sparse),
`y` for its output, and a binary `z` that says which side is active:
`y >= 0, y >= h, y <= u z, y <= h - l (1 - z)` with the neuron's own bounds l and u. Stable
activations need none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tightrope.box import Box
from tightrope.domains.milp.expressions import (
    EPS,
    NOT_PIECEWISE_LINEAR,
    RULES,
    Array,
    Expression,
    numbers,
    require,
    stacked,
    widened,
)
from tightrope.errors import UserError
from tightrope.graph import Graph, Node, ops
from tightrope.graph.windows import pooled_places

# The solver drops coefficients below this; they are taken out here and allowed for.
SMALLEST_COEFFICIENT = 1e-12
# A big-M below this would be within the solver's tolerances; a larger one is as true.
SMALLEST_STEP = 1e-9
INFINITY = np.inf


@dataclass(frozen=True, eq=False)
class Rows:
    """Constraints `lower <= matrix @ variables <= upper`; exact ones may differ by `slack`."""

    matrix: Array
    lower: Array
    upper: Array
    slack: Array


@dataclass(frozen=True, eq=False)
class Block:
    """The unstable neurons of one activation, for bounding what tolerances can do.

    `inputs` are the expressions that the variables `named` are equal to, up to `slack`;
    `links` says which of them each of the variables `outputs` is a maximum of; `steps` are
    the sums of the coefficients of the binaries behind each output.
    """

    inputs: Expression
    named: Array
    slack: Array
    outputs: Array
    links: Array
    steps: Array


class Encoding:
    """One network on one box, ready to be optimised.

    `box` holds one box (a batch of 1) and `bounds` maps the position of each node that feeds
    a ReLU, a LeakyReLU or a max pooling to bounds that hold on it: what the encoding says is
    only as true as these. `relaxed` leaves the binaries out: a ReLU becomes its triangle,
    and the model a linear program.
    """

    def __init__(
        self, graph: Graph, box: Box, bounds: Mapping[int, Box], *, relaxed: bool = False
    ) -> None:
        self.sparse = require("scipy.sparse")
        self.graph = graph.detach().to(torch.float64).to("cpu")
        self.relaxed = relaxed
        self.lower, self.upper = corners(box, graph.input_shape, "the input")
        self.integer = np.zeros(len(self.lower), dtype=bool)
        self.blocks: list[Block] = []
        self._rows: list[Rows] = []
        self.output = self._walk(bounds)

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self.lower)

    @property
    def largest(self) -> Array:
        """Largest absolute value of each variable."""
        return np.maximum(np.abs(self.lower), np.abs(self.upper))

    @property
    def is_linear(self) -> bool:
        """Whether the model is a linear program: relaxed, or without unstable neurons."""
        return not self.integer.any()

    def rows(self) -> Rows:
        """Return all constraints."""
        empty = self.sparse.csr_matrix((0, self.size))
        matrices = [empty, *(widened(rows.matrix, self.size) for rows in self._rows)]
        lower, upper, slack = (
            np.concatenate([np.zeros(0), *(getattr(rows, side) for rows in self._rows)])
            for side in ("lower", "upper", "slack")
        )
        return Rows(self.sparse.vstack(matrices, format="csr"), lower, upper, slack)

    def _walk(self, bounds: Mapping[int, Box]) -> Expression:
        nodes, nothing = self.graph.nodes, np.zeros(self.size)
        inputs = self.sparse.identity(self.size, format="csr")
        values = {0: Expression(inputs, nothing, self.largest, nothing)}
        for i in sorted(_needed(self.graph) - {0}):
            op, before = nodes[i].op, [values[j] for j in nodes[i].inputs]
            if isinstance(op, NOT_PIECEWISE_LINEAR):
                raise UserError(
                    f"the layer {nodes[i].name!r} is a {type(op).__name__}, which is not "
                    "piecewise linear: exact verification needs ReLU, LeakyReLU or max pooling"
                )
            if isinstance(op, ops.Relu | ops.LeakyRelu):
                values[i] = self._relu(op, before[0], *self._limits(bounds, nodes[i]))
            elif isinstance(op, ops.MaxPool):
                values[i] = self._max_pool(nodes[i], before[0], *self._limits(bounds, nodes[i]))
            else:
                shapes = [nodes[j].shape for j in nodes[i].inputs]
                values[i] = RULES[type(op)](op, shapes, nodes[i].shape, *before)
            if not np.isfinite(values[i].error).all():
                raise UserError(
                    f"the layer {nodes[i].name!r} computes numbers that are not finite on the box: "
                    "check the weights of the network"
                )
        last = values[len(nodes) - 1]
        return Expression(
            widened(last.matrix, self.size), last.constant, last.magnitude, last.error
        )

    def _limits(self, bounds: Mapping[int, Box], node: Node) -> tuple[Array, Array]:
        position = node.inputs[0]
        if position not in bounds:
            raise UserError(
                f"there are no bounds of node {position}, which feeds {node.name!r}: bound every "
                "node that feeds a ReLU, a LeakyReLU or a max pooling"
            )
        shape = self.graph.nodes[position].shape
        return corners(bounds[position], shape, f"node {position}")

    # --- variables and rows -------------------------------------------------------------------

    def _variables(self, lower: Array, upper: Array, *, integer: bool = False) -> Array:
        """Append variables and return their numbers."""
        self.lower = np.concatenate((self.lower, lower))
        self.upper = np.concatenate((self.upper, upper))
        self.integer = np.concatenate((self.integer, np.full(len(lower), integer)))
        return np.arange(self.size - len(lower), self.size)

    def _columns(self, columns: Array, values: Array | float = 1.0) -> Array:
        """Return a matrix with one entry in each row, in the given columns."""
        entries = np.broadcast_to(np.asarray(values, dtype=np.float64), columns.shape)
        places = (np.arange(len(columns)), columns)
        return self.sparse.csr_matrix((entries, places), shape=(len(columns), self.size))

    def _require(
        self, matrix: Array, lower: Array, upper: Array, slack: Array | float = 0.0
    ) -> Array:
        """Append constraints; return their slack, with that of dropped coefficients."""
        matrix = matrix.tocsr()
        small = np.where(np.abs(matrix.data) < SMALLEST_COEFFICIENT, np.abs(matrix.data), 0.0)
        lost = self.sparse.csr_matrix((small, matrix.indices, matrix.indptr), shape=matrix.shape)
        slack = (slack + lost @ self.largest) * (1 + 64 * EPS)
        matrix.data[small > 0] = 0.0
        matrix.eliminate_zeros()
        lower, upper, slack = (
            np.broadcast_to(np.asarray(side, dtype=np.float64), slack.shape)
            for side in (lower, upper, slack)
        )
        self._rows.append(Rows(matrix, lower, upper, slack))
        return slack

    def _name(self, x: Expression, lower: Array, upper: Array) -> tuple[Array, Array]:
        """Return new variables equal to an expression, and the slack of the equality."""
        named = self._variables(lower, upper)
        matrix = self._columns(named) - widened(x.matrix, self.size)
        return named, self._require(matrix, x.constant, x.constant, x.error)

    def _variable_expression(self, columns: Array, values: Array | float = 1.0) -> Expression:
        largest, nothing = self.largest[columns] * np.abs(values), np.zeros(len(columns))
        return Expression(self._columns(columns, values), nothing, largest, nothing)

    # --- activations --------------------------------------------------------------------------

    def _relu(
        self, op: ops.Relu | ops.LeakyRelu, x: Expression, lower: Array, upper: Array
    ) -> Expression:
        negative = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        unstable = np.flatnonzero((lower < 0) & (upper > 0) & (negative != 1.0))
        scale = np.where((lower >= 0) | (negative == 1.0), 1.0, negative)
        scaled = Expression(
            self.sparse.diags(scale, format="csr") @ x.matrix,
            scale * x.constant,
            scale * x.magnitude,
            scale * (x.error + 2 * EPS * x.magnitude),
        )
        if not len(unstable):
            return scaled
        h, y = self._unstable(x[unstable], lower[unstable], upper[unstable])
        value = self._variable_expression(y, 1.0 - negative)
        if negative:  # slope * h + (1 - slope) * max(h, 0)
            linear = self._variable_expression(h, negative)
            size = value.magnitude + linear.magnitude
            value = Expression(value.matrix + linear.matrix, value.constant, size, 4 * EPS * size)
        rows = np.arange(len(scale))
        rows[unstable] = len(scale) + np.arange(len(unstable))
        return stacked([scaled, value])[rows]

    def _unstable(self, x: Expression, lower: Array, upper: Array) -> tuple[Array, Array]:
        """Encode `y = max(h, 0)`; return the variables h and y."""
        h, slack = self._name(x, lower, upper)
        y = self._variables(np.zeros(len(h)), upper)
        steps = np.zeros(len(h))
        if self.relaxed:
            slope = upper / (upper - lower)
            self._require(self._columns(y) - self._columns(h), 0.0, INFINITY)
            rounding = 4 * EPS * slope * (upper - lower)
            chord = self._columns(y) - self._columns(h, slope)
            self._require(chord, -INFINITY, -slope * lower, rounding)
        else:
            up, down = (np.maximum(side, SMALLEST_STEP) for side in (upper, -lower))
            z = self._variables(np.zeros(len(h)), np.ones(len(h)), integer=True)
            difference = self._columns(y) - self._columns(h)
            self._require(difference, 0.0, INFINITY)
            self._require(self._columns(y) - self._columns(z, up), -INFINITY, 0.0)
            self._require(difference + self._columns(z, down), -INFINITY, down)
            steps = np.maximum(up, down)
        links = self.sparse.identity(len(h), format="csr")
        self.blocks.append(Block(x, h, slack, y, links, steps))
        return h, y

    def _max_pool(self, node: Node, x: Expression, lower: Array, upper: Array) -> Expression:
        """Encode the maximum of those inputs of each window that can be the largest."""
        assert isinstance(node.op, ops.MaxPool)
        shape = self.graph.nodes[node.inputs[0]].shape
        window = pooled_places(node.op, shape).flatten(1).numpy()
        inside = window >= 0
        lowest = np.where(inside, lower[window], -INFINITY)
        highest = np.where(inside, upper[window], -INFINITY)
        best = lowest.argmax(0)
        candidate = highest > lowest.max(0)
        candidate[best, np.arange(len(best))] = True
        open_windows = np.flatnonzero(candidate.sum(0) > 1)
        passed = x[window[best, np.arange(len(best))]]
        if not len(open_windows):
            return passed
        outputs = self._maximum(
            x, lower, upper, window[:, open_windows], candidate[:, open_windows]
        )
        rows = np.arange(len(best))
        rows[open_windows] = len(best) + np.arange(len(open_windows))
        return stacked([passed, self._variable_expression(outputs)])[rows]

    def _maximum(
        self, x: Expression, lower: Array, upper: Array, window: Array, candidate: Array
    ) -> Array:
        """Encode `y = max` over the candidates of each window by one binary per candidate.

        `y >= h_j` for all j, and `y <= h_j + (highest other - l_j) (1 - z_j)` with
        `sum_j z_j = 1`.
        """
        tap, output = np.nonzero(candidate)
        used, source = np.unique(window[tap, output], return_inverse=True)
        h, slack = self._name(x[used], lower[used], upper[used])
        lowest = np.where(candidate, lower[window], -INFINITY)
        highest = np.where(candidate, upper[window], -INFINITY)
        y = self._variables(lowest.max(0), highest.max(0))
        z = self._variables(np.zeros(len(tap)), np.ones(len(tap)), integer=not self.relaxed)
        order = np.sort(highest, axis=0)
        first, second = order[-1], order[-2]
        is_first = highest.argmax(0)[output] == tap
        other = np.where(is_first, second[output], first[output])
        step = np.maximum(other - lowest[tap, output], SMALLEST_STEP)
        difference = self._columns(y[output]) - self._columns(h[source])
        self._require(difference, 0.0, INFINITY)
        self._require(difference + self._columns(z, step), -INFINITY, step, 2 * EPS * step)
        shape = (len(y), len(tap))
        member = self.sparse.csr_matrix((np.ones(len(tap)), (output, np.arange(len(tap)))), shape)
        self._require(member @ self._columns(z), 1.0, 1.0)
        links = member @ self.sparse.csr_matrix(
            (np.ones(len(tap)), (np.arange(len(tap)), source)), (len(tap), len(h))
        )
        self.blocks.append(Block(x[used], h, slack, y, links, member @ step))
        return y


def corners(box: Box, shape: tuple[int, ...], what: str) -> tuple[Array, Array]:
    """Return the corners of one finite box as flat arrays, or refuse it."""
    lower, upper = (numbers(t).copy() for t in box.corners)
    if box.lower.shape[0] != 1 or len(lower) != math.prod(shape):
        raise UserError(
            f"the bounds of {what} have shape {tuple(box.lower.shape)}, but one box of shape "
            f"{(1, *shape)} was expected: encode one sample at a time"
        )
    if not (np.isfinite(lower).all() and np.isfinite(upper).all()):
        raise UserError(f"the bounds of {what} are not finite: an exact encoding needs finite ones")
    if (lower > upper).any():
        raise UserError(f"a lower bound of {what} is above its upper bound: no point is left")
    return lower, upper


def _needed(graph: Graph) -> set[int]:
    """Return the positions that the output depends on."""
    needed = {len(graph.nodes) - 1}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in needed:
            needed.update(graph.nodes[i].inputs)
    return needed
