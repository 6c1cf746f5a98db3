"""Perturbation radii, kept exact: `0.1` is one tenth and `8/255` is eight 255ths.

Certification needs the number the user wrote, not its nearest float.
"""

from __future__ import annotations

from fractions import Fraction

from tightrope.errors import UserError

Radius = str | float | Fraction


def parse_radius(value: Radius, name: str = "eps") -> Fraction:
    """Read a radius in (0, 1] from `0.1`, `"0.1"` or `"8/255"`."""
    value = value.strip() if isinstance(value, str) else value
    try:
        # str(0.1) is "0.1": the decimal that was written, not the binary fraction behind it.
        radius = value if isinstance(value, Fraction) else Fraction(str(value).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        raise UserError(
            f"{name} must be a number such as 0.1 or 8/255, got {str(value)!r}"
        ) from None
    if not 0 < radius <= 1:
        raise UserError(f"{name} must lie in (0, 1], in units of [0, 1] pixels, got {value}")
    return radius


def format_radius(radius: Fraction) -> str:
    """Write a radius the way people do: a short decimal if it is one, else a fraction."""
    decimal = repr(float(radius))
    if Fraction(decimal) == radius:
        return decimal
    if 255 % radius.denominator == 0:
        return f"{radius * 255}/255"  # pixel steps, not reduced
    return str(radius)
