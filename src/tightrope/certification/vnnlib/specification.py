"""What a VNN-LIB file says, exactly, and its approximations in floating point.

The set of counterexamples is a union of cases, each of them an input box together with a
disjunction of conjunctions of linear constraints, mostly on the outputs. Boxes of floats
approximate it from outside for proofs and from inside for counterexamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.certification.vnnlib.names import Names
from tightrope.deadline import check_time

LARGEST_CONSTANT = Fraction(2**1000)  # float64 ends at 2 ** 1024
# Between bounds that are further apart than that, relative to their size, there is a float32.
_WIDE = 2.0**-22
_PART = 1 << 14  # inputs between two looks at the clock


class Row(NamedTuple):
    """One constraint: `sum of factor * variable + constant <= 0`, `< 0` if strict.

    Factors go with indices: an output's is its number, that of input number i is `-1 - i`.
    """

    factors: tuple[tuple[int, Fraction], ...]
    constant: Fraction
    strict: bool = False


@dataclass(frozen=True)
class Conjunction:
    """The outputs, of which there are `outputs`, that satisfy all rows."""

    rows: tuple[Row, ...]
    outputs: int

    @property
    def exact(self) -> bool:
        """Whether float64 holds the factors, each row multiplied by some number, as they are."""
        return all(Fraction(float(f)) == f for row in self.rows for f in _scaled(row)[0])

    def holds(self, outputs: Sequence[float], inputs: Sequence[float] = ()) -> bool:
        """Return whether floats satisfy all rows, exactly; never for infinity or NaN."""
        values = [*outputs, *reversed(inputs)]  # whose last is index -1
        return all(map(math.isfinite, values)) and self.holds_exactly([*map(Fraction, values)])

    def holds_exactly(self, values: Sequence[Fraction]) -> bool:
        """Return whether exact outputs, and inputs from the last to the first, satisfy all rows."""
        for row in self.rows:
            value = row.constant + sum(f * values[i] for i, f in row.factors)
            if value > 0 or (value == 0 and row.strict):
                return False
        return True


def floats(rows: Sequence[Row], outputs: int, inputs: int = 0) -> tuple[Tensor, Tensor]:
    """Return the matrix [rows, outputs + inputs], rounded to nearest, and the offset, rounded down.

    A row that is proved positive for the lower offset is positive for the exact one. Rows whose
    factors are no floats are multiplied by a positive number first, after which they mean the
    same; what is still not exact then proves nothing.
    """
    places = [
        (i, index if index >= 0 else outputs - 1 - index)
        for i, row in enumerate(rows)
        for index, _ in row.factors
    ]
    scaled = [_scaled(row) for row in rows]
    matrix = torch.zeros(len(rows), outputs + inputs, dtype=torch.float64)
    if places:
        values = [float(factor) for factors, _ in scaled for factor in factors]
        where = torch.tensor(places)
        matrix[where[:, 0], where[:, 1]] = torch.tensor(values, dtype=torch.float64)
    return matrix, _round([constant for _, constant in scaled], torch.float64, up=False)


def _scaled(row: Row) -> tuple[list[Fraction], Fraction]:
    """Return the factors and the constant of a row, multiplied so that float64 holds the factors.

    Only rows with factors that are no floats are multiplied; some cannot be.
    """
    factors = [factor for _, factor in row.factors]
    if all(Fraction(float(factor)) == factor for factor in factors):
        return factors, row.constant
    scale = Fraction(math.lcm(*(f.denominator for f in factors)))
    scale /= math.gcd(*(int(f * scale) for f in factors))
    largest = max(abs(f) for f in factors) * scale
    # Whole numbers without a common divisor, near 1: far from both ends of the exponents.
    scale /= 1 << max(0, largest.numerator.bit_length() - 1)
    if row.constant * scale < -LARGEST_CONSTANT:
        scale = LARGEST_CONSTANT / -row.constant
    return [f * scale for f in factors], min(row.constant * scale, LARGEST_CONSTANT)


@dataclass(frozen=True)
class Case:
    """An input box and a disjunction: the counterexamples are where any conjunction holds.

    The inputs in `open_lower` and `open_upper` may not reach their bound (strict inequalities).
    Those in `fixed` have that value at counterexamples; their bounds contain it.
    """

    lower: tuple[Fraction, ...]
    upper: tuple[Fraction, ...]
    unsafe: tuple[Conjunction, ...]
    open_lower: frozenset[int] = frozenset()
    open_upper: frozenset[int] = frozenset()
    fixed: Mapping[int, Fraction] = field(default_factory=dict)

    def for_type(self, dtype: torch.dtype) -> Case:
        """Return the case for inputs of a floating-point type.

        An input between whose bounds no such number lies is meant to have one value: that of the
        nearest number. Proofs are over the hull of it and the bounds, counterexamples have the
        number, so that there can never be both.
        """
        thin = self._thin(dtype)
        if not thin:
            return self
        lower, upper = list(self.lower), list(self.upper)
        for count, (i, value) in enumerate(thin.items()):
            if not count % _PART:
                check_time()
            lower[i], upper[i] = min(lower[i], value), max(upper[i], value)
        return replace(
            self,
            lower=tuple(lower),
            upper=tuple(upper),
            open_lower=self.open_lower - thin.keys(),
            open_upper=self.open_upper - thin.keys(),
            fixed=thin,
        )

    def _thin(self, dtype: torch.dtype) -> dict[int, Fraction]:
        """Return the inputs between whose bounds no float lies, with the nearest one."""
        sides = ([*map(float, side)] for side in (self.lower, self.upper))
        low, high = (torch.tensor(side, dtype=torch.float64) for side in sides)
        scale = torch.maximum(low.abs(), high.abs()).clamp(min=torch.finfo(torch.float32).tiny)
        near = (high - low <= _WIDE * scale).nonzero()[:, 0].tolist()
        above, below = (
            _round([side[i] for i in near], dtype, up=up, past=_places(near, opened)).tolist()
            for side, opened, up in (
                (self.lower, self.open_lower, True),
                (self.upper, self.open_upper, False),
            )
        )
        thin = {}
        for count, (i, over, under) in enumerate(zip(near, above, below, strict=True)):
            if not count % _PART:
                check_time()
            if over > under:
                thin[i] = Fraction(self._nearest(i, under, over, dtype))
        return thin

    def _nearest(self, i: int, under: float, over: float, dtype: torch.dtype) -> float:
        """Return the one of two floats beside the bounds that is nearer to their middle.

        Rounding keeps the order: what float64 tells apart needs no exact arithmetic.
        """
        if dtype == torch.float32:
            border = (under + over) / 2  # exact
            low, high = float(self.lower[i]), float(self.upper[i])
            if max(low, high) < border:
                return under
            if min(low, high) > border:
                return over
        middle = (self.lower[i] + self.upper[i]) / 2
        return min(under, over, key=lambda value: abs(Fraction(value) - middle))

    def outer(self, dtype: torch.dtype = torch.float64) -> Box:
        """Return a box of shape (1, inputs) that contains the exact one."""
        if dtype == torch.float64:
            return self._outer.map(torch.clone)
        lower = _round(self.lower, dtype, up=False)
        return Box(lower[None], _round(self.upper, dtype, up=True)[None])

    @cached_property
    def _outer(self) -> Box:
        lower = _round(self.lower, torch.float64, up=False)
        return Box(lower[None], _round(self.upper, torch.float64, up=True)[None])

    @cached_property
    def _inner(self) -> tuple[Tensor, Tensor]:
        """The least and the largest floats of float64 that inputs may have."""
        return self._ends(torch.float64)

    def inner(self, dtype: torch.dtype = torch.float32) -> Box | None:
        """Return the largest box of floats inside the exact one; None if no float fits in."""
        lower, upper = self._ends(dtype)
        return Box(lower[None], upper[None]) if bool((lower <= upper).all()) else None

    def _ends(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        lower = _round(self.lower, dtype, up=True, past=self.open_lower)
        upper = _round(self.upper, dtype, up=False, past=self.open_upper)
        if self.fixed:
            places = torch.tensor(list(self.fixed))
            values = torch.tensor([float(v) for v in self.fixed.values()], dtype=torch.float64)
            lower[places] = upper[places] = values.to(dtype)
        return lower, upper

    @property
    def relates_inputs(self) -> bool:
        """Whether inputs stand in constraints other than bounds."""
        rows = (row for conjunction in self.unsafe for row in conjunction.rows)
        return any(index < 0 for row in rows for index, _ in row.factors)

    def unsafe_at(self, outputs: Sequence[float], inputs: Sequence[float] = ()) -> bool:
        """Return whether some conjunction holds for floats; never for infinity or NaN."""
        values = [*outputs, *reversed(inputs)]
        if not all(map(math.isfinite, values)):
            return False
        exact = [Fraction(value) for value in values]
        return any(conjunction.holds_exactly(exact) for conjunction in self.unsafe)

    def contains(self, inputs: Sequence[float]) -> bool:
        """Return whether float inputs lie in the exact box."""
        if len(inputs) != len(self.lower):
            return False
        found = torch.tensor(inputs, dtype=torch.float64)
        lower, upper = self._inner
        return bool(((lower <= found) & (found <= upper)).all())

    def admits(self, index: int, value: Fraction) -> bool:
        """Return whether an exact value of one input lies within its bounds."""
        if index in self.fixed:
            return value == self.fixed[index]
        above = value > self.lower[index] or (
            value == self.lower[index] and index not in self.open_lower
        )
        below = value < self.upper[index] or (
            value == self.upper[index] and index not in self.open_upper
        )
        return above and below


@dataclass(frozen=True)
class Specification:
    """A VNN-LIB file: the set of counterexamples is the union of the cases.

    `inputs` and `outputs` are how many of each are declared. Inputs that are asserted to be equal
    are one input of the cases: `places` says which one each declared input is, None: all differ.
    """

    cases: tuple[Case, ...]
    inputs: int
    outputs: int
    names: Names = field(default_factory=Names)
    places: tuple[int, ...] | None = None

    @property
    def relates_inputs(self) -> bool:
        """Whether inputs stand in constraints other than bounds."""
        return any(case.relates_inputs for case in self.cases)

    def for_type(self, dtype: torch.dtype) -> Specification:
        """Return the specification for inputs of a floating-point type (see `Case.for_type`)."""
        return replace(self, cases=tuple(case.for_type(dtype) for case in self.cases))


def _places(indices: Sequence[int], members: frozenset[int]) -> frozenset[int]:
    """Return where in a list of indices those of a set stand."""
    return frozenset(place for place, index in enumerate(indices) if index in members)


def _round(
    values: Sequence[Fraction],
    dtype: torch.dtype,
    *,
    up: bool,
    past: frozenset[int] = frozenset(),
) -> Tensor:
    """Return the nearest floats on one side; strictly beyond the values at `past`."""
    near = torch.tensor([float(v) for v in values], dtype=torch.float64)
    rounded = near.to(dtype)
    target = torch.full_like(rounded, math.inf if up else -math.inf)
    check_time()
    # Rounding keeps the order: a float on the wrong side of the nearest one of float64 is on the
    # wrong side of the value, and the next one is not.
    wide = rounded.to(torch.float64)
    misses = (wide < near) if up else (wide > near)
    rounded = torch.where(misses, torch.nextafter(rounded, target), rounded)
    same = (wide == near).nonzero()[:, 0].tolist()
    wrong = []
    for count, (i, found) in enumerate(zip(same, wide[same].tolist(), strict=True)):
        if not count % _PART:
            check_time()
        value = values[i]
        over, under = found.as_integer_ratio()
        difference = over * value.denominator - value.numerator * under
        beyond = difference < 0 if up else difference > 0
        if beyond or (difference == 0 and i in past):
            wrong.append(i)
    rounded[wrong] = torch.nextafter(rounded[wrong], target[wrong])
    return rounded
