"""VNN-LIB files are read exactly; floats approximate them from the right side."""

from __future__ import annotations

import csv
import gzip
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vnnlib_texts import UNIT, declarations, only, parse, rows

from tightrope.certification.vnnlib import (
    Conjunction,
    floats,
    parse_vnnlib,
    read_vnnlib,
)
from tightrope.errors import UserError

VNNCOMP = Path(__file__).parents[4] / "shared" / "data" / "vnncomp"


# --- reading ------------------------------------------------------------------------------------


def test_bounds_are_exact_decimals() -> None:
    text = "(assert (>= X_0 -0.1))(assert (<= X_0 1.25e-1)) (assert (<= Y_0 Y_1))"
    specification = parse(text)
    (case,) = specification.cases
    assert (specification.inputs, specification.outputs) == (1, 2)
    assert case.lower == (Fraction(-1, 10),) and case.upper == (Fraction(1, 8),)
    assert rows(only(specification)) == [([1, -1], 0)]


@pytest.mark.parametrize(
    ("constraint", "row", "offset"),
    [
        ("(<= Y_0 1.5)", [1, 0], Fraction(-3, 2)),
        ("(>= Y_0 1.5)", [-1, 0], Fraction(3, 2)),
        ("(<= 1.5 Y_1)", [0, -1], Fraction(3, 2)),
        ("(>= Y_0 Y_1)", [-1, 1], 0),
        ("(<= (+ Y_0 (* 2 Y_1) -3) (- Y_1))", [1, 3], -3),
        ("(>= (- Y_0 Y_1 0.5) (* -0.1 (+ Y_0 1)))", [Fraction(-11, 10), 1], Fraction(2, 5)),
        ("(<= (* Y_0 0.5) (/ Y_1 3))", [Fraction(1, 2), Fraction(-1, 3)], 0),
        ("(<= (- (- 2) Y_0) .5e1)", [-1, 0], -7),
        ("(<= (* 2 3 Y_1) +1.)", [0, 6], -1),
    ],
)
def test_linear_terms(constraint: str, row: list, offset: Fraction) -> None:
    assert rows(only(parse(f"{UNIT}(assert {constraint})"))) == [(row, offset)]


def test_inputs_with_factors() -> None:
    text = "(assert (<= (* -2 X_0) 1)) (assert (<= (+ (* 3 X_0) 1) (+ X_0 2)))"
    (case,) = parse(text + "(assert (<= Y_0 0))").cases
    assert case.lower == (Fraction(-1, 2),) and case.upper == (Fraction(1, 2),)
    (case,) = parse("(assert (<= (* -3 X_0) 1)) (assert (<= (* 7 X_0) 0.1))").cases
    assert case.lower == (Fraction(-1, 3),) and case.upper == (Fraction(1, 70),)


def test_the_tightest_bounds_count() -> None:
    text = "(assert (and (>= X_0 0) (>= X_0 0.25) (<= X_0 2) (<= X_0 1) (<= X_0 3)))"
    (case,) = parse(text).cases
    assert case.lower == (Fraction(1, 4),) and case.upper == (1,)


def test_without_constraints_on_outputs_everything_is_unsafe() -> None:
    conjunction = only(parse(UNIT))
    assert conjunction == Conjunction((), 2)
    assert conjunction.holds([1.0, 2.0]) and conjunction.exact
    matrix, offset = floats(conjunction.rows, 2)
    assert matrix.shape == (0, 2) and offset.shape == (0,)
    assert matrix.dtype == offset.dtype == torch.float64


def test_disjunctions_with_one_box_are_one_case() -> None:
    text = "(assert (or (and (<= Y_0 0)) (<= Y_1 0) (and (<= Y_0 1) (<= Y_1 1)) (<= Y_1 0)))"
    (case,) = parse(UNIT + text).cases
    assert [rows(c) for c in case.unsafe] == [
        [([1, 0], 0)],
        [([0, 1], 0)],
        [([1, 0], -1), ([0, 1], -1)],
    ]


