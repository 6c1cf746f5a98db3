"""What a VNN-LIB file says, exactly, and its approximations in floating point.

The set of counterexamples is a union of cases, each of them an input box together with a
disjunction of conjunctions of linear constraints on the outputs. Boxes of floats approximate it
from outside for proofs and from inside for counterexamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.box import Box


@dataclass(frozen=True)
class Conjunction:
    """The outputs Y with `matrix @ Y + offset <= 0` in all rows, `< 0` in those of `strict`."""

    matrix: tuple[tuple[Fraction, ...], ...]
    offset: tuple[Fraction, ...]
    strict: frozenset[int] = frozenset()

    @property
    def exact(self) -> bool:
        """Whether float64 holds the matrix without rounding."""
        return all(Fraction(float(entry)) == entry for row in self.matrix for entry in row)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the matrix, rounded to nearest, and the offset, rounded down, in float64.

        A row that is proved positive for the lower offset is positive for the exact one. The
        conjunction without rows, which always holds, has a matrix of shape (0, 0).
        """
        matrix = torch.tensor([[float(e) for e in row] for row in self.matrix], dtype=torch.float64)
        offset = _round(self.offset, torch.float64, up=False)
        return (matrix if self.matrix else matrix.view(0, 0)), offset

    def holds(self, outputs: Sequence[float]) -> bool:
        """Return whether float outputs satisfy all rows, exactly; never for infinity or NaN."""
        if not all(map(math.isfinite, outputs)):
            return False
        exact = [Fraction(y) for y in outputs]
        for i, (row, offset) in enumerate(zip(self.matrix, self.offset, strict=True)):
            value = offset + sum(f * y for f, y in zip(row, exact, strict=True) if f)
            if value > 0 or (value == 0 and i in self.strict):
                return False
        return True


@dataclass(frozen=True)
class Case:
    """An input box and a disjunction: the counterexamples are where any conjunction holds.

    The inputs in `open_lower` and `open_upper` may not reach their bound (strict inequalities).
    """

    lower: tuple[Fraction, ...]
    upper: tuple[Fraction, ...]
    unsafe: tuple[Conjunction, ...]
    open_lower: frozenset[int] = frozenset()
    open_upper: frozenset[int] = frozenset()

    def outer(self, dtype: torch.dtype = torch.float64) -> Box:
        """Return a box of shape (1, inputs) that contains the exact one."""
        lower = _round(self.lower, dtype, up=False)
        return Box(lower[None], _round(self.upper, dtype, up=True)[None])

    def inner(self, dtype: torch.dtype = torch.float32) -> Box | None:
        """Return the largest box of floats inside the exact one; None if no float fits in."""
        lower = _round(self.lower, dtype, up=True, past=self.open_lower)
        upper = _round(self.upper, dtype, up=False, past=self.open_upper)
        return Box(lower[None], upper[None]) if bool((lower <= upper).all()) else None

    def contains(self, inputs: Sequence[float]) -> bool:
        """Return whether float inputs lie in the exact box."""
        return len(inputs) == len(self.lower) and all(
            math.isfinite(x) and self.admits(i, Fraction(x)) for i, x in enumerate(inputs)
        )

    def admits(self, index: int, value: Fraction) -> bool:
        """Return whether an exact value of one input lies within its bounds."""
        above = value > self.lower[index] or (
            value == self.lower[index] and index not in self.open_lower
        )
        below = value < self.upper[index] or (
            value == self.upper[index] and index not in self.open_upper
        )
        return above and below


@dataclass(frozen=True)
class Specification:
    """A VNN-LIB file: the set of counterexamples is the union of the cases."""

    cases: tuple[Case, ...]
    inputs: int
    outputs: int


def _round(
    values: Sequence[Fraction],
    dtype: torch.dtype,
    *,
    up: bool,
    past: frozenset[int] = frozenset(),
) -> Tensor:
    """Return the nearest floats on one side; strictly beyond the values at `past`."""
    rounded = torch.tensor([float(v) for v in values], dtype=torch.float64).to(dtype)
    target = torch.full_like(rounded, math.inf if up else -math.inf)
    while True:
        wrong = []
        for i, (value, found) in enumerate(zip(values, rounded.tolist(), strict=True)):
            over, under = found.as_integer_ratio()
            difference = over * value.denominator - value.numerator * under
            misses = difference < 0 if up else difference > 0
            if misses or (difference == 0 and i in past):
                wrong.append(i)
        if not wrong:
            return rounded
        rounded[wrong] = torch.nextafter(rounded[wrong], target[wrong])
