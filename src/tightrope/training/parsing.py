"""Declaring and reading settings: from the command line all is text, from TOML and Python typed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, field
from typing import Any

from tightrope.errors import UserError, shorten
from tightrope.reading import check_values

Parser = Callable[[Any], Any]

MOST_DIGITS = 40  # of a whole number; longer ones are not even read

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def setting(default: Any, parse: Parser, help: str) -> Any:
    """Declare a field of a dataclass: its default, its type and range, and what it means."""
    return field(default=default, metadata={"parse": parse, "help": help})


def parse_setting(name: str, declared: Field[Any], value: Any) -> Any:
    """Read a value for a declared field, or say what it must be."""
    try:
        result = parser_of(declared)(value)
    except UserError as error:
        message = str(error)
        if " must " in message:
            raise
        raise UserError(f"{name} must be {message}, got {shorten(value)}") from None
    except ValueError:  # a number so long that Python refuses to write it out
        result = None
    try:
        check_values(list(value) if isinstance(value, tuple) else value)
    except ValueError as error:
        raise UserError(f"{name} must not be {error}, got {shorten(value)}") from None
    return result


def parser_of(declared: Field[Any]) -> Parser:
    """Return the parser of a field, from its declaration or, if it has none, from its type."""
    if "parse" in declared.metadata:
        parse: Parser = declared.metadata["parse"]
        return parse
    kind = declared.type if isinstance(declared.type, str) else _type_name(declared.type)
    return _like_default(declared.default, kind)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def whole(minimum: int | None = None, maximum: int | None = None) -> Parser:
    """Return a parser of whole numbers within limits."""

    def parse(value: Any) -> int:
        number = _whole(value)
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


def _whole(value: Any) -> int | None:
    """Return the whole number that a value is or says, None if there is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    text = str(value)
    try:
        return int(text) if len(text) <= MOST_DIGITS else None
    except ValueError:
        return None


def number(
    minimum: float = -math.inf,
    *,
    strict: bool = False,
    maximum: float = math.inf,
    infinite: bool = False,
) -> Parser:
    """Return a parser of numbers within limits; `strict` excludes the minimum itself."""

    def parse(value: Any) -> float:
        try:
            result = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            result = math.nan
        below = result <= minimum if strict else result < minimum
        endless = math.isinf(result) and minimum > -math.inf and not infinite
        if math.isnan(result) or endless or below or result > maximum:
            limits = f"above {minimum:g}" if strict else f"of at least {minimum:g}"
            limits += f" and at most {maximum:g}" if maximum < math.inf else ""
            limits += " (inf is allowed)" if infinite else ""
            raise UserError("a number" + (f" {limits}" if minimum > -math.inf else ""))
        return result

    return parse


def fraction(value: Any) -> float:
    """Read a number between 0 and 1, both excluded."""
    try:
        result = number(0, strict=True, maximum=1)(value)
    except UserError:
        result = 1.0
    if result == 1:
        raise UserError("a number above 0 and below 1")
    return result


def within(parser: Parser, limits: str, kind: Parser | None = None) -> Parser:
    """Let a parser that refuses a number for its size say the limits in these words.

    `kind` is the parser of all such numbers, by default of any number.
    """

    def parse(value: Any) -> Any:
        try:
            return parser(value)
        except UserError:
            (kind or number())(value)  # says so if it is no such number at all
            raise UserError(limits) from None

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
    if not str(value).strip() or "\0" in str(value):
        raise UserError("a name or a path")
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:  # the path of a file whose name is in another encoding
        raise UserError("text that can be written as UTF-8") from None
    return str(value)


def folder(value: Any) -> str:
    """Read the path of a folder, or take that of a run."""
    return text(getattr(value, "folder", value))


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
        value = _whole(value) if plain else number(0.0, maximum=1.0)(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise UserError("a fraction such as 0.1 or a count such as 5000")
    if isinstance(value, float) and value >= 1:
        raise UserError("a fraction below 1 or a whole count")
    return value


def optional(parser: Parser) -> Parser:
    """Let `none` (or None) stand for no value."""

    def parse(value: Any) -> Any:
        return None if value is None or str(value).lower() == "none" else parser(value)

    return parse


def _like_default(default: Any, kind: str) -> Parser:
    """Return the parser of a field from its default value and declared type."""
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
