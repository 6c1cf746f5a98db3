"""Relations between inputs, and of inputs with outputs; equalities; version 2 of VNN-LIB."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from vnnlib_texts import declarations

from tightrope.certification.vnnlib import Specification, floats, parse_vnnlib
from tightrope.errors import UserError

GRID = [Fraction(i, 2) for i in range(-2, 3)]  # of values of each variable
BOX = "".join(f"(assert (and (>= X_{i} -1) (<= X_{i} 1)))" for i in range(3))
NETWORK = """
(vnnlib-version <2.0>)
(declare-network N
    (declare-input X float32 [1, 3])
    (declare-output Y float32 [2])
)
"""


def counterexample(specification: Specification, x: list[Fraction], y: list[Fraction]) -> bool:
    """Return whether exact inputs and outputs are in the set that a specification describes."""
    places = specification.places
    free = list(x)
    if places is not None:
        free = [x[places.index(i)] for i in range(max(places) + 1)]
        if any(x[i] != free[place] for i, place in enumerate(places)):
            return False
    values = [*y, *reversed(free)]
    return any(
        all(case.admits(i, value) for i, value in enumerate(free))
        and any(conjunction.holds_exactly(values) for conjunction in case.unsafe)
        for case in specification.cases
    )


class RandomFormula:
    """A formula as text and as a function of the values of the variables."""

    SIGNS = ("<=", ">=", "<", ">", "==", "!=")

    def __init__(self, random: np.random.Generator, *, indexed: bool) -> None:
        self.random, self.indexed = random, indexed

    def formula(self, depth: int):
        kind = self.random.integers(4) if depth else 0
        if kind < 2:
            return self.comparison()
        parts = [self.formula(depth - 1) for _ in range(self.random.integers(2, 4))]
        text = " ".join(part[0] for part in parts)
        if kind == 2:
            return f"(and {text})", lambda v: all(part[1](v) for part in parts)
        return f"(or {text})", lambda v: any(part[1](v) for part in parts)

    def comparison(self):
        sign = self.SIGNS[self.random.integers(6)]
        (left, f), (right, g) = self.term(), self.term()
        infix = self.indexed and self.random.integers(2)
        text = f"({left} {sign} {right})" if infix else f"({sign} {left} {right})"
        compare = {
            "<=": Fraction.__le__,
            ">=": Fraction.__ge__,
            "<": Fraction.__lt__,
            ">": Fraction.__gt__,
            "==": Fraction.__eq__,
            "!=": Fraction.__ne__,
        }[sign]
        return text, lambda v: compare(f(v), g(v))

    def term(self):
        kind = self.random.integers(5)
        if kind == 0:
            value = GRID[self.random.integers(5)]
            return str(float(value)), lambda v: value
        if kind < 4:
            number = int(self.random.integers(5))
            return self.name(number), lambda v: v[number]
        (left, f), (right, g) = self.term(), self.term()
        if self.random.integers(2):
            return f"(+ {left} {right})", lambda v: f(v) + g(v)
        return f"(- {left} (* 0.5 {right}))", lambda v: f(v) - g(v) / 2

    def name(self, number: int) -> str:
        if self.indexed:
            return f"X[0,{number}]" if number < 3 else f"Y[{number - 3}]"
        return f"X_{number}" if number < 3 else f"Y_{number - 3}"


@pytest.mark.parametrize("indexed", [False, True])
def test_formulas_mean_what_they_say(indexed: bool) -> None:
    """Random formulas, looked at for all values of a grid (on which equalities hold, too)."""
    random = np.random.default_rng(5)
    head = NETWORK + BOX.replace("X_", "X[0,").replace(" -1)", "] -1)").replace(" 1)", "] 1)")
    head = head if indexed else declarations(3, 2) + BOX
    points = [list(p) for p in itertools.product(GRID, repeat=5)]
    told = 0
    for _ in range(150):
        maker = RandomFormula(random, indexed=indexed)
        parts = [maker.formula(2) for _ in range(random.integers(1, 4))]
        text = head + "".join(f"(assert {part[0]})" for part in parts)
        some = [points[i] for i in random.choice(len(points), 400, replace=False)]
        expected = [all(part[1](p) for part in parts) for p in some]
        try:
            specification = parse_vnnlib(text)
        except UserError as error:  # bounds that exclude each other
            assert "possible value" in str(error) or "contradict" in str(error)
            assert not any(expected)
            continue
        told += sum(expected)
        assert [counterexample(specification, p[:3], p[3:]) for p in some] == expected
    assert told > 1000


def test_a_tie_makes_two_inputs_one() -> None:
    text = declarations(3, 1) + BOX + "(assert (= X_0 X_2))(assert (<= (+ X_0 X_1 X_2 Y_0) 0))"
    specification = parse_vnnlib(text)
    assert specification.inputs == 3 and specification.places == (0, 1, 0)
    (case,) = specification.cases
    assert len(case.lower) == 2
    ((row,),) = (conjunction.rows for conjunction in case.unsafe)
    assert dict(row.factors) == {0: 1, -1: 2, -2: 1}
    matrix, _ = floats([row], 1, 2)
    assert matrix.tolist() == [[1.0, 2.0, 1.0]]


@pytest.mark.parametrize(
    ("equality", "first", "last"),
    [
        ("(= X_0 (+ X_2 0.5))", 1.0, 0.5),
        ("(= X_0 (* 2 X_2))", 1.0, 0.5),
        ("(= (+ X_0 X_2) 0)", 0.5, -0.5),
    ],
)
def test_equalities_that_are_no_ties(equality: str, first: float, last: float) -> None:
    text = declarations(3, 1) + BOX + f"(assert {equality})(assert (<= Y_0 0))"
    specification = parse_vnnlib(text)
    assert specification.places is None
    half, zero = Fraction(1, 2), Fraction(0)
    assert counterexample(specification, [Fraction(first), zero, Fraction(last)], [zero])
    assert not counterexample(specification, [half, zero, half], [zero])


def test_relations_with_inputs_that_are_not_bounded_yet() -> None:
    """X_1 is bounded by the second relation only: the first one says nothing of X_0 before."""
    text = declarations(2, 1) + "(assert (>= X_0 0))(assert (<= X_0 X_1))"
    text += "(assert (<= (+ X_0 X_1) 3))(assert (<= Y_0 0))"
    (case,) = parse_vnnlib(text).cases
    assert (case.lower, case.upper) == ((0, 0), (3, 3))


def test_relations_bound_inputs() -> None:
    """An input between others needs no bounds of its own; strict ones stay strict."""
    text = declarations(2, 1) + "(assert (and (>= X_0 0.25) (<= X_0 0.75)))"
    text += "(assert (< X_1 X_0))(assert (<= (- X_0 X_1) 1))(assert (<= Y_0 0))"
    (case,) = parse_vnnlib(text).cases
    assert (case.lower[1], case.upper[1]) == (Fraction(-3, 4), Fraction(3, 4))
    assert case.open_upper == {1} and not case.open_lower
    with pytest.raises(UserError, match="X_1 has no lower bound"):
        parse_vnnlib(text.replace("(<= (- X_0 X_1) 1)", "(<= (- X_1 X_0) 1)"))


def test_shapes_and_several_networks() -> None:
    text = """(vnnlib-version <2.0>)
    (declare-network f (declare-input A real [2,2]) (declare-output B Real []))
    (declare-network g (equal-to f) (declare-input C real [2, 2]) (declare-output D real [ ]))
    """
    for name in "AC":
        text += "".join(
            f"(assert (and (>= {name}[{i},{j}] 0) (<= {name} [{i} , {j}] 1)))"
            for i in range(2)
            for j in range(2)
        )
    text += "(assert (== A[0,1] C[1,0]))(assert ((+ B 1) <= D))"
    specification = parse_vnnlib(text)
    assert (specification.inputs, specification.outputs) == (8, 2)
    assert specification.places == (0, 1, 2, 3, 4, 5, 1, 6)
    assert [n.same_as for n in specification.names.networks] == [None, "f"]
    assert [n.span("X") for n in specification.names.networks] == [slice(0, 4), slice(4, 8)]
    ((conjunction,),) = (case.unsafe for case in specification.cases)
    assert conjunction.holds([0.0, 1.0]) and not conjunction.holds([0.5, 1.0])


REFUSED = {
    "(vnnlib-version <3.0>)": "expected (vnnlib-version <2.0>)",
    "(declare-network f (declare-input X real [2]))": "expected (declare-network",
    "(declare-network 5 (declare-input X real [2]))": "expected (declare-network",
    "(declare-network f (declare-input X int8 [2]) (declare-output Y real [1]))": "of type 'int8'",
    "(declare-network f (declare-input X real 2) (declare-output Y real [1]))": "expected (decl",
    "(declare-network f (declare-input X real [0]) (declare-output Y real [1]))": "expected (decl",
    "(declare-network f (declare-input X real [2]) (declare-output X real [1]))": "declared twice",
    "(declare-network f (declare-input X real [9999,9999,9]) (declare-output Y real [1]))": "limit",
    '(declare-network f (declare-input X real [2]) (declare-hidden H real [1] "n"))': "hidden",
    "(declare-network f (equal-to g) (declare-input X real [2]))": "expected (equal-to NETWORK)",
    NETWORK + "(declare-const X_0 Real)": "a variable beside declared networks",
    NETWORK + "(assert (<= X[0,3] 1))": "X[0,3] is not declared",
    NETWORK + "(assert (<= X[0] 1))": "X[0] is not declared",
    NETWORK + "(assert (<= X 1))": "expected a number or a variable",
    NETWORK + "(assert (<= X[0,-1] 1))": "expected a number or a variable",
    NETWORK + "(assert (X[0,1] 1))": "expected and, or",
    NETWORK + "(assert (X[0,1] <= 1 2))": "expected and, or",
    NETWORK + "(assert (<= X[0,1]] 1))": "expected",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_vnnlib(text)
    assert REFUSED[text] in str(caught.value)
