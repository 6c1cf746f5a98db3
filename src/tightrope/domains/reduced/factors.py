"""Matrices to multiply with again and again: held sparse where most of their entries are zero.

What a convolution sees of its input is a small window: of a reduced network's coefficients of the
input, one in a hundred or fewer are not zero. Sums of fewer terms are rounded less often, so the
a-priori bounds on rounding errors that hold for the whole matrix hold for these products, too.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from tightrope.devices import launches

SMALL = 1 << 16  # entries, with which a dense product takes no time
DENSE = 0.1  # of the entries are not zero, with more of which a dense product is the faster
SLOWER = 8.0  # times that a sparse product takes longer for each entry


class Factor:
    """A matrix by which batches of rows are multiplied from the left: `rows @ matrix`."""

    def __init__(self, matrix: Tensor) -> None:
        self.dense: Tensor | None = matrix
        self.turned: Tensor | None = None  # the transposed matrix, sparse
        self.work = float(matrix.numel())
        if matrix.numel() <= SMALL or not _possible(matrix):
            return
        count = int(matrix.count_nonzero())
        if count > DENSE * matrix.numel():
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are said to be new
            self.turned = matrix.t().to_sparse_csr()
        self.dense, self.work = None, SLOWER * count

    def added(self, rows: Tensor, start: Tensor) -> Tensor:
        """Return `start + rows @ matrix`, which is where the start was."""
        if self.dense is not None:
            return start.addmm_(rows, self.dense)
        assert self.turned is not None
        return start.add_(torch.mm(self.turned, rows.t()).t())


def _possible(matrix: Tensor) -> bool:
    """Return whether there are sparse products here, and zeros times whatever are zero."""
    return (
        not launches(matrix)
        and torch.backends.mkl.is_available()
        and bool(torch.isfinite(matrix).all())
    )
