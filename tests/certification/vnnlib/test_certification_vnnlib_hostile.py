"""VNN-LIB made to do harm: numbers without end, bombs, files that never stop multiplying."""

from __future__ import annotations

import gzip
import os
from fractions import Fraction
from pathlib import Path

import pytest
from patience import memory, within
from vnnlib_texts import UNIT, declarations, only, parse, rows

from tightrope.certification.vnnlib import floats, parse_vnnlib, read_vnnlib
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.errors import UserError
from tightrope.limits import VNNLIB_BYTES

LIMIT = 700  # megabytes; what is refused here took gigabytes


def refused(text: str, message: str, **declared: int) -> None:
    with pytest.raises(UserError, match=message) as caught, within(100), memory(LIMIT):
        parse(text, **declared)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


# --- numbers ------------------------------------------------------------------------------------


def test_a_bound_beyond_all_floats() -> None:
    refused(
        "(assert (>= X_0 0))\n(assert (<= (* 1e-300 X_0) 1e30))",
        "line 5: a bound of X_0 above 8e37",
    )
    refused("(assert (>= (* 1e-200 X_0) -1e-100))(assert (<= X_0 0))", "a bound of X_0 above 8e37")


def test_a_bound_beyond_all_floats_beside_a_tighter_one() -> None:
    """It says nothing then, and is legal."""
    text = UNIT + "(assert (<= (* 1e-300 X_0) 1e30))(assert (>= (* 1e-300 X_0) -1e30))"
    (case,) = parse(text).cases
    assert (case.lower, case.upper) == ((0,), (1,))


@pytest.mark.parametrize("sign", [1, -1])
def test_factors_far_from_all_floats(sign: int) -> None:
    conjunction = only(parse(f"{UNIT}(assert (<= (* 1e-300 Y_0) {sign}e30))"))
    assert rows(conjunction) == [([Fraction(1, 10**300), 0], -sign * Fraction(10**30))]
    matrix, offset = floats(conjunction.rows, 2)
    assert conjunction.holds([1e300, 0.0]) == (sign > 0)
    assert bool((matrix.isfinite()).all() and (offset.isfinite()).all())
    # A bound that is beyond all floats from below is brought near; from above, it proves nothing.
    assert conjunction.exact == (sign < 0)
    if conjunction.exact:
        assert matrix.tolist() == [[1.0, 0.0]] and 1e300 < offset.item() < Fraction(10**330)


@pytest.mark.parametrize("operation", ["* 1e999", "* 1e-999", "/ 1e999", "/ 1e-999"])
@pytest.mark.parametrize("nested", [False, True])
def test_products_without_end(operation: str, nested: bool) -> None:
    head, number = operation.split()
    if nested:
        term = f"({head} " * 190 + "Y_0" + f" {number})" * 190
    else:
        term = f"({head} Y_0" + f" {number}" * 100_000 + ")"
    refused(f"{UNIT}(assert (<= {term} 0))", "exceeds the limit of 3000 digits|above 8e37")


def test_sums_whose_denominators_multiply() -> None:
    term = "(+ " + " ".join(f"(/ 1 {n})" for n in range(10_001, 60_000, 2)) + ")"
    refused(f"{UNIT}(assert (<= {term} Y_0))", "exceeds the limit of 3000 digits")


def test_long_sums_take_linear_time() -> None:
    term = "(+ " + " ".join(f"{n}e-99 Y_0" for n in range(50_000)) + ")"
    with within(100):
        ((row, offset),) = rows(only(parse(f"{UNIT}(assert (<= {term} 0))")))
    assert row == [50_000, 0]
    assert offset == sum(Fraction(n) for n in range(50_000)) / 10**99


@pytest.mark.parametrize(
    "number",
    ["9" * 1000, "0." + "9" * 2000, "1e1000", "1" * 10**6, "١", "1_000", "0x10", "1e", "."],
)
def test_words_that_are_no_numbers(number: str) -> None:
    refused(f"(assert (<= X_0 {number}))", "line 4: expected a number or a variable")


# --- sizes --------------------------------------------------------------------------------------