def test_disjunctions_of_boxes() -> None:
    text = """
    (assert (or
        (and (>= X_0 0) (<= X_0 1) (<= Y_0 0))
        (and (<= X_0 3) (>= X_0 2) (<= Y_1 0))
        (and (>= X_0 0.0) (<= X_0 1.0) (<= Y_1 5))))
    (assert (<= Y_0 7))"""
    cases = parse(text).cases
    assert [(c.lower[0], c.upper[0], len(c.unsafe)) for c in cases] == [(0, 1, 2), (2, 3, 1)]
    assert rows(cases[1].unsafe[0]) == [([1, 0], -7), ([0, 1], 0)]


def test_disjunctions_inside_a_conjunction_multiply_out() -> None:
    inner = "(or (<= Y_0 1) (<= Y_0 2)) (or (<= Y_1 3) (<= Y_1 4))"
    (case,) = parse(f"{UNIT}(assert (or (and {inner}) (<= Y_0 5)))").cases
    assert [tuple(row.constant for row in c.rows) for c in case.unsafe] == [
        (-1, -3),
        (-1, -4),
        (-2, -3),
        (-2, -4),
        (-5,),
    ]


def test_several_disjunctions_multiply_out() -> None:
    text = "(assert (or (<= Y_0 0) (<= Y_0 1)))"
    text += "(assert (or (<= Y_1 0) (and (<= Y_1 1) (or (<= Y_0 2) (<= Y_0 3)))))"
    (case,) = parse(UNIT + text).cases
    assert len(case.unsafe) == 2 * 3
    assert rows(case.unsafe[5]) == [([1, 0], -1), ([0, 1], -1), ([1, 0], -3)]


def test_boxes_that_exclude_each_other_are_left_out() -> None:
    side = "(assert (or (and (>= X_0 0) (<= X_0 1)) (and (>= X_0 2) (<= X_0 3))))"
    assert [c.lower[0] for c in parse(side + side).cases] == [0, 2]


def test_constant_constraints() -> None:
    (case,) = parse(UNIT + "(assert (or (<= 1 0) (and (<= 0 1) (<= Y_0 Y_0))))").cases
    assert case.unsafe == (Conjunction((), 2),)
    with pytest.raises(UserError, match="contradict each other"):
        parse(UNIT + "(assert (< Y_0 Y_0))")


def test_comments_declared_functions_and_solver_commands() -> None:
    text = "; (assert nonsense\n(set-logic QF_LRA)\n(declare-fun X_0 () Real) ; )\n"
    text += "(declare-const Y_0 Real)(assert (<= X_0 1))(assert(>= X_0 0))(check-sat)"
    assert parse_vnnlib(text).inputs == 1


def test_many_simple_asserts() -> None:
    bounds = "".join(
        f"(assert (<= X_{i} 1))(assert (>= X_{i} 0))(assert (<= Y_0 {i}))\n" for i in range(3500)
    )
    assert len(only(parse(bounds, inputs=3500)).rows) == 3500


# --- refusals -----------------------------------------------------------------------------------

