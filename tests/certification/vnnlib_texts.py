"""Texts of VNN-LIB and what they mean."""

from __future__ import annotations

from fractions import Fraction

from tightrope.certification.vnnlib import Conjunction, Specification, parse_vnnlib

UNIT = "(assert (>= X_0 0))(assert (<= X_0 1))\n"


def declarations(inputs: int = 1, outputs: int = 2) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def parse(text: str, inputs: int = 1, outputs: int = 2) -> Specification:
    return parse_vnnlib(declarations(inputs, outputs) + text)


def rows(conjunction: Conjunction) -> list[tuple[list[Fraction], Fraction]]:
    return [(list(r), o) for r, o in zip(conjunction.matrix, conjunction.offset, strict=True)]


def only(specification: Specification) -> Conjunction:
    (case,) = specification.cases
    (conjunction,) = case.unsafe
    return conjunction
