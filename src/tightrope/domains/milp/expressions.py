"""Affine expressions over the variables of a linear program, and what operations make of them.

An expression stands for one node of a network on one sample, flattened: a sparse matrix
over the variables and a constant, computed in float64. It also carries a bound on how far
rounding may have moved it from the exact expression, so that a proof can allow for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.domains.rounding import growth
from tightrope.errors import UserError
from tightrope.graph import dense, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
Array = Any  # a numpy array of float64, or a sparse matrix of them
Shape = tuple[int, ...]


def require(name: str) -> ModuleType:
    """Import a module that comes with the `milp` extra."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(
            f"exact verification needs {name.split('.')[0]}, which is not installed; "
            "install it with: pip install 'tightrope[milp]'"
        ) from None


@dataclass(frozen=True, eq=False)
class Expression:
    """`matrix @ variables + constant`.

    `magnitude` bounds the sum of absolute values that went into each row, `error` how far
    the row is from the exact one, both wherever the variables lie within their bounds.
    """

    matrix: Array
    constant: Array
    magnitude: Array
    error: Array

    def __getitem__(self, rows: Array) -> Expression:
        """Select rows."""
        parts = (self.matrix, self.constant, self.magnitude, self.error)
        return Expression(*(part[rows] for part in parts))


def widened(matrix: Array, columns: int) -> Array:
    """Return a sparse matrix with zero columns appended."""
    if matrix.shape[1] == columns:
        return matrix
    parts = (matrix.data, matrix.indices, matrix.indptr)
    return require("scipy.sparse").csr_matrix(parts, shape=(matrix.shape[0], columns))


def stacked(expressions: list[Expression]) -> Expression:
    """Return the rows of several expressions, one after the other."""
    columns = max(e.matrix.shape[1] for e in expressions)
    matrices = [widened(e.matrix, columns) for e in expressions]
    vectors = (
        np.concatenate([getattr(e, name) for e in expressions])
        for name in ("constant", "magnitude", "error")
    )
    return Expression(require("scipy.sparse").vstack(matrices, format="csr"), *vectors)


def transform(x: Expression, matrix: Array, offset: Array, size: Array | None = None) -> Expression:
    """Return `matrix @ x + offset`; `size` is what was added up to compute the offset."""
    size = np.abs(offset) if size is None else size
    absolute = abs(matrix)
    terms = int(np.diff(matrix.indptr).max(initial=0))
    magnitude = absolute @ x.magnitude + size
    share = growth(terms + 8, EPS)
    error = (absolute @ x.error + share * magnitude + TINY) * (1 + share)
    product = (matrix @ x.matrix).tocsr()
    return Expression(product, matrix @ x.constant + offset, magnitude, error)


def numbers(t: Tensor) -> Array:
    """Return a tensor as a flat float64 array."""
    return t.detach().to("cpu", torch.float64).flatten().numpy()


# --- rules: op, shapes of the inputs, shape of the output, expressions ------------------------