LONG = 1 << 22
HUGE = {
    "opening": ("(" * LONG, "expected declare-const"),
    "opening formulas": ("(assert (and " + "(and " * LONG, "more than 200 brackets"),
    "empty": ("()" * LONG, "expected declare-const"),
    "empty inside": ("(assert (and " + "()" * LONG + "))", "expected and, or"),
    "words": ("(assert (" + "ab " * LONG + "))", "expected and, or"),
    "formulas of words": ("(assert (and " + "ab " * LONG + "))", "expected formulas in brackets"),
    "declaration": ("(declare-const " + "ab " * LONG + ")", "expected .declare-const"),
    "unknown": ("(assert (xor " + "(<= Y_0 0)" * LONG + "))", "expected and, or"),
    "unclosed": (UNIT + "(assert (and " + "(<= Y_0 0)" * 10**5, "line 5: the bracket that opens"),
    "comparison": ("(assert (<= " + "1 " * LONG + "))", "expected and, or"),
    "alternatives": ("(assert (or " + "(<= Y_0 0)" * LONG + "))", "limit of 100000 alternatives"),
    "products": (
        UNIT + "(assert (or (<= Y_0 0) (<= Y_1 0)))" * 16 + "(assert (<= Y_0 1))" * 1000,
        "limit of 2000000 inequalities",
    ),
    "nested products": (
        UNIT
        + "(assert (or (<= Y_0 0) (and "
        + "(or (<= Y_0 0) (<= Y_1 0))" * 16
        + "(<= Y_0 1)" * 1000
        + ")))",
        "limit of 2000000 inequalities",
    ),
    "powers": (
        UNIT + "(assert (or (<= Y_0 0) (<= Y_1 0)))" * 10**4,
        "limit of 100000 alternatives",
    ),
}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_texts(kind: str) -> None:
    text, message = HUGE[kind]
    refused(text, message)


def test_many_boxes_of_many_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTROPE_LIMIT_VNNLIB_BOUNDS", "100_000")
    names = [f"X_{i}" for i in range(1000)]
    bounds = "".join(f"(assert (<= {name} 1))(assert (>= {name} 0))" for name in names)
    choices = "".join(f"(<= X_0 0.{i})" for i in range(1, 200))
    text = f"{bounds}(assert (or {choices}))"
    refused(text, "the list of input boxes exceeds the limit of 100000 bounds", inputs=1000)


def test_many_outputs() -> None:
    """Half a megabyte; rows that are written out would be a hundred million fractions."""
    count = 10_000
    text = "".join(f"(assert (<= Y_{i} 0))" for i in range(count))
    with within(100), memory(LIMIT):
        conjunction = only(parse(UNIT + text, outputs=count))
    assert len(conjunction.rows) == conjunction.outputs == count
    assert conjunction.holds([0.0] * count) and not conjunction.holds([0.0] * (count - 1) + [1e-9])


BOMBS = {
    "spaces": b" " * (1 << 20),
    "brackets": b"(" * (1 << 20),
    "comments": b";" * (1 << 20),
    "alternatives": b"(<= Y_0 0)" * 100_000,
    "zeros": bytes(1 << 20),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VNNLIB_BYTES.variable, str(1 << 26))
    path = tmp_path / "bomb.vnnlib.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(declarations().encode())
        for _ in range(100):
            file.write(BOMBS[kind])
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="exceeds the limit") as caught, within(100), memory(LIMIT):
        read_vnnlib(path)
    assert VNNLIB_BYTES.variable in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "pipe.vnnlib"
    os.mkfifo(path)
    with pytest.raises(UserError, match="it is a pipe, not a file"), within(10):
        read_vnnlib(path)
    with pytest.raises(UserError, match="not the name of a file"):
        read_vnnlib(tmp_path / "a\0b.vnnlib")


# --- time ---------------------------------------------------------------------------------------

SLOW = {
    "words": "(set-info " + "ab " * 10**6 + ")",
    "bounds": "(assert (and " + "(<= Y_0 0)" * 10**5 + "))",
    "terms": f"{UNIT}(assert (<= " + "(* 2 " * 150 + "(+ " + "Y_0 " * 1000 + ")" * 151 + " 0))",
    "products": UNIT + "(assert (or (<= Y_0 0) (<= Y_1 0)))" * 16,
}


@pytest.mark.parametrize("kind", SLOW)
def test_reading_ends_at_the_deadline(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the clock are counted, not measured: the machine may be slow."""
    text = declarations() + SLOW[kind]
    looks = 0

    def check(deadline: Deadline) -> None:
        nonlocal looks
        looks += 1
        if looks > 20:
            raise OutOfTimeError

    monkeypatch.setattr(Deadline, "check", check)
    with pytest.raises(OutOfTimeError):
        parse_vnnlib(text, Deadline())


def test_a_deadline_that_has_passed() -> None:
    with pytest.raises(OutOfTimeError):
        parse_vnnlib(declarations() + UNIT, Deadline.after(-1))
