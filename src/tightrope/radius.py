"""Perturbation radii, kept exact: `0.1` is one tenth and `8/255` is eight 255ths.

Certification needs the number the user wrote, not its nearest float.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tightrope.errors import UserError, shorten

Radius = str | float | Fraction

SMALLEST = Fraction(1, 10**30)  # below this, floats cannot tell the ball from its centre
# Few digits, so that an exponent of millions cannot keep the machine busy.
_NUMBER = re.compile(r"[-+]?[0-9.]{1,40}(e[-+]?[0-9]{1,3})?(/[0-9]{1,40})?", re.IGNORECASE)


def parse_radius(value: Radius, name: str = "eps") -> Fraction:
    """Read a radius in (0, 1] from `0.1`, `"0.1"` or `"8/255"`."""
    # str(0.1) is "0.1": the decimal that was written, not the binary fraction behind it.
    text = str(value).replace(" ", "").strip()
    try:
        if not isinstance(value, Fraction) and not _NUMBER.fullmatch(text):
            raise ValueError
        if isinstance(value, Fraction):
            radius = value
        else:
            above, _, below = text.partition("/")
            radius = Fraction(above) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):
        raise UserError(
            f"{name} must be a number such as 0.1 or 8/255, got {shorten(value)}"
        ) from None
    if not SMALLEST < radius <= 1:
        raise UserError(f"{name} must lie in (0, 1], in units of [0, 1] pixels, got {text}")
    return radius


def format_radius(radius: Fraction) -> str:
    """Write a radius the way people do: a short decimal if it is one, else a fraction."""
    decimal = repr(float(radius))
    if Fraction(decimal) == radius:
        return decimal
    if 255 % radius.denominator == 0:
        return f"{radius * 255}/255"  # pixel steps, not reduced
    return str(radius)
