"""Layers made of functions and products, for both front ends. All is exact in real arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tightrope.graph import ops
from tightrope.graph.values import Maker, refuse

Shape = tuple[int, ...]


def product(make: Maker, a: int, b: int) -> int:
    """Append `a b`, number by number, of samples of as many dimensions."""
    ranks = [len(make.shape_of(i)) for i in (a, b)]
    refuse(ranks[0] != ranks[1], f"a product of samples of {ranks[0]} and {ranks[1]} dimensions")
    if a == b:
        return make.append(ops.Function("power", (2.0,)), a)
    return make.append(ops.Mul(), a, b)


def quotient(make: Maker, a: int, b: int) -> int:
    """Append `a / b` of two nodes."""
    return product(make, a, make.append(ops.Function("reciprocal"), b))


def matrix_product(make: Maker, a: int, b: int) -> int:
    """Append `a @ b` of two nodes, matrices in their last two dimensions."""
    ranks = [len(make.shape_of(i)) for i in (a, b)]
    fits = ranks[0] == ranks[1] >= 2
    refuse(not fits, f"a product of samples of {ranks[0]} and {ranks[1]} dimensions")
    return make.append(ops.MatMul(), a, b)


def transposed(make: Maker, x: int) -> int:
    """Append a matrix with its last two dimensions swapped."""
    rank = len(make.shape_of(x)) + 1
    return make.append(ops.Permute((*range(rank - 2), rank - 1, rank - 2)), x)


def softmax(make: Maker, x: int, axis: int, *, logarithm: bool = False) -> int:
    """Append a softmax along a dimension of the samples."""
    last = len(make.shape_of(x)) - 1
    op = ops.Softmax(logarithm)
    if axis == last:
        return make.append(op, x)
    order = list(range(last + 2))
    order[axis + 1], order[-1] = order[-1], order[axis + 1]
    turn = ops.Permute(tuple(order))
    return make.append(turn, make.append(op, make.append(turn, x)))


def scores(make: Maker, query: int, key: int, factor: float) -> int:
    """Append `factor query key^T`, of which attention takes a softmax."""
    found = matrix_product(make, query, transposed(make, key))
    return make.append(ops.Scale(make.number(factor)), found)


def standardized(make: Maker, x: int, shape: Shape, epsilon: float, *, center: bool = True) -> int:
    """Append the standardisation of rows: samples of that shape, over its last dimension."""
    refuse(epsilon <= 0, f"an epsilon of {epsilon}")
    before = make.shape_of(x)
    if before != shape:
        x = make.append(ops.Reshape(shape), x)
    x = make.append(ops.Standardize(epsilon, center), x)
    return x if before == shape else make.append(ops.Reshape(before), x)


def rows_of(shape: Sequence[int], first: int) -> Shape:
    """Return a shape with its dimensions from `first` on made one."""
    return (*shape[:first], math.prod(shape[first:]))


def power(make: Maker, x: int, exponent: float) -> int:
    """Append a power of each number."""
    refuse(not math.isfinite(exponent) or exponent == 0, f"the exponent {exponent}")
    if exponent == 1:
        return x
    named = {0.5: "sqrt", -1.0: "reciprocal"}
    if exponent in named:
        return make.append(ops.Function(named[exponent]), x)
    return make.append(ops.Function("power", (float(exponent),)), x)


def differences(make: Maker, a: int, b: int) -> int | None:
    """Append all differences of numbers in a row if that is what `a - b` broadcasts to."""
    first, second = make.nodes[a], make.nodes[b]
    if not (isinstance(first.op, ops.Reshape) and isinstance(second.op, ops.Reshape)):
        return None
    if first.inputs != second.inputs:
        return None
    x = first.inputs[0]
    *rest, size = make.shape_of(x)
    fits = first.shape == (*rest, 1, size) and second.shape == (*rest, size, 1)
    return make.append(ops.Differences(), x) if fits and size > 1 else None
