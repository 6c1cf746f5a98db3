"""Properties in floating point: boxes, offsets and counterexamples keep what was asked."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vnnlib_texts import UNIT, conjunction_of, only, parse

from tightrope.certification.vnnlib import (
    Case,
    Specification,
    floats,
    format_counterexample,
    parse_counterexample,
)
from tightrope.errors import UserError

# --- floats -------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.fractions(-2, 2),
    st.floats(-1e3, 1e3).map(Fraction),
    st.floats(-1, 1, width=32).map(Fraction),
    st.decimals(-1, 1, places=12).map(Fraction),
    st.builds(lambda f: f / 10**44, st.fractions(-2, 2)),  # below the smallest float32
)


@settings(max_examples=200)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), st.booleans())
def test_boxes_enclose_from_both_sides(bounds: list[tuple[Fraction, Fraction]], opened) -> None:
    lower, upper = (tuple(f(pair) for pair in bounds) for f in (min, max))
    strict = frozenset(range(len(lower))) if opened else frozenset()
    case = Case(lower, upper, (), strict, strict)
    for dtype, single in ((torch.float32, np.float32), (torch.float64, np.float64)):
        outer, inner = case.outer(dtype), case.inner(dtype)
        assert outer.lower.shape == outer.upper.shape == (1, len(lower))
        assert outer.lower.dtype == dtype
        fits = True
        for i in range(len(lower)):
            low, high = outer.lower[0, i].item(), outer.upper[0, i].item()
            # The next float inside would no longer enclose.
            assert (
                Fraction(low) <= lower[i] < Fraction(float(np.nextafter(single(low), single(9e9))))
            )
            assert (
                Fraction(high)
                >= upper[i]
                > Fraction(float(np.nextafter(single(high), single(-9e9))))
            )
            first = (
                low
                if case.admits(i, Fraction(low))
                else float(np.nextafter(single(low), single(9e9)))
            )
            fits &= case.admits(i, Fraction(first))
        assert (inner is not None) == fits
        if inner is not None:
            for corner in (inner.lower, inner.upper):
                assert case.contains(corner[0].tolist())
            for i in range(len(lower)):
                beyond = np.nextafter(single(inner.lower[0, i].item()), single(-9e9))
                assert not case.admits(i, Fraction(float(beyond)))
                beyond = np.nextafter(single(inner.upper[0, i].item()), single(9e9))
                assert not case.admits(i, Fraction(float(beyond)))


def test_no_float_fits() -> None:
    third = Fraction(1, 3)
    assert Case((third,), (third,), ()).inner() is None
    outer = Case((third,), (third,), ()).outer()
    assert Fraction(outer.lower.item()) < third < Fraction(outer.upper.item())
    half = Case((Fraction(1, 2),), (Fraction(1, 2),), ())
    assert half.inner().lower.item() == half.outer().upper.item() == 0.5


@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_offsets_are_rounded_down(offset: list[Fraction]) -> None:
    matrix = tuple((Fraction(1), Fraction(-1, 2)) for _ in offset)
    found = floats(conjunction_of(matrix, offset).rows, 2)
    assert found[0].tolist() == [[1.0, -0.5]] * len(offset)
    for value, exact in zip(found[1].tolist(), offset, strict=True):
        assert Fraction(value) <= exact < Fraction(math.nextafter(value, math.inf))


def test_exactness_of_the_matrix() -> None:
    assert conjunction_of([[Fraction(1, 2), Fraction(-3)]], [Fraction(1, 10)]).exact
    tenth = conjunction_of([[Fraction(1, 10), Fraction(-3)]], [Fraction(1, 10)])
    assert tenth.exact  # as 1 and -30
    assert [t.tolist() for t in floats(tenth.rows, 2)] == [[[1 / 16, -30 / 16]], [1 / 16]]
    long = conjunction_of([[Fraction(10**20 + 1), Fraction(10**20)]], [Fraction(0)])
    assert not long.exact


def test_holds_is_exact_and_finite() -> None:
    tenth = conjunction_of([[Fraction(1), Fraction(0)]], [Fraction(-1, 10)])  # Y_0 <= 0.1
    assert not tenth.holds([0.1, 0.0])  # the float lies above the decimal
    assert tenth.holds([math.nextafter(0.1, 0), 0.0])
    assert not tenth.holds([-math.inf, 0.0])
    assert not tenth.holds([-1.0, math.nan])
    strict = only(parse(UNIT + "(assert (< Y_0 Y_1))"))
    assert not strict.holds([1.0, 1.0]) and strict.holds([1.0, 1.5])


def test_cases_are_unsafe_at_exact_and_finite_outputs() -> None:
    tenth = conjunction_of([[Fraction(1), Fraction(0)]], [Fraction(-1, 10)])  # Y_0 <= 0.1
    case = Case((Fraction(0),), (Fraction(1),), (tenth,))
    assert not case.unsafe_at([0.1, 0.0])  # the float lies above the decimal
    assert case.unsafe_at([math.nextafter(0.1, 0), 0.0])
    for number in (-math.inf, math.inf, math.nan):
        assert not case.unsafe_at([number, 0.0])
        assert not case.unsafe_at([-1.0, number])


def test_strict_bounds_of_inputs() -> None:
    (case,) = parse("(assert (> X_0 0.5))(assert (< X_0 1))(assert (>= X_0 0.5))").cases
    assert (case.lower, case.upper) == ((Fraction(1, 2),), (Fraction(1),))
    assert case.outer().lower.item() == 0.5
    assert case.inner(torch.float64).lower.item() == math.nextafter(0.5, 1)
    assert not case.contains([0.5]) and case.contains([0.75]) and not case.contains([1.0])
    assert not case.contains([math.nan]) and not case.contains([0.75, 0.75])


# --- counterexamples ----------------------------------------------------------------------------


def text_of(case: Case, inputs: list[float], outputs: list[float]) -> str:
    specification = Specification((case,), len(case.lower), len(outputs))
    return format_counterexample(specification, case, inputs, outputs)


def test_text_of_a_counterexample() -> None:
    case = Case((Fraction(0),) * 2, (Fraction(1),) * 2, ())
    text = text_of(case, [0.1, 1.0], [-2.5e-7])
    assert text == "((X_0 0.1)\n (X_1 1.0)\n (Y_0 -2.5e-07))\n"
    assert parse_counterexample(text) == ((0.1, 1.0), (-2.5e-07,))
    assert parse_counterexample("sat\n" + text) == ((0.1, 1.0), (-2.5e-07,))


def test_digits_that_stay_inside() -> None:
    number = 0.1
    tenth = Fraction(number)  # a little above the decimal 0.1
    case = Case((tenth,), (tenth,), ())
    text = text_of(case, [0.1], [])
    assert f"(X_0 {Decimal(number)})" in text
    smallest = 5e-324
    least = text_of(Case((Fraction(smallest),) * 1, (Fraction(1),), ()), [smallest], [])
    assert parse_counterexample(least) == ((smallest,), ())
    assert parse_counterexample(text) == ((0.1,), ())
    with pytest.raises(ValueError, match="do not lie in the box"):
        text_of(Case((Fraction(1, 10),), (Fraction(1, 10),), ()), [0.1], [])


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), st.data())
def test_counterexamples_survive_the_text(bounds, data) -> None:
    lower, upper = (tuple(f(pair) for pair in bounds) for f in (min, max))
    case = Case(lower, upper, ())
    inner = case.inner()
    if inner is None:
        return
    x = [
        data.draw(st.sampled_from([a, b]))
        for a, b in zip(inner.lower[0].tolist(), inner.upper[0].tolist(), strict=True)
    ]
    y = data.draw(st.lists(st.floats(-1e30, 1e30), max_size=3))
    text = text_of(case, x, y)
    assert parse_counterexample(text) == (tuple(x), tuple(y))
    written = [word.strip("()") for word in text.split()][1 : 2 * len(x) : 2]
    assert all(case.admits(i, Fraction(word)) for i, word in enumerate(written))


@pytest.mark.parametrize(
    "text",
    ["", "()()", "((X_0))", "((X_0 a))", "((Z_0 1))", "((X_0 1) (X_0 1))", "((X_1 1))", "(X_0 1)"],
)
def test_damaged_counterexamples(text: str) -> None:
    with pytest.raises(UserError, match="counterexample"):
        parse_counterexample(text)


class TestThinBoxes:
    """Inputs between whose bounds no float lies have the nearest one."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_nearest_float_counts_and_the_hull_is_proved(self, dtype: torch.dtype) -> None:
        low, high = Fraction(1, 3), Fraction(1, 3) + Fraction(1, 10**20)
        case = Case((Fraction(0), low), (Fraction(1), high), ()).for_type(dtype)
        value = Fraction(torch.tensor(1 / 3, dtype=dtype).item())
        assert case.fixed == {1: value}
        assert (case.lower[1], case.upper[1]) == (min(low, value), max(high, value))
        inner, outer = case.inner(dtype), case.outer()
        assert inner.lower[0, 1] == inner.upper[0, 1] == float(value)
        assert Fraction(outer.lower[0, 1].item()) <= min(low, value)
        assert Fraction(outer.upper[0, 1].item()) >= max(high, value)
        assert case.contains([0.5, float(value)])
        other = torch.nextafter(
            torch.tensor(float(value), dtype=dtype), torch.tensor(2.0).to(dtype)
        )
        assert not case.contains([0.5, other.item()])
        assert not case.contains([1.5, float(value)])

    def test_strict_bounds_without_a_float_between(self) -> None:
        after = Fraction(math.nextafter(1.0, 2.0))
        case = Case((Fraction(1),), (after,), (), frozenset([0]), frozenset([0]))
        fixed = case.for_type(torch.float64)
        assert fixed.fixed[0] in (1, after) and not fixed.open_lower and not fixed.open_upper
        assert (fixed.lower, fixed.upper) == (case.lower, case.upper)

    @given(
        middle=st.floats(-1e30, 1e30, allow_subnormal=True),
        parts=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
        opened=st.tuples(st.booleans(), st.booleans()),
    )
    @settings(max_examples=300)
    def test_only_boxes_without_floats_are_changed(
        self, middle: float, parts: tuple[int, int], opened: tuple[bool, bool]
    ) -> None:
        """Widths around a step of float32: what has a float inside stays as it is."""
        step = Fraction(abs(middle)) / 2**26 + Fraction(1, 10**46)
        low = Fraction(middle) - step * parts[0] / 100
        high = Fraction(middle) + step * parts[1] / 100
        if low == high:
            opened = (False, False)
        ends = [frozenset([0]) if side else frozenset() for side in opened]
        case = Case((low,), (high,), (), *ends)
        fixed = case.for_type(torch.float32)
        assert (fixed is case) == (case.inner() is not None)
        inner = fixed.inner()
        assert inner is not None
        value = Fraction(inner.lower.item())
        assert fixed.lower[0] <= value <= fixed.upper[0]
        assert fixed.lower[0] <= low and fixed.upper[0] >= high
