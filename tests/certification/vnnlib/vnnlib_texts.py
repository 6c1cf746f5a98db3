"""Texts of VNN-LIB and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tightrope.certification.vnnlib import Conjunction, Row, Specification, parse_vnnlib

UNIT = "(assert (>= X_0 0))(assert (<= X_0 1))\n"


def declarations(inputs: int = 1, outputs: int = 2) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def parse(text: str, inputs: int = 1, outputs: int = 2) -> Specification:
    return parse_vnnlib(declarations(inputs, outputs) + text)


def rows(conjunction: Conjunction) -> list[tuple[list[Fraction], Fraction]]:
    """Return the rows, written out, and their constants."""
    return [
        ([dict(row.factors).get(i, 0) for i in range(conjunction.outputs)], row.constant)
        for row in conjunction.rows
    ]


def conjunction_of(matrix: Sequence[Sequence[Fraction]], offset: Sequence[Fraction]) -> Conjunction:
    """Return the conjunction of rows that are written out."""
    rows = [
        Row(tuple((i, f) for i, f in enumerate(row) if f), constant)
        for row, constant in zip(matrix, offset, strict=True)
    ]
    return Conjunction(tuple(rows), len(matrix[0]) if matrix else 0)


def only(specification: Specification) -> Conjunction:
    (case,) = specification.cases
    (conjunction,) = case.unsafe
    return conjunction
