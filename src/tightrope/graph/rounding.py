"""A value and how far rounding can lead from it: what the rules of `evaluate.py` are made of.

What is assumed of whoever computes the value, in a precision with unit roundoff u:

- Sums are taken in any order, with or without fused multiply-add, and each operation on the way is
  rounded once. A sum of n products is then off by at most n u / (1 - n u) times the sum of the
  products' absolute values. (This does not cover convolutions by Winograd's or Fourier's
  transformation.)
- BatchNorm is any of its usual forms: at most 16 roundings relative to |x - mean| and |bias|.
- Sigmoid and tanh are off by at most `ELEMENTARY` units in the last place of 1 (sigmoid), or of
  the result (tanh); the functions of `functions.py` by as many units of what their rows call
  `size` (mostly the result; for gelu, hardswish and elu the argument or a constant, which is what
  is left of a sum that cancels). Proofs assume `functions.UNITS` of PyTorch's own in float64.
- Softmax takes differences to the largest number, exponentials, their sum and a quotient (or the
  same by logarithms); a value that is tiny may be zero. Standardisation takes any form of the
  variance, the mean of squares less the square of the mean among them.
- Results below the smallest normal number may be replaced by zero.

The rules evaluate in the tensors' own precision, so that they count twice: for the value of the
one who is checked, and for ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightrope.errors import UserError
from tightrope.graph import ops

# Units in the last place that an elementary function may be off.
ELEMENTARY = 16

Rule = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Rounded:
    """A computed value and a bound on its distance from anybody else's, elementwise."""

    value: Tensor
    error: Tensor

    @classmethod
    def known(cls, value: Tensor) -> Rounded:
        """Return a value that everybody agrees on."""
        return cls(value, torch.zeros_like(value))


def growth(terms: int, dtype: torch.dtype) -> float:
    """Return how far two sums of so many products can be apart, relative to their magnitude."""
    unit = terms * torch.finfo(dtype).eps  # twice the unit roundoff, once for each of the two
    if unit >= 0.5:
        raise UserError(
            f"rounding in {dtype} could change sums of {terms} terms beyond recognition, so that "
            "the network cannot be checked; use a wider type"
        )
    return unit / (1 - unit)


def summed(rule: Rule, op: Any, x: Rounded, terms: int) -> Rounded:
    """Sums of `terms` products of the inputs with the numbers that `op` holds."""
    dtype = x.value.dtype
    relative = growth(terms + 4, dtype)
    # One product for both: what is rounded here, and the inputs' errors.
    magnitude = rule(op.map_tensors(torch.abs), x.value.abs() + x.error / relative)
    tiny = terms * torch.finfo(dtype).tiny
    # What is added here is rounded, too, and so is what is carried; the second `relative` is more.
    return Rounded(rule(op, x.value), relative * magnitude * (1 + relative) + tiny)


def once(rule: Rule, op: Any, *xs: Rounded) -> Rounded:
    """One sum of two: `Shift`, `Add`, `Sub`."""
    values = [x.value for x in xs]
    magnitude = sum((v.abs() for v in values), torch.zeros_like(values[0]))
    if isinstance(op, ops.Shift):
        magnitude = magnitude + op.offset.abs()
    carried = sum((x.error for x in xs), torch.zeros_like(values[0]))
    value = rule(op, *values)
    return outwards(value, growth(1, value.dtype) * magnitude + carried)


def rearranged(rule: Rule, op: Any, *xs: Rounded) -> Rounded:
    """What takes values as they are: their errors go the same way."""
    return Rounded(rule(op, *(x.value for x in xs)), rule(op, *(x.error for x in xs)))


def outwards(value: Tensor, error: Tensor, absolute: Tensor | float = 1.0) -> Rounded:
    """Allow for underflow, and for the rounding of the error itself."""
    info = torch.finfo(value.dtype)
    return Rounded(value, error * (1 + 8 * info.eps) + 4 * info.tiny * absolute)
