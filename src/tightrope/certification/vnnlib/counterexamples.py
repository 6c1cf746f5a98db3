"""Counterexamples as the VNN competition writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

from tightrope.certification.vnnlib.names import Names
from tightrope.certification.vnnlib.specification import Case, Specification
from tightrope.certification.vnnlib.text import parse_number, parse_variable
from tightrope.errors import UserError, shorten

_LIST = re.compile(r"(?:sat\s)?\s*\(\s*((?:\([^()]*+\)\s*+)*+)\)\s*")
_PAIR = re.compile(r"\(([^()]*)\)")


def format_counterexample(
    specification: Specification, case: Case, inputs: Sequence[float], outputs: Sequence[float]
) -> str:
    """Return a counterexample of one case as text.

    In version 1, one pair of brackets per variable, as VNN-COMP writes it; in version 2 a line for
    each tensor and its elements below it. The texts read back as the same floats, and as exact
    decimals they lie in the case's box: the shortest text may not, and then all digits of the
    float are given. `inputs` are those of the case, where equal ones are one.
    """
    if not case.contains(inputs):
        raise ValueError("the inputs do not lie in the box")
    texts = []
    for i, x in enumerate(inputs):
        shortest = repr(float(x))
        inside = case.admits(i, Fraction(shortest))
        texts.append(shortest if inside else format(Decimal(x), "f"))
    places = specification.places or range(len(texts))
    values = {"X": [texts[i] for i in places], "Y": [repr(float(y)) for y in outputs]}
    if specification.names.tensors:
        return "\n".join(_tensors(specification.names, values)) + "\n"
    pairs = [f"({kind}_{i} {text})" for kind in "XY" for i, text in enumerate(values[kind])]
    return "(" + "\n ".join(pairs) + ")\n"


def _tensors(names: Names, values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for tensor in names.tensors.values():
        yield f"{tensor.name} {tensor.type} [{','.join(map(str, tensor.shape))}]"
        yield from values[tensor.kind][tensor.first : tensor.first + tensor.size]


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
