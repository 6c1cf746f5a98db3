"""Reading settings: from the command line everything is text, from TOML and Python typed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tightrope.errors import UserError

Parser = Callable[[Any], Any]

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def whole(minimum: int | None = None, maximum: int | None = None) -> Parser:
    """Return a parser of whole numbers within limits."""

    def parse(value: Any) -> int:
        try:
            number = int(str(value)) if not isinstance(value, bool) else None
        except ValueError:
            number = None
        low = minimum is not None and number is not None and number < minimum
        high = maximum is not None and number is not None and number > maximum
        if number is None or low or high:
            limits = "" if minimum is None else f" from {minimum} on"
            raise UserError(
                f"a whole number{limits}"
                if maximum is None
                else f"a whole number from {minimum} to {maximum}"
            )
        return number

    return parse


def number(
    minimum: float = -math.inf, *, strict: bool = False, maximum: float = math.inf
) -> Parser:
    """Return a parser of numbers within limits; `strict` excludes the minimum itself."""

    def parse(value: Any) -> float:
        try:
            result = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            result = math.nan
        below = result <= minimum if strict else result < minimum
        endless = math.isinf(result) and minimum > -math.inf
        if math.isnan(result) or endless or below or result > maximum:
            limits = f"above {minimum:g}" if strict else f"of at least {minimum:g}"
            limits += f" and at most {maximum:g}" if maximum < math.inf else ""
            raise UserError("a number" + (f" {limits}" if minimum > -math.inf else ""))
        return result

    return parse


def flag(value: Any) -> bool:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in _WORDS:
        return _WORDS[str(value).lower()]
    raise UserError("true or false")


def text(value: Any) -> str:
    """Read text."""
    if not str(value).strip():
        raise UserError("a name or a path")
    return str(value)


def choice(*options: str) -> Parser:
    """Return a parser of one of some words."""

    def parse(value: Any) -> str:
        if value not in options:
            raise UserError(f"one of {', '.join(options)}")
        return str(value)

    return parse


def increasing(value: Any) -> tuple[int, ...]:
    """Read a list of epochs, `50,60` or `[50, 60]`."""
    parts = value if isinstance(value, list | tuple) else str(value).strip("[]() ").split(",")
    try:
        numbers = tuple(whole(0)(str(part).strip()) for part in parts if str(part).strip())
    except UserError:
        raise UserError("whole numbers separated by commas") from None
    if list(numbers) != sorted(set(numbers)):
        raise UserError("increasing whole numbers separated by commas")
    return numbers


def part_of_data(value: Any) -> float | int:
    """Read a fraction (0.1) or a count (5000) of samples."""
    if isinstance(value, str):
        plain = value.strip().isascii() and value.strip().isdigit()
        value = int(value) if plain else number(0.0, maximum=1.0)(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError("a fraction such as 0.1 or a count such as 5000")
    if isinstance(value, float) and value >= 1:
        raise UserError("a fraction below 1 or a whole count")
    return value


def optional(parser: Parser) -> Parser:
    """Let `none` (or None) stand for no value."""

    def parse(value: Any) -> Any:
        return None if value is None or str(value).lower() == "none" else parser(value)

    return parse


def like_default(default: Any, kind: str) -> Parser:
    """Return the parser for a method's option, from its default value and declared type."""
    base: Parser
    if kind.startswith("bool"):
        base = flag
    elif kind.startswith("int"):
        base = whole()
    elif kind.startswith("float"):
        base = number()
    else:
        base = text
    return optional(base) if "None" in kind or default is None else base
