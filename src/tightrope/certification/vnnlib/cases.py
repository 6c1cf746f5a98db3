"""Assertions multiplied out into cases: boxes of inputs, each with unsafe outputs.

Alternatives with the same input box are one case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from tightrope.certification.vnnlib.formulas import (
    LOWER,
    UPPER,
    Atom,
    Both,
    Bound,
    Either,
    Formula,
    Tie,
    multiplied,
)
from tightrope.certification.vnnlib.names import Names
from tightrope.certification.vnnlib.relations import Bounds, contract, keep_tighter, placed, tied
from tightrope.certification.vnnlib.specification import Case, Conjunction, Row
from tightrope.certification.vnnlib.text import Source, too_large
from tightrope.deadline import Deadline
from tightrope.errors import UserError
from tightrope.limits import VNNLIB_BOUNDS, VNNLIB_TERMS

Rows = tuple[Row, ...]
_Key = tuple[int, int, int, int, bool]
_CASES_PER_LOOK = 16  # at the clock


class _Sides(NamedTuple):
    lower: tuple[Fraction, ...]
    upper: tuple[Fraction, ...]
    open_lower: frozenset[int]
    open_upper: frozenset[int]


class _EmptyBoxError(UserError):
    """An input whose bounds exclude each other."""


class Assertions:
    """What a file asserts: bounds and rows that hold in every case, and disjunctions."""

    def __init__(self) -> None:
        self.bounds: Bounds = ({}, {})
        self.rows: list[Row] = []
        self.ties: list[tuple[int, int]] = []
        self.choices: list[Either] = []
        self.possible = True
        self.most_rows = VNNLIB_TERMS.value

    def add(self, formula: Formula) -> None:
        """Assert a formula."""
        if isinstance(formula, Either):
            self.choices.append(formula)
            return
        atoms = formula.atoms if isinstance(formula, Both) else [formula]
        self.ties += [atom.inputs for atom in atoms if isinstance(atom, Tie)]
        rows = take([atom for atom in atoms if not isinstance(atom, Tie)], self.bounds)
        self.choices += formula.choices if isinstance(formula, Both) else []
        self.possible &= rows is not None
        self.rows += rows or ()
        if len(self.rows) > self.most_rows:
            raise VNNLIB_TERMS.exceeded("the list of assertions")


class Cases:
    """Sorts the alternatives of a file by their input boxes."""

    def __init__(self, asserted: Assertions, source: Source, names: Names) -> None:
        self.source, self.names, self.outputs = source, names, names.count("Y")
        multiplied(len(asserted.rows), asserted.choices)
        self.asserted, self.choices = asserted, asserted.choices
        self.places = tied(asserted.ties, names.count("X"))
        self.inputs = names.count("X") if self.places is None else max(self.places) + 1
        self.bounds = self._placed_bounds(asserted.bounds)
        self.rows = self._placed_rows(tuple(asserted.rows))
        self.relations = _relations(self.rows)
        # Alternatives by the bounds of their own; they are few, where a box may be large.
        self.found: dict[tuple[tuple[_Key, ...], Rows], tuple[_Sides, dict[Rows, None]]] = {}

    def collect(self, deadline: Deadline) -> tuple[Case, ...]:
        """Return the cases."""
        contradiction = UserError("the assertions contradict each other: nothing is to be proved")
        for count, atoms in enumerate(self._alternatives()):
            if not count % _CASES_PER_LOOK:
                deadline.check()
            own: Bounds = ({}, {})
            rows = take(atoms, own)
            if rows is None:
                continue
            try:
                self._add(self._placed_bounds(own), self._placed_rows(rows))
            except _EmptyBoxError as error:  # an alternative that never holds
                contradiction = error
        if not self.found:
            raise contradiction
        return tuple(self._merged())

    def _alternatives(self) -> Iterator[list[Atom]]:
        if not self.asserted.possible:
            return
        if len(self.choices) == 1:
            yield from self.choices[0].alternatives()
            return
        parts = [list(choice.alternatives()) for choice in self.choices]
        for chosen in itertools.product(*parts):
            yield list(itertools.chain.from_iterable(chosen))

    def _placed_bounds(self, bounds: Bounds) -> Bounds:
        """Return bounds of the inputs that are left where some are tied to each other."""
        if self.places is None:
            return bounds
        placed: Bounds = ({}, {})
        for side in (LOWER, UPPER):
            for bound in bounds[side].values():
                keep_tighter(placed[side], bound._replace(input=self.places[bound.input]))
        return placed

    def _placed_rows(self, rows: Rows) -> Rows:
        if self.places is None:
            return rows
        return tuple(placed(row, self.places) for row in rows)

    def _add(self, own: Bounds, rows: Rows) -> None:
        related = _relations(rows)
        key = (_key(own), related)
        if key not in self.found:
            VNNLIB_BOUNDS.check((len(self.found) + 1) * self.inputs, "the list of input boxes")
            self.found[key] = self._box(own, related), {}
        self.found[key][1][rows] = None

    def _merged(self) -> Iterator[Case]:
        """Join alternatives with the same box."""
        common = self.rows
        groups = list(self.found.values())
        if len(groups) > 1:  # hashing thousands of fractions takes longer than reading them
            merged: dict[_Sides, dict[Rows, None]] = {}
            for box, found in groups:
                merged.setdefault(box, {}).update(found)
            groups = list(merged.items())
        for box, found in groups:
            unsafe = tuple(Conjunction(common + own, self.outputs) for own in found)
            yield Case(box.lower, box.upper, unsafe, box.open_lower, box.open_upper)

    def _title(self, free: int) -> str:
        """Return the name of an input."""
        return self.names.title("X", free if self.places is None else self.places.index(free))

    def _box(self, own: Bounds, related: Rows) -> _Sides:
        """Return the bounds of all inputs and the sets of open ones."""
        whole: Bounds = (dict(self.bounds[LOWER]), dict(self.bounds[UPPER]))
        for side in (LOWER, UPPER):
            for bound in own[side].values():
                keep_tighter(whole[side], bound)
        contract(whole, (*self.relations, *related))
        sides = []
        for side, name in ((LOWER, "lower"), (UPPER, "upper")):
            merged = whole[side]
            if len(merged) < self.inputs:
                missing = next(i for i in range(self.inputs) if i not in merged)
                raise UserError(f"{self._title(missing)} has no {name} bound")
            sides.append([merged[i] for i in range(self.inputs)])
        for i, (low, high) in enumerate(zip(*sides, strict=True)):
            if low.value > high.value or (low.value == high.value and (low.strict or high.strict)):
                lines = [self.source.line(bound.position) for bound in (low, high)]
                raise _EmptyBoxError(
                    f"{self._title(i)} has no possible value: its lower bound in line {lines[0]} "
                    f"lies above its upper bound in line {lines[1]}"
                )
        for bound in itertools.chain(*sides):
            if too_large(bound.value):
                title = self._title(bound.input)
                message = f"a bound of {title} above 8e37, near the end of float32"
                raise self.source.error(bound.position, message)
        values = [tuple(bound.value for bound in side) for side in sides]
        opened = [frozenset(b.input for b in side if b.strict) for side in sides]
        return _Sides(values[0], values[1], opened[0], opened[1])


def _relations(rows: Rows) -> Rows:
    """Return the rows that relate inputs to each other, and so say something about the box."""
    return tuple(row for row in rows if all(index < 0 for index, _ in row.factors))


def _key(bounds: Bounds) -> tuple[_Key, ...]:
    return tuple(
        (side, index, bound.value.numerator, bound.value.denominator, bound.strict)
        for side in (LOWER, UPPER)
        for index, bound in sorted(bounds[side].items())
    )


def take(atoms: list[Atom], bounds: Bounds) -> Rows | None:
    """Tighten `bounds` and return the rows on outputs; None if a constant inequality is false."""
    rows: list[Row] = []
    for atom in atoms:
        if isinstance(atom, Bound):
            keep_tighter(bounds[atom.side], atom)
        elif isinstance(atom, Row):
            rows.append(atom)
        elif isinstance(atom, Tie):
            rows += atom.rows
        elif not atom:
            return None
    return tuple(rows)
