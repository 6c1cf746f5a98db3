"""Counterexamples as the VNN competition writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from tightrope.certification.vnnlib.specification import Case
from tightrope.certification.vnnlib.text import parse_number, parse_variable
from tightrope.errors import UserError, shorten

_LIST = re.compile(r"(?:sat\s)?\s*\(\s*((?:\([^()]*+\)\s*+)*+)\)\s*")
_PAIR = re.compile(r"\(([^()]*)\)")


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
    whole = _LIST.fullmatch(text)
    if whole is None:
        raise UserError("a counterexample is one list: ((X_0 0.1) ... (Y_0 0.2))")
    found: dict[str, dict[int, float]] = {"X": {}, "Y": {}}
    for pair in _PAIR.findall(whole[1]):
        words = pair.split()
        variable = parse_variable(words[0]) if len(words) == 2 else None
        number = parse_number(words[1]) if variable else None
        if variable is None or number is None or variable.number in found[variable.kind]:
            raise UserError(f"a counterexample gives each variable once, got {shorten(pair)}")
        found[variable.kind][variable.number] = float(number)
    for kind, values in found.items():
        if sorted(values) != list(range(len(values))):
            raise UserError(f"the counterexample leaves out a variable {kind}")
    inputs, outputs = (tuple(found[kind][i] for i in range(len(found[kind]))) for kind in "XY")
    return inputs, outputs
