"""VNN-LIB: properties of networks as text files, and counterexamples as text.

A file describes the set of counterexamples by assertions. They are multiplied out into cases,
alternatives with the same input box being one case.
"""

from __future__ import annotations

import gzip
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from tightrope.certification.vnnlib_specification import Case, Conjunction, Specification
from tightrope.certification.vnnlib_syntax import (
    Atom,
    Declarations,
    Form,
    comparison,
    parse_number,
    parse_variable,
    read_forms,
    show,
    syntax_error,
)
from tightrope.errors import UserError

__all__ = [
    "Case",
    "Conjunction",
    "Specification",
    "format_counterexample",
    "parse_counterexample",
    "parse_vnnlib",
    "read_vnnlib",
]

MOST_DISJUNCTS = 100_000
MOST_BOUNDS = 20_000_000  # over all cases

IGNORED = ("set-logic", "set-info", "set-option", "check-sat", "get-model", "exit")


def read_vnnlib(path: Path) -> Specification:
    """Read a VNN-LIB file, plain or compressed (`.gz`)."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {path}: {reason}") from None
    try:
        return parse_vnnlib(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_vnnlib(text: str) -> Specification:
    """Read the text of a VNN-LIB file."""
    declared = Declarations()
    common: list[Atom] = []
    choices: list[Form] = []
    for form in read_forms(text):
        assert isinstance(form, Form)
        if form.head in ("declare-const", "declare-fun"):
            declared.declare(form)
        elif form.head == "assert" and len(form) == 2 and isinstance(form[1], Form):
            _flatten(form[1], declared, common, choices)
        elif form.head not in IGNORED:
            raise syntax_error(form.line, f"expected declare-const or assert, got {show(form)}")
    inputs, outputs = declared.count("X"), declared.count("Y")
    disjuncts = math.prod(_count(choice) for choice in choices)
    if disjuncts > MOST_DISJUNCTS:
        raise UserError(
            f"the assertions multiply out to more than {MOST_DISJUNCTS} alternatives; "
            "split the file into several ones"
        )
    branches = [list(_disjuncts(choice, declared)) for choice in choices]
    return Specification(_Cases(inputs, outputs, common).collect(branches), inputs, outputs)


def _flatten(form: Form, declared: Declarations, atoms: list[Atom], choices: list[Form]) -> None:
    """Split a formula into inequalities that always hold and disjunctions."""
    if form.head == "and" and len(form) > 1:
        for part in _formulas(form):
            _flatten(part, declared, atoms, choices)
    elif form.head == "or" and len(form) == 2:
        _flatten(_formulas(form)[0], declared, atoms, choices)
    elif form.head == "or" and len(form) > 2:
        choices.append(form)
    else:
        atoms.append(comparison(form, declared))


def _formulas(form: Form) -> list[Form]:
    parts = [part for part in form[1:] if isinstance(part, Form)]
    if len(parts) != len(form) - 1:
        raise syntax_error(form.line, f"expected formulas in brackets, got {show(form)}")
    return parts


def _count(form: Form) -> int:
    """Return the number of conjunctions that a formula multiplies out to."""
    if form.head not in ("and", "or"):
        return 1
    counts = [_count(part) for part in _formulas(form)]
    if form.head == "or":
        return sum(counts)
    # Capped, or nested products would become numbers of astronomical length.
    total = 1
    for count in counts:
        total = min(total * count, MOST_DISJUNCTS + 1)
    return total


def _disjuncts(form: Form, declared: Declarations) -> Iterator[list[Atom]]:
    """Multiply a formula out."""
    if form.head == "or":
        for part in _formulas(form):
            yield from _disjuncts(part, declared)
        return
    atoms: list[Atom] = []
    choices: list[Form] = []
    _flatten(form, declared, atoms, choices)
    if not choices:
        yield atoms
        return
    for chosen in itertools.product(*(list(_disjuncts(c, declared)) for c in choices)):
        yield atoms + [atom for part in chosen for atom in part]


# The bound of one input: its exact value, whether the input must stay off it, and its line.
_Bound = tuple[Fraction, bool, int]
_Bounds = tuple[dict[int, _Bound], dict[int, _Bound]]
_Key = tuple[int, int, int, int, bool]
_Row = tuple[tuple[Fraction, ...], Fraction, bool]


class _Sides(NamedTuple):
    lower: tuple[Fraction, ...]
    upper: tuple[Fraction, ...]
    open_lower: frozenset[int]
    open_upper: frozenset[int]


class _Cases:
    """Sorts conjunctions by their input boxes."""

    def __init__(self, inputs: int, outputs: int, common: list[Atom]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.bounds: _Bounds = ({}, {})
        self.rows = self._take(common, self.bounds)
        # Alternatives by the bounds of their own; they are few, where a box may be large.
        self.found: dict[tuple[_Key, ...], tuple[_Sides, dict[Conjunction, None]]] = {}

    def collect(self, branches: list[list[list[Atom]]]) -> tuple[Case, ...]:
        contradiction = UserError("the assertions contradict each other: nothing is to be proved")
        combined = itertools.product(*branches) if self.rows is not None else iter(())
        for chosen in combined:
            own: _Bounds = ({}, {})
            rows = self._take([atom for part in chosen for atom in part], own)
            if rows is None:
                continue
            key = _key(own)
            try:
                box, found = self.found[key] if key in self.found else (self._box(own), {})
            except _EmptyBoxError as error:
                if len(branches) < 2:
                    raise
                contradiction = error  # alternatives of several asserts may exclude each other
                continue
            found[self._conjunction(rows)] = None
            self.found[key] = box, found
            if len(self.found) * self.inputs > MOST_BOUNDS:
                raise UserError("too many different input boxes; split the file into several ones")
        if not self.found:
            raise contradiction
        return self._merged()

    def _merged(self) -> tuple[Case, ...]:
        """Join alternatives with the same box."""
        groups = list(self.found.values())
        if len(groups) > 1:  # hashing thousands of fractions takes longer than reading them
            merged: dict[_Sides, dict[Conjunction, None]] = {}
            for box, found in groups:
                merged.setdefault(box, {}).update(found)
            groups = list(merged.items())
        return tuple(
            Case(box.lower, box.upper, tuple(found), box.open_lower, box.open_upper)
            for box, found in groups
        )

    def _take(self, atoms: list[Atom], bounds: _Bounds) -> list[_Row] | None:
        """Tighten `bounds` and return the rows on outputs; None if a constant one is false."""
        rows: list[_Row] = []
        for atom in atoms:
            kind = atom.kind
            if kind == "X":
                _tighten(bounds, atom)
            elif kind == "Y":
                row = [Fraction(0)] * self.outputs
                for variable, factor in atom.factors.items():
                    row[variable.number] = factor
                rows.append((tuple(row), atom.constant, atom.strict))
            elif atom.constant > 0 or (atom.strict and atom.constant == 0):
                return None
        return rows

    def _conjunction(self, own: list[_Row]) -> Conjunction:
        assert self.rows is not None
        rows = self.rows + own
        strict = frozenset(i for i, row in enumerate(rows) if row[2])
        return Conjunction(tuple(row[0] for row in rows), tuple(row[1] for row in rows), strict)

    def _box(self, own: _Bounds) -> _Sides:
        """Return the bounds of all inputs and the sets of open ones."""
        sides = []
        for side, name in ((0, "lower"), (1, "upper")):
            merged = dict(self.bounds[side])
            for index, bound in own[side].items():
                _keep_tighter(merged, side, index, bound)
            if len(merged) < self.inputs:
                missing = next(i for i in range(self.inputs) if i not in merged)
                raise UserError(f"X_{missing} has no {name} bound")
            sides.append([merged[i] for i in range(self.inputs)])
        for i, (low, high) in enumerate(zip(*sides, strict=True)):
            if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
                raise _EmptyBoxError(
                    f"X_{i} has no possible value: its lower bound in line {low[2]} lies above "
                    f"its upper bound in line {high[2]}"
                )
        values = [tuple(bound[0] for bound in side) for side in sides]
        opened = [frozenset(i for i, bound in enumerate(side) if bound[1]) for side in sides]
        return _Sides(values[0], values[1], opened[0], opened[1])


class _EmptyBoxError(UserError):
    """An input whose bounds exclude each other."""


def _key(bounds: _Bounds) -> tuple[_Key, ...]:
    return tuple(
        (side, index, bound[0].numerator, bound[0].denominator, bound[1])
        for side in (0, 1)
        for index, bound in sorted(bounds[side].items())
    )


def _tighten(bounds: _Bounds, atom: Atom) -> None:
    ((variable, factor),) = atom.factors.items()
    if abs(factor.numerator) == factor.denominator == 1:  # divisions are slow
        value = -atom.constant if factor > 0 else atom.constant
    else:
        value = -atom.constant / factor
    side = 1 if factor > 0 else 0
    _keep_tighter(bounds[side], side, variable.number, (value, atom.strict, atom.line))


def _keep_tighter(bounds: dict[int, _Bound], side: int, index: int, bound: _Bound) -> None:
    old = bounds.get(index)
    tighter = old is None or (bound[0] < old[0] if side else bound[0] > old[0])
    if tighter or (old is not None and bound[0] == old[0] and bound[1]):
        bounds[index] = bound


def format_counterexample(case: Case, inputs: Sequence[float], outputs: Sequence[float]) -> str:
    """Return a counterexample as VNN-COMP writes it, one pair of brackets per variable.

    The texts read back as the same floats, and as exact decimals they lie in the case's box: the
    shortest text may not, and then all digits of the float are given.
    """
    if not case.contains(inputs):
        raise ValueError("the inputs do not lie in the box")
    texts = []
    for i, x in enumerate(inputs):
        shortest = repr(float(x))
        inside = case.admits(i, Fraction(shortest))
        texts.append(f"(X_{i} {shortest if inside else format(Decimal(x), 'f')})")
    texts += [f"(Y_{i} {float(y)!r})" for i, y in enumerate(outputs)]
    return "(" + "\n ".join(texts) + ")\n"


def parse_counterexample(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read a counterexample; a first line with the verdict `sat` may come before it."""
    body = text.lstrip()
    forms = read_forms(body[3:] if body.startswith("sat") else body)
    if len(forms) != 1:
        raise UserError("a counterexample is one list: ((X_0 0.1) ... (Y_0 0.2))")
    found: dict[str, dict[int, float]] = {"X": {}, "Y": {}}
    for pair in forms[0]:
        words = [word for word in pair if isinstance(word, str)]
        variable = parse_variable(words[0]) if len(words) == len(pair) == 2 else None
        number = parse_number(words[1]) if variable else None
        if variable is None or number is None or variable.number in found[variable.kind]:
            raise UserError(f"a counterexample gives each variable once, got {show(pair)}")
        found[variable.kind][variable.number] = float(number)
    for kind, values in found.items():
        if sorted(values) != list(range(len(values))):
            raise UserError(f"the counterexample leaves out a variable {kind}")
    inputs, outputs = (tuple(found[kind][i] for i in range(len(found[kind]))) for kind in "XY")
    return inputs, outputs
