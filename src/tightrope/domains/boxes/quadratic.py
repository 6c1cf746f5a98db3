"""Quadratic functions as sums and differences of squares of linear ones.

A sum of products `sum_k w_k a_k b_k` of linear functions has many such forms, which differ in how
much lines lose: a square is enclosed by a tangent, exact in the middle, and a chord. Its
eigenvectors make a convex function out of squares that are all added, which tangents bound from
below without any loss there; `a b = ((a + b)^2 - (a - b)^2) / 4` for each product by itself keeps
factors that vary little apart from those that vary much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NEGLIGIBLE = 1e-14  # squares of that share of the largest are left to the error


@dataclass(frozen=True)
class Squares:
    """`sum_i sign_i (row_i . z)^2`, which is the function but for `z error z` at most."""

    rows: Array  # [squares, columns]
    sign: Array  # [squares]: 1 or -1
    error: Array  # [columns, columns]

    def loss(self, radius: Array) -> float:
        """Return what lines lose from below in the middle of a box of such radii."""
        reach = np.abs(self.rows) @ radius
        return float((reach[self.sign < 0] ** 2).sum())


def as_squares(weight: Array, left: Array, right: Array, radius: Array, rounding: float) -> Squares:
    """Write `sum_k weight_k (left_k . z) (right_k . z)` as squares; z varies by `radius`."""
    half = (left * weight[:, None]).T @ right / 2
    whole = half + half.T
    size = (np.abs(left) * np.abs(weight)[:, None]).T @ np.abs(right)
    size = size + size.T
    forms = [_by_eigenvectors(whole, radius), _by_pairs(weight, left, right, radius)]
    found = []
    for rows, sign in forms:
        # The rows are taken as the numbers they are: whatever they miss is the error.
        error = np.abs(whole - (rows * sign[:, None]).T @ rows)
        terms = (len(weight) + len(rows) + 16) * rounding
        error = error + 2 * terms * (size + np.abs(rows).T @ np.abs(rows))
        found.append(Squares(rows, sign, error))
    return min(found, key=lambda squares: squares.loss(radius))


def _by_eigenvectors(matrix: Array, radius: Array) -> tuple[Array, Array]:
    """Return squares of the eigenvectors, once all numbers vary alike."""
    unit = np.where(radius > 0, radius, 1.0)
    values, vectors = np.linalg.eigh(matrix * unit * unit[:, None])
    kept = np.abs(values) > NEGLIGIBLE * np.abs(values).max(initial=0.0)
    rows = (vectors * np.sqrt(np.abs(values))).T / unit
    return rows[kept], np.sign(values[kept])


def _by_pairs(weight: Array, left: Array, right: Array, radius: Array) -> tuple[Array, Array]:
    """Return the squares of a sum and a difference for each product."""
    widths = [np.abs(t) @ radius for t in (left, right)]
    ratio = np.sqrt(np.divide(widths[1], widths[0], where=widths[0] > 0, out=np.ones_like(weight)))
    ratio = np.where(ratio > 0, ratio, 1.0)[:, None]
    root = np.sqrt(np.abs(weight))[:, None] / 2
    both = [root * (ratio * left + s * right / ratio) for s in (1, -1)]
    rows = np.concatenate(both)
    sign = np.concatenate([np.sign(weight), -np.sign(weight)])
    kept = np.abs(rows).max(1, initial=0.0) > 0
    return rows[kept], sign[kept]
