"""Formulas of VNN-LIB: inequalities, conjunctions and disjunctions, and how far they multiply."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from tightrope.certification.vnnlib.specification import Row
from tightrope.certification.vnnlib.terms import Sum
from tightrope.certification.vnnlib.text import TOO_LARGE, Source, Variable, too_large
from tightrope.limits import VNNLIB_ALTERNATIVES, VNNLIB_TERMS

LOWER, UPPER = 0, 1


class Bound(NamedTuple):
    """The bound of one input on one side, and where it is written."""

    side: int
    input: int
    value: Fraction
    strict: bool
    position: int


Atom = Bound | Row | bool
"""An inequality of inputs, of outputs, or of constants alone, which is true or false."""


class Both:
    """A conjunction: inequalities that all hold, and disjunctions of which each holds."""

    __slots__ = ("atoms", "choices", "count", "size")

    def __init__(self, parts: list[Formula]) -> None:
        self.atoms: list[Atom] = []
        self.choices: list[Either] = []
        for part in parts:
            if isinstance(part, Both):
                self.atoms += part.atoms
                self.choices += part.choices
            elif isinstance(part, Either):
                self.choices.append(part)
            else:
                self.atoms.append(part)
        self.count, self.size = multiplied(len(self.atoms), self.choices)

    def alternatives(self) -> Iterator[list[Atom]]:
        """Multiply the formula out."""
        if not self.choices:
            yield self.atoms
            return
        for chosen in itertools.product(*(list(c.alternatives()) for c in self.choices)):
            yield [*self.atoms, *itertools.chain.from_iterable(chosen)]


class Either:
    """A disjunction."""

    __slots__ = ("count", "parts", "size")

    def __init__(self, parts: list[Formula]) -> None:
        self.parts = parts
        self.count = sum(_count(part) for part in parts)
        self.size = sum(_size(part) for part in parts)
        check_multiplied(self.count, self.size)

    def alternatives(self) -> Iterator[list[Atom]]:
        """Multiply the formula out."""
        for part in self.parts:
            if isinstance(part, Both | Either):
                yield from part.alternatives()
            else:
                yield [part]


Formula = Atom | Both | Either


def _count(part: Formula) -> int:
    return part.count if isinstance(part, Both | Either) else 1


def _size(part: Formula) -> int:
    return part.size if isinstance(part, Both | Either) else 1


def multiplied(atoms: int, choices: list[Either]) -> tuple[int, int]:
    """Return how many alternatives a conjunction has, and of how many inequalities in all."""
    count = 1
    for choice in choices:  # checked each time: products of many become astronomical
        count *= choice.count
        VNNLIB_ALTERNATIVES.check(count, "the product of the assertions")
    size = atoms * count + sum(choice.size * (count // choice.count) for choice in choices)
    check_multiplied(count, size)
    return count, size


def check_multiplied(count: int, size: int) -> None:
    """Refuse more alternatives, or more inequalities in them, than the limits allow."""
    VNNLIB_ALTERNATIVES.check(count, "the product of the assertions")
    VNNLIB_TERMS.check(size, "the product of the assertions")


def single_bound(
    variable: Variable, number: Fraction, upper: bool, strict: bool, position: int
) -> Atom:
    """Return the inequality of one variable and a number."""
    if variable.kind == "X":
        return Bound(UPPER if upper else LOWER, variable.number, number, strict, position)
    return Row(_unit(variable.number, upper), -number if upper else number, strict)


@lru_cache(maxsize=1 << 14)
def _unit(output: int, positive: bool) -> tuple[tuple[int, Fraction], ...]:
    """Return the factors of one output alone; one object for the many rows that have them."""
    return ((output, Fraction(1 if positive else -1)),)


def inequality(small: Sum, large: Sum, strict: bool, source: Source, position: int) -> Atom:
    """Return `small <= large`, or `<` when it is strict."""
    small.add(large, -1)
    factors = {variable: factor for variable, factor in small.factors.items() if factor}
    constant = small.constant
    if any(map(too_large, (constant, *factors.values()))):
        raise source.error(position, TOO_LARGE)
    kinds = {variable.kind for variable in factors}
    if len(kinds) > 1:
        raise source.error(position, "a constraint that mixes inputs and outputs")
    if not kinds:
        return constant < 0 or (constant == 0 and not strict)
    if kinds == {"Y"}:
        sparse = sorted((variable.number, factor) for variable, factor in factors.items())
        return Row(tuple(sparse), constant, strict)
    if len(factors) > 1:
        raise source.error(position, "a constraint that relates several inputs")
    ((variable, factor),) = factors.items()
    side = UPPER if factor > 0 else LOWER
    return Bound(side, variable.number, -constant / factor, strict, position)