def _linear(op: ops.Linear, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    sparse = require("scipy.sparse")
    copies = math.prod(shape[:-1])
    weight = sparse.csr_matrix(op.weight.numpy())
    matrix = sparse.kron(sparse.identity(copies), weight, format="csr")
    bias = np.zeros(shape[-1]) if op.bias is None else numbers(op.bias)
    return transform(x, matrix, np.tile(bias, copies))


def _conv2d(op: ops.Conv2d, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    row, column, tap, size = dense.convolution_entries(op, shapes[0])
    entries = (op.weight.flatten()[tap].numpy(), (row.numpy(), column.numpy()))
    extent = (size, math.prod(shapes[0]))
    matrix = require("scipy.sparse").csr_matrix(entries, shape=extent)
    bias = np.zeros(shape[0]) if op.bias is None else numbers(op.bias)
    return transform(x, matrix, np.repeat(bias, size // shape[0]))


def _conv_transpose(
    op: ops.ConvTranspose2d, shapes: list[Shape], shape: Shape, x: Expression
) -> Expression:
    column, row, tap = dense.transposed_entries(op, shape)
    entries = (op.weight.flatten()[tap].numpy(), (row.numpy(), column.numpy()))
    extent = (math.prod(shape), math.prod(shapes[0]))
    matrix = require("scipy.sparse").csr_matrix(entries, shape=extent)
    bias = np.zeros(shape[0]) if op.bias is None else numbers(op.bias)
    return transform(x, matrix, np.repeat(bias, math.prod(shape[1:])))


def _batch_norm(op: ops.BatchNorm, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    factor, offset = (numbers(t) for t in batchnorm_map(op))
    size = np.abs(numbers(op.mean) * factor)
    if op.bias is not None:
        size = size + np.abs(numbers(op.bias))
    parts = (factor, offset, size, np.abs(numbers(op.mean)))
    factor, offset, size, mean = (np.repeat(a, math.prod(shape[1:])) for a in parts)
    found = transform(x, _diagonal(factor), offset, size)
    # The factor itself may underflow, and it meets the mean and whatever comes in.
    return replace(found, error=found.error + TINY * (x.magnitude + mean))


def _diagonal(values: Array) -> Array:
    return require("scipy.sparse").diags(values, format="csr")


def _shift(op: ops.Shift, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    offset = numbers(POINT_RULES[ops.Shift](op, torch.zeros(1, *shape, dtype=torch.float64)))
    return transform(x, _diagonal(np.ones(len(offset))), offset)


def _scale(op: ops.Scale, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    factor = numbers(POINT_RULES[ops.Scale](op, torch.ones(1, *shape, dtype=torch.float64)))
    return transform(x, _diagonal(factor), np.zeros(len(factor)))


def _avg_pool(op: ops.AvgPool, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    sparse = require("scipy.sparse")
    channels, height, width = shapes[0]
    pixels = torch.eye(height * width, dtype=torch.float64).view(-1, 1, height, width)
    pooled = POINT_RULES[ops.AvgPool](op, pixels).flatten(1).T
    matrix = sparse.kron(sparse.identity(channels), sparse.csr_matrix(pooled.numpy()), format="csr")
    return transform(x, matrix, np.zeros(matrix.shape[0]))


def _rearrange(op: ops.Op, shapes: list[Shape], shape: Shape, *xs: Expression) -> Expression:
    """Move rows to where the operation moves the numbers of the rows."""
    total, moved = 0, []
    for before in shapes:
        count = math.prod(before)
        index = torch.arange(total, total + count, dtype=torch.float64)
        moved.append(index.view(1, *before))
        total += count
    rows = POINT_RULES[type(op)](op, *moved).flatten().long().numpy()
    return (xs[0] if len(xs) == 1 else stacked(list(xs)))[rows]


def _pad(op: ops.Pad, shapes: list[Shape], shape: Shape, x: Expression) -> Expression:
    edge = np.array([op.value])
    blank = require("scipy.sparse").csr_matrix((1, x.matrix.shape[1]))
    outside = Expression(blank, edge, np.abs(edge), np.zeros(1))
    # The row of padding comes last, where -1 finds it.
    return _rearrange(replace(op, value=-1.0), shapes, shape, stacked([x, outside]))


def _combine(sign: float) -> Callable[..., Expression]:
    def rule(
        op: ops.Op, shapes: list[Shape], shape: Shape, a: Expression, b: Expression
    ) -> Expression:
        columns = max(a.matrix.shape[1], b.matrix.shape[1])
        matrix = widened(a.matrix, columns) + sign * widened(b.matrix, columns)
        magnitude = a.magnitude + b.magnitude
        share = growth(2 + 8, EPS)
        error = (a.error + b.error + share * magnitude) * (1 + share)
        return Expression(matrix.tocsr(), a.constant + sign * b.constant, magnitude, error)

    return rule


RULES: dict[type[ops.Op], Callable[..., Expression]] = {
    ops.Linear: _linear,
    ops.Conv2d: _conv2d,
    ops.ConvTranspose2d: _conv_transpose,
    ops.BatchNorm: _batch_norm,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: _avg_pool,
    ops.Reshape: _rearrange,
    ops.Permute: _rearrange,
    ops.Pad: _pad,
    ops.Slice: _rearrange,
    ops.Take: _rearrange,
    ops.Concat: _rearrange,
    ops.Add: _combine(1.0),
    ops.Sub: _combine(-1.0),
}
# Encoded with variables of their own (`tightrope.domains.milp.encoding`).
ENCODED = (ops.Relu, ops.LeakyRelu, ops.MaxPool)
# No program has a rule for them: a network that holds one is refused.
NOT_PIECEWISE_LINEAR = (
    *(ops.Sigmoid, ops.Tanh, ops.Function, ops.Mul, ops.MatMul),
    *(ops.Differences, ops.Softmax, ops.Standardize, ops.Step, ops.Where, ops.ArgMax),
    ops.Distance,
)
