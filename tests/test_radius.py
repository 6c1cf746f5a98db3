"""Radii: exact numbers, read and written as people do."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tightrope.errors import UserError
from tightrope.radius import format_radius, parse_radius

# --- radii ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value,expected",
    [
        ("8/255", Fraction(8, 255)),
        (" 8 / 255 ", Fraction(8, 255)),
        ("0.1", Fraction(1, 10)),
        (0.1, Fraction(1, 10)),  # the decimal as written, not the float behind it
        (0.3, Fraction(3, 10)),
        ("1e-3", Fraction(1, 1000)),
        (1e-5, Fraction(1, 100000)),
        (1, Fraction(1)),
        ("1", Fraction(1)),
        (Fraction(2, 255), Fraction(2, 255)),
    ],
)
def test_radii_are_exact(value, expected):
    assert parse_radius(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(0, "0", -0.1, "-1/255", "1.1", "256/255", Fraction(3, 2), "2\n"),
        *("8/0", "x", "", "1/2/3", "nan", math.nan, math.inf, "0.1.1", "8:255", None, True, [0.1]),
    ],
)
def test_radii_refused(value):
    with pytest.raises(UserError, match=r"^train_eps must ") as caught:
        parse_radius(value, "train_eps")
    assert "\n" not in str(caught.value)


@given(st.fractions(0, 1, max_denominator=10**6).filter(lambda f: f > 0))
def test_written_radii_read_back_exactly(radius):
    assert parse_radius(format_radius(radius)) == radius


DIGITS = st.from_regex(r"[0-9]{1,60}", fullmatch=True)
WRITTEN_RADII = st.one_of(
    st.fractions(0, 1),
    st.builds(Fraction, st.integers(1, 10**220), st.integers(1, 10**220)),
    st.floats(0, 1),
    st.builds("0.{}".format, DIGITS),
    st.builds("{}.{}e-{}".format, st.integers(0, 9), DIGITS, st.integers(0, 35)),
    st.builds("{}/{}".format, DIGITS, DIGITS),
    st.builds("0.{}e-{}/{}".format, DIGITS, st.integers(0, 35), DIGITS),
)


@given(WRITTEN_RADII)
@example("1.2345678901234567890123456789e-20")  # was taken, written and then refused
@example("0.1e-29")
@example(Fraction(10**199 - 1, 10**199))
@example(Fraction(10**200, 10**200 + 1))
def test_whatever_radius_is_taken_can_be_written_and_read(value):
    try:
        radius = parse_radius(value)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 200
        return
    text = format_radius(radius)
    assert parse_radius(text) == radius
    assert format_radius(parse_radius(text)) == text
    assert isinstance(value, Fraction) or parse_radius(str(value)) == radius


def test_radii_of_many_digits():
    digits = "1234567890123456789012345678901234567890"
    assert parse_radius(f"0.{digits}") == Fraction(int(digits), 10**40)
    assert parse_radius(f"0.{digits}e-9") == Fraction(int(digits), 10**49)
    with pytest.raises(UserError, match="at most 200 digits"):
        parse_radius(Fraction(1, 3) - Fraction(1, 7**300))
    for value in (10**5000, Fraction(1, 10**5000), Fraction(10**5000, 10**5000 - 1)):
        with pytest.raises(UserError, match="thousands of digits"):
            parse_radius(value)


@pytest.mark.parametrize(
    "text",
    ["8/255", "2/255", "1/255", "0.1", "0.3", "0.05", "1.0", "5/255", "1/7", "0.2", "85/255"],
)
def test_radii_are_written_as_people_do(text):
    assert format_radius(Fraction(text)) == text
