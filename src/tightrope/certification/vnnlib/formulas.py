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


class Tie(NamedTuple):
    """Two inputs that are equal; `rows` say the same."""

    inputs: tuple[int, int]
    rows: tuple[Row, Row]


Atom = Bound | Row | Tie | bool
"""A comparison of inputs, of outputs, or of constants alone, which is true or false."""


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


def comparison(head: str, left: Sum, right: Sum, source: Source, position: int) -> Formula:
    """Return what a comparison of two terms says."""
    difference = right.scaled(Fraction(-1))
    difference.add(left)
    if head[0] in "<>" and head != "!=":
        small = difference if head[0] == "<" else difference.scaled(Fraction(-1))
        return inequality(small, len(head) == 1, source, position)
    differs = head == "!="
    sides = [difference, difference.scaled(Fraction(-1))]
    parts: list[Formula] = [inequality(side, differs, source, position) for side in sides]
    if differs:
        return Either(parts)
    first, second = parts
    if isinstance(first, Row) and isinstance(second, Row) and _is_tie(first):
        (one, _), (other, _) = first.factors
        return Tie((-1 - one, -1 - other), (first, second))
    return Both(parts)


def _is_tie(row: Row) -> bool:
    """Return whether a row compares two inputs with each other, and nothing else."""
    factors = row.factors
    inputs = len(factors) == 2 and all(index < 0 for index, _ in factors)
    return inputs and not row.constant and factors[0][1] == -factors[1][1]


def inequality(term: Sum, strict: bool, source: Source, position: int) -> Atom:
    """Return `term <= 0`, or `< 0` when it is strict."""
    factors = {variable: factor for variable, factor in term.factors.items() if factor}
    constant = term.constant
    if any(map(too_large, (constant, *factors.values()))):
        raise source.error(position, TOO_LARGE)
    if not factors:
        return constant < 0 or (constant == 0 and not strict)
    ((variable, factor),) = list(factors.items())[:1]
    if len(factors) == 1 and variable.kind == "X":
        side = UPPER if factor > 0 else LOWER
        return Bound(side, variable.number, -constant / factor, strict, position)
    return Row(tuple(sorted((v.place, f) for v, f in factors.items())), constant, strict)
