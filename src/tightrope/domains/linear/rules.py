"""Linear bounds, backward (CROWN): one rule per operation on coefficients.

A linear function of a node's value is pulled back, operation by operation, to one of the
network's input that lies below it on the whole box. Affine operations are pulled back exactly,
activations through their lines (`relaxations.py`), and coefficients that reach a node on
several paths are added: a residual join is nothing else.

All bounds here are lower bounds; an upper bound is minus the lower bound of the negated rows.

Rounding. Computed coefficients are taken as the numbers they are. Pulling `a` back through
`W x + b` gives `a'` instead of `a W`, and `|a' - a W| |x| <= g |a| |W| |x|`, where
`g = n u / (1 - n u)` covers a sum of n products in any order. So with `|W| |x| + |b|` held per
neuron (`Magnitudes`), the error of a whole layer is one dot product with |a|. Their sum is
subtracted from the bound, which then holds in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.deadline import check_time
from tightrope.domains.linear import moves, spread
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.pools import max_pool
from tightrope.domains.linear.products import pull_differences, pull_product
from tightrope.domains.linear.pulled import Form
from tightrope.domains.linear.pulling import pull_function
from tightrope.domains.linear.relaxations import RULES as LINES
from tightrope.domains.linear.relaxations import Lines, kinked
from tightrope.domains.rounding import growth, tiny
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import batchnorm_map
from tightrope.graph.work import fan_in

Magnitudes = Mapping[int, Tensor]

ACTIVATIONS = tuple(LINES)
# Their rules read the boxes of their inputs.
BOXED = (ops.MaxPool, ops.Mul, ops.MatMul)


# Pulls coefficients of an activation's output back to its input.
ActivationRule = Callable[[ops.Op, Coefficients, int, "Pass"], Coefficients]


@dataclass
class Pass:
    """The state of one backward pass: what has been added to the bound so far."""

    graph: Graph
    lines: Mapping[int, Lines]
    boxes: Mapping[int, Box]
    magnitudes: Magnitudes | None
    rounding: float
    constant: Tensor
    slack: Tensor
    activation: ActivationRule
    passed: dict[int, Coefficients] = field(default_factory=dict)

    def add(self, a: Coefficients, values: Tensor) -> None:
        """Add `a . values` to the bound."""
        self.add_number(a.dot(values))
        if self.rounding:
            size = a.reach(values.abs())
            self.lose(size, growth(a.values[0].numel(), self.rounding))

    def add_alike(self, a: Coefficients, values: Tensor) -> None:
        """Add `a . values` to the bound, products that all have the same sign."""
        number = a.dot(values)
        self.add_number(number)
        if self.rounding:
            self.lose(number.abs(), growth(a.values[0].numel(), self.rounding))

    def add_number(self, number: Tensor) -> None:
        """Add one number per row to the bound; large parts of it may cancel later on."""
        self.constant = self.constant + number
        if self.rounding:
            self.lose(self.constant.abs(), self.rounding)

    def lose(self, size: Tensor, share: float) -> None:
        """Account for a rounding error of at most that share of a size.

        Sizes and their sum, the slack, are rounded, too: by far less than a share of 1e-9, as
        they are sums of less than a million terms.
        """
        self.slack = self.slack + share * (1 + 1e-9) * size

    def charge(self, a: Coefficients, i: int, terms: int) -> None:
        """Account for pulling coefficients through node i, sums of so many products."""
        if self.magnitudes is not None:
            size = a.reach(self.magnitudes[i])
            self.lose(size, growth(terms, self.rounding))


def backward(
    graph: Graph,
    target: int,
    rows: Coefficients,
    lines: Mapping[int, Lines],
    *,
    boxes: Mapping[int, Box] | None = None,
    activation: ActivationRule | None = None,
    magnitudes: Magnitudes | None = None,
    rounding: float = 0.0,
    stop: int = 0,
) -> Form:
    """Pull `rows` of the node at `target` back to the input.

    Or no further than to the node at `stop`: what is left there is bounded by the `boxes`.
    `lines` holds the relaxation of every activation on the way, by position; another rule for
    `activation`s may use others; `boxes` are bounds on the inputs of max pools and on what is
    bounded by intervals. For a strict bound give `magnitudes` and `rounding`.
    """
    zero = rows.values.new_zeros(len(rows.values))
    rule = activation or pull_activation
    state = Pass(graph, lines, boxes or {}, magnitudes, rounding, zero, zero, rule)
    arrived: dict[int, Coefficients] = {target: rows}
    largest, work = 0, 0
    for i in range(target, 0, -1):
        if i not in arrived:
            continue
        check_time()
        a = arrived.pop(i)
        if i <= stop:
            by_intervals(graph.nodes[i].op, a, i, state)
            continue
        node, each = graph.nodes[i], a.values.shape[1:].numel()
        largest, work = max(largest, each), max(work, each * fan_in(node.op))
        pulled = RULES[type(node.op)](node.op, a, i, state)
        for j, b in zip(node.inputs, pulled, strict=True):
            if b is None:
                continue
            if j not in arrived:
                arrived[j] = b
                continue
            arrived[j] = arrived[j].plus(b)
            if magnitudes is not None:
                state.lose(arrived[j].reach(magnitudes[j]), 2 * rounding)
    if 0 not in arrived:  # the node does not depend on the input
        blank = rows.values.new_zeros(len(rows.values), *graph.input_shape)
        arrived[0] = Coefficients(blank, rows.owner)
    slack = state.slack
    if rounding and magnitudes is not None:
        slack = slack + _underflow(rows, magnitudes, target)
    largest = max(largest, arrived[0].values.shape[1:].numel())
    return Form(arrived[0], state.constant, slack, state.passed, largest, work)


def _underflow(rows: Coefficients, magnitudes: Magnitudes, target: int) -> Tensor:
    """Return what products that are too small for the dtype can add up to, one per row.

    A coefficient is off by less than the smallest normal number even after many of them.
    """
    total = sum(flat(magnitudes[j]).sum(1) for j in range(target + 1))
    assert isinstance(total, Tensor)
    each = total if rows.owner is None or len(total) == 1 else total[rows.owner]
    return torch.finfo(total.dtype).tiny * (1 + each)


# --- affine rules -----------------------------------------------------------------------------


def _linear(op: ops.Linear, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    a = a.dense()
    if op.bias is not None:
        state.add(a, op.bias.expand(1, *a.values.shape[1:]))
    state.charge(a, i, op.weight.shape[0])
    return (a.like(a.values @ op.weight),)


def _conv(op: ops.Conv2d, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    if op.bias is not None:
        state.add(a, op.bias.view(1, -1, 1, 1))
    state.charge(a, i, op.weight.numel() // op.weight.shape[1])
    return (a.through(op, state.graph.nodes[state.graph.nodes[i].inputs[0]].shape),)


def _batch_norm(op: ops.BatchNorm, a: Coefficients, i: int, state: Pass) -> tuple[Any, ...]:
    channels = (1, -1) + (1,) * (len(state.graph.nodes[i].shape) - 1)
    factor, offset = (t.view(channels) for t in batchnorm_map(op))
    state.add(a, offset)
    state.charge(a, i, 16)
    if state.magnitudes is not None:
        # The factor itself may underflow, and it meets the mean and whatever comes in.
        met = 1 + state.magnitudes[state.graph.nodes[i].inputs[0]] + op.mean.abs().view(channels)
        state.lose(a.reach(met), tiny(met))
    return (a.like(a.values * a.take(factor)),)


def _shift(op: ops.Shift, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    # A number in the module is a float64 tensor of no dimensions.
    offset = op.offset.to(a.values.dtype).expand(1, *state.graph.nodes[i].shape)
    state.add(a, -offset if op.subtract else offset)
    return (a,)


def _scale(op: ops.Scale, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    factor = op.factor.to(a.values.dtype).expand(1, *state.graph.nodes[i].shape)
    factor = a.take(factor, outside=1.0)  # it may be divided by
    state.charge(a, i, 1)
    return (a.like(a.values / factor if op.divide else a.values * factor),)


def _reshape(op: ops.Reshape, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    a = a.dense()
    shape = state.graph.nodes[state.graph.nodes[i].inputs[0]].shape
    return (a.like(a.values.reshape(len(a.values), *shape)),)


def _permute(op: ops.Permute, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    a = a.dense()
    order = torch.tensor(op.dims).argsort().tolist()
    return (a.like(a.values.permute(order)),)


def _add(op: ops.Add, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    return a, a


def _sub(op: ops.Sub, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    return a, a.like(-a.values)


# --- activations ------------------------------------------------------------------------------


def _activation(op: ops.Op, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    return (state.activation(op, a, i, state),)


def pull_activation(
    op: ops.Op,
    a: Coefficients,
    i: int,
    state: Pass,
    *,
    slopes: Mapping[int, Tensor] | None = None,
) -> Coefficients:
    """Pull coefficients through the lines of an activation.

    `slopes` replaces lower slopes through the origin, per row, where neurons are unstable.
    """
    if isinstance(op, ops.Function):
        return pull_function(op, a, i, state)
    state.passed[i] = a
    line, before = state.lines[i], state.graph.nodes[i].inputs[0]
    lower_slope, upper_slope = a.take_all((line.lower_slope, line.upper_slope))
    if slopes and i in slopes:
        free = a.take(line.upper_intercept > 0)  # unstable: the chord does not go through zero
        left = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        lower_slope = torch.where(free, slopes[i].clamp(left, 1.0), lower_slope)
    above = a.values.clamp(min=0)
    below = a.values - above
    pulled = a.like(torch.addcmul(below * upper_slope, above, lower_slope))  # one of them is zero
    if kinked(op):  # the lower line goes through zero, the upper one's intercept is not negative
        state.add_alike(a.like(below), line.upper_intercept)
    else:
        state.add(a.like(above), line.lower_intercept)
        state.add(a.like(below), line.upper_intercept)
    if state.magnitudes is not None:
        sizes = state.magnitudes[before]
        state.lose(pulled.reach(sizes), 4 * state.rounding)
    return pulled


def by_intervals(op: ops.Op, a: Coefficients, i: int, state: Pass) -> tuple[None, ...]:
    """An operation without a rule of its own: constant bounds, whatever its inputs are.

    Nothing is left of the coefficients, so that nothing is pulled through what lies before.
    """
    lower, upper = state.boxes[i].corners
    state.add(a.like(a.values.clamp(min=0)), lower)
    state.add(a.like(a.values.clamp(max=0)), upper)
    return (None,) * len(state.graph.nodes[i].inputs)


# Operations for which `by_intervals` has to do.
BY_INTERVALS: tuple[type[ops.Op], ...] = (
    *(ops.Softmax, ops.Standardize, ops.Step, ops.Where, ops.ArgMax, ops.Distance),
)

RULES: dict[type[ops.Op], Callable[..., tuple[Coefficients | None, ...]]] = {
    ops.Linear: _linear,
    ops.Conv2d: _conv,
    ops.ConvTranspose2d: spread.conv_transpose,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: moves.average,
    ops.MaxPool: max_pool,
    ops.Reshape: _reshape,
    ops.Permute: _permute,
    ops.Pad: moves.pad,
    ops.Slice: moves.cut,
    ops.Take: spread.take,
    ops.Concat: moves.concatenate,
    ops.Add: _add,
    ops.Sub: _sub,
    ops.Relu: _activation,
    ops.LeakyRelu: _activation,
    ops.Sigmoid: _activation,
    ops.Tanh: _activation,
    ops.Function: _activation,
    **dict.fromkeys((ops.Mul, ops.MatMul), pull_product),
    ops.Differences: pull_differences,
    **dict.fromkeys(BY_INTERVALS, by_intervals),
}