REFUSED = {
    "unbounded": ("(assert (<= X_0 1))", "X_0 has no lower bound"),
    "half": ("(assert (>= X_0 1))", "X_0 has no upper bound"),
    "empty": (
        "(assert (>= X_0 1))\n(assert (<= X_0 0))",
        "X_0 has no possible value: its lower bound in line 4 lies above its upper bound in line 5",
    ),
    "open": ("(assert (> X_0 1))(assert (<= X_0 1))", "X_0 has no possible value"),
    "unclosed": ("\n(assert (<= X_0 1)", "line 5: the bracket that opens here is never closed"),
    "closing": ("\n)", "line 5: a closing bracket"),
    "word": ("assert", "line 4: expected '('"),
    "command": ("(check-sat-assuming)", "line 4: expected declare-const or assert"),
    "version": ("(vnnlib-version 2)", "line 4: expected (vnnlib-version <2.0>)"),
    "infix": ("(assert (X_0 <= 1))", "line 4: expected and, or, <=, >=, <, >, == or !=, got"),
    "three": ("(assert (<= 0 X_0 1))", "line 4: expected and, or"),
    "bare": ("(assert X_0)", "line 4: expected declare-const or assert"),
    "empty and": ("(assert (and))", "line 4: expected and, or"),
    "product": ("(assert (<= (* Y_0 Y_1) 1))", "line 4: a product of variables is not linear"),
    "division": ("(assert (<= (/ 1 Y_0) 1))", "line 4: only a division by constants"),
    "by zero": ("(assert (<= (/ Y_0 0) 1))", "line 4: only a division by constants"),
    "function": ("(assert (<= (max Y_0 Y_1) 1))", "line 4: expected a linear term"),
    "undeclared": ("(assert (<= Y_2 1))", "line 4: Y_2 is not declared"),
    "name": ("(assert (<= Z_0 1))", "line 4: expected a number or a variable, got 'Z_0'"),
    "nan": ("(assert (<= X_0 nan))", "line 4: expected a number or a variable, got 'nan'"),
    "fraction": ("(assert (<= X_0 1/3))", "line 4: expected a number"),
    "range": ("(assert (<= X_0 1e40))", "line 4: a number above"),
    "huge": ("(assert (<= X_0 1e999999999))", "line 4: expected a number"),
    "twice": ("(declare-const X_0 Real)", "line 4: X_0 is declared twice"),
    "gap": ("(declare-const X_2 Real)", "X_1 is not declared, though X_2 is"),
    "type": ("(declare-const X_1 Int)", "line 4: expected (declare-const X_0 Real)"),
    "leading zero": ("(declare-const X_01 Real)", "line 4: expected (declare-const"),
    "formula": ("(assert (or X_0 (<= X_0 1)))", "line 4: expected formulas in brackets"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(UserError) as caught:
        parse(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("inputs", "outputs", "name"), [(0, 1, "X_0"), (1, 0, "Y_0")])
def test_nothing_declared(inputs: int, outputs: int, name: str) -> None:
    with pytest.raises(UserError, match=f"no variable {name} is declared"):
        parse("", inputs, outputs)


def test_too_many_alternatives() -> None:
    both = "(or (<= Y_0 0) (<= Y_1 0))"
    with pytest.raises(UserError, match="exceeds the limit of 100000 alternatives"):
        parse(UNIT + f"(assert {both})" * 2000)
    nested = "(and " + both * 2000 + ")"
    with pytest.raises(UserError, match="exceeds the limit of 100000 alternatives"):
        parse(UNIT + f"(assert (or {nested} (<= Y_0 0)))")


def test_deep_nesting() -> None:
    with pytest.raises(UserError, match="line 4: more than 200 brackets"):
        parse("(assert (<= " + "(+ " * 100_000 + "1")
    assert only(parse(UNIT + "(assert (<= " + "(- " * 190 + "Y_0" + ")" * 190 + " 0))")).holds(
        [-1.0, 0.0]
    )


def test_files(tmp_path: Path) -> None:
    text = declarations() + UNIT
    plain, packed = tmp_path / "a.vnnlib", tmp_path / "a.vnnlib.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_vnnlib(plain) == read_vnnlib(packed)
    packed.write_bytes(packed.read_bytes()[:-12])
    for path, message in (
        (tmp_path / "none", "cannot read"),
        (tmp_path, "cannot read"),
        (packed, "cannot read"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read_vnnlib(path)
        assert str(path) in str(caught.value)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        read_vnnlib(plain)
    plain.write_text(text + "(nonsense)")
    with pytest.raises(UserError, match=r"a\.vnnlib: line 5: expected declare-const"):
        read_vnnlib(plain)


PIECES = st.sampled_from(
    [
        *("(", ")", "(assert ", "(and ", "(or ", "(<= ", "(>= ", "(+ ", "(* ", "(- ", "(/ "),
        *("X_0 ", "Y_0 ", "Y_1 ", "X_1 ", "1.5 ", "-2e3 ", "0 ", "; ", "\n", "Real ", "declare "),
        *(UNIT, "(assert (<= Y_0 Y_1))", "(declare-const X_1 Real)"),
    ]
)


@given(st.lists(PIECES, max_size=25))
def test_any_text_is_read_or_refused(pieces: list[str]) -> None:
    try:
        specification = parse("".join(pieces))
    except UserError as error:
        assert "\n" not in str(error)
    else:
        for case in specification.cases:
            assert all(a <= b for a, b in zip(case.lower, case.upper, strict=True))
            assert case.unsafe


# --- meaning: the multiplied-out set is the set of the formulas ---------------------------------

ATOMS = st.builds(
    lambda kind, a, b: f"({kind} {a} {b})",
    st.sampled_from(["<=", ">=", "<", ">"]),
    st.sampled_from(["X_0", "Y_0", "Y_1", "(+ Y_0 Y_1)", "(* 2 Y_0)"]),
    st.integers(-2, 2),
)
FORMULAS = st.recursive(
    ATOMS,
    lambda inner: st.builds(
        lambda kind, parts: f"({kind} {' '.join(parts)})",
        st.sampled_from(["and", "or"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


def truth(text: str, point: dict[str, float]) -> bool:
    """Evaluate a formula by turning it into Python."""
    words = text.replace("(", " ( ").replace(")", " ) ").split()

    def value(position: int) -> tuple[object, int]:
        if words[position] != "(":
            word = words[position]
            return point[word] if word in point else int(word), position + 1
        kind, parts, position = words[position + 1], [], position + 2
        while words[position] != ")":
            part, position = value(position)
            parts.append(part)
        table = {
            "and": all,
            "or": any,
            "+": sum,
            "*": math.prod,
            "<=": lambda p: p[0] <= p[1],
            ">=": lambda p: p[0] >= p[1],
            "<": lambda p: p[0] < p[1],
            ">": lambda p: p[0] > p[1],
        }
        return table[kind](parts), position + 1

    return bool(value(0)[0])


@settings(max_examples=150)
@given(st.lists(FORMULAS, min_size=1, max_size=3))
def test_the_cases_are_the_set_of_the_file(formulas: list[str]) -> None:
    around = "(assert (<= X_0 2))(assert (>= X_0 -2))"
    try:
        cases = parse(around + "".join(f"(assert {f})" for f in formulas)).cases
    except UserError as error:
        if "no possible value" in str(error):
            return  # an alternative that is empty is refused, whatever the others say
        assert "contradict" in str(error)
        cases = ()
    for x in (-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0):
        for y in ((-1.0, 0.0), (0.0, 0.0), (1.0, -2.0), (2.0, 0.5), (-2.0, 2.0)):
            found = any(c.contains([x]) and any(u.holds(y) for u in c.unsafe) for c in cases)
            point = {"X_0": x, "Y_0": y[0], "Y_1": y[1]}
            assert found == (abs(x) <= 2 and all(truth(f, point) for f in formulas))


# --- the competition's files ---------------------------------------------------------------------


def vnncomp_properties() -> list[str]:
    if not VNNCOMP.exists():
        return []
    with (VNNCOMP / "instances.csv").open() as file:
        return sorted({row["vnnlib"] for row in csv.DictReader(file)})


@pytest.mark.skipif(not VNNCOMP.exists(), reason="no competition files here")
@pytest.mark.parametrize("name", vnncomp_properties())
def test_properties_of_the_competition(name: str) -> None:
    specification = read_vnnlib(VNNCOMP / name)
    (case,) = specification.cases
    inner, outer = case.inner(), case.outer()
    assert inner is not None and case.contains(inner.center[0].tolist())
    assert bool((outer.lower <= inner.lower).all() and (inner.upper <= outer.upper).all())
    assert all(conjunction.exact for conjunction in case.unsafe)
    if not name.startswith("test"):
        assert (specification.inputs, specification.outputs) in ((784, 10), (3072, 10))
        assert [len(c.rows) for c in case.unsafe] == [1] * 9
        # One label against the nine others: `Y_label - Y_other <= 0`.
        factors = [dict(row.factors) for c in case.unsafe for row in c.rows]
        assert all(sorted(found.values()) == [-1, 1] for found in factors)
        assert len({i for found in factors for i, factor in found.items() if factor == 1}) == 1
