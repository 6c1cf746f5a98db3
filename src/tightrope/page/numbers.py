"""Numbers as people read them."""

from __future__ import annotations

import math

MISSING = "–"


def percent(value: float | None, digits: int = 2) -> str:
    """Format an accuracy."""
    return MISSING if value is None else f"{100 * value:.{digits}f}\u202f%"


def count(value: int | None) -> str:
    """Format a count, thousands apart."""
    return MISSING if value is None else f"{value:,}".replace(",", "\u202f")


def duration(seconds: float | None) -> str:
    """Format a time in the unit that suits it."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING
    if seconds < 0.0005:
        return "0\u202fs" if seconds == 0 else "<\u202f1\u202fms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}\u202fms"
    if seconds < 99.95:
        return f"{seconds:.1f}\u202fs"
    minutes, hours = round(seconds / 60), round(seconds / 3600, 1)
    if minutes < 100:
        whole = round(seconds)
        return f"{whole // 60}\u202fmin {whole % 60:02d}\u202fs"
    return f"{hours:.1f}\u202fh" if hours < 100 else f"{seconds / 86400:.1f}\u202fd"


def significant(value: float | None, digits: int = 3) -> str:
    """Format a number with so many significant digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "\u2212")
    return text.replace("-", "\u2212")
