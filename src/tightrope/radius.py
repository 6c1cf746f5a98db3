"""Perturbation radii, kept exact: `0.1` is one tenth and `8/255` is eight 255ths.

Certification needs the number the user wrote, not its nearest float.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tightrope.errors import UserError, shorten

Radius = str | float | Fraction

SMALLEST = Fraction(1, 10**30)  # below this, floats cannot tell the ball from its centre
LARGEST = 10**30
# A limit to the digits of numerator and denominator, so that an exponent of millions cannot keep
# the machine busy. It is one on values, and fractions are written out: what is taken can be
# written and read again.
DIGITS = 200
_NUMBER = re.compile(
    rf"[-+]?[0-9.]{{1,{DIGITS}}}(e[-+]?[0-9]{{1,3}})?(/[0-9]{{1,{DIGITS}}})?", re.IGNORECASE
)


def parse_radius(value: Radius, name: str = "eps", *, largest: int | None = 1) -> Fraction:
    """Read a radius in (0, largest] from `0.1`, `"0.1"` or `"8/255"`."""
    try:
        radius = value if isinstance(value, Fraction) else _read(value)
    except (ValueError, ZeroDivisionError):
        raise UserError(
            f"{name} must be a number such as 0.1 or 8/255, got {_shown(value)}"
        ) from None
    if largest is None and not SMALLEST < radius <= LARGEST:
        raise UserError(f"{name} must be a positive number below 1e30, got {_shown(value)}")
    if largest is not None and not SMALLEST < radius <= largest:
        raise UserError(
            f"{name} must lie in (0, {largest}], in units of [0, 1] pixels, got {_shown(value)}"
        )
    if radius.denominator >= 10**DIGITS:
        raise UserError(
            f"{name} must be a fraction of at most {DIGITS} digits, got {_shown(value)}"
        )
    return radius


def parse_radii(values: Radius | Sequence[Radius], *, largest: int | None = 1) -> list[Fraction]:
    """Read one radius, or several: a list, or text with commas."""
    given: Sequence[Radius] = values.split(",") if isinstance(values, str) else [values]  # type: ignore[list-item]
    if isinstance(values, list | tuple):
        given = values
    radii = [parse_radius(value, largest=largest) for value in given]
    if not radii or len(set(radii)) < len(radii):
        raise UserError(f"eps must be different radii, at least one, got {shorten(values)}")
    return radii


def _read(value: str | float) -> Fraction:
    # str(0.1) is "0.1": the decimal that was written, not the binary fraction behind it.
    text = str(value).replace(" ", "").strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError
    above, _, below = text.partition("/")
    return Fraction(above) / Fraction(below or 1)


def _shown(value: Radius) -> str:
    try:
        return shorten(value if isinstance(value, str) else str(value))
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"


def format_radius(radius: Fraction) -> str:
    """Write a radius the way people do: a short decimal if it is one, else a fraction."""
    decimal = repr(float(radius))
    if Fraction(decimal) == radius:
        return decimal
    if 255 % radius.denominator == 0:
        return f"{radius * 255}/255"  # pixel steps, not reduced
    return str(radius)
