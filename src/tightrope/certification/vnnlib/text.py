"""The words of VNN-LIB: tokens with their lines, variables, and numbers as exact decimals."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from tightrope.errors import UserError, shorten

LARGEST_EXPONENT = 126  # of two: float32 holds what lies below 2 ** 128
TOO_LARGE = "a number above 8e37, near the end of float32"
_SHOWN = 300  # characters of a text that are looked at to show a part of it

# Long files consist of bounds of single variables, so these are one token: three groups in
# brackets. An index belongs to the word before it. Nothing here tries a second time what did not
# fit, so any text takes linear time.
_WORD = r"[^\s();\[\]]++(?:\[[^\s()\[\];]*+\])?+"
TOKEN = re.compile(
    rf";[^\n]*+|\((<=|>=|<|>)[ \t]++({_WORD})[ \t]++({_WORD})[ \t]*+\)"
    r"|[()]|[^\s();\[\]]++(?:\s*+\[[^()\[\];]*+\])?+|[\[\]]"
)
# The longest float64 has 1074 digits behind the point; longer exponents would fill the memory.
_NUMBER = re.compile(r"[-+]?(\d{1,999}(\.\d{0,1999})?|\.\d{1,1999})([eE][-+]?\d{1,3})?", re.ASCII)
_VARIABLE = re.compile(r"([XY])_(0|[1-9]\d{0,8})", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,200}")
_INDEX = re.compile(r"\s*(\d{1,9}(\s*,\s*\d{1,9}){0,30})?\s*", re.ASCII)


class Source:
    """A text whose parts can be shown and found by line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def line(self, position: int) -> int:
        """Return the number of the line at a position."""
        return self.text.count("\n", 0, position) + 1

    def error(self, position: int, message: str) -> UserError:
        """Return the error for something wrong at a position; the reader adds the file's name."""
        return UserError(f"line {self.line(position)}: {message}")

    def show(self, position: int) -> str:
        """Return the brackets that open at a position as text, shortened for a message."""
        text = self.text[position : position + _SHOWN]
        depth = 0
        for i, character in enumerate(text):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                text = text[: i + 1]
                break
        return shorten(" ".join(text.split()))


class Variable(NamedTuple):
    """An input `X_i` or an output `Y_i`."""

    kind: str
    number: int

    @property
    def place(self) -> int:
        """Its place in a row: outputs count from 0 up, inputs from -1 down."""
        return self.number if self.kind == "Y" else -1 - self.number


def parse_variable(text: str) -> Variable | None:
    """Return the variable of that name, if it is the name of one."""
    match = _VARIABLE.fullmatch(text)
    return Variable(match[1], int(match[2])) if match else None


def is_name(text: str) -> bool:
    """Return whether a text is a name of a network or of a tensor."""
    return _NAME.fullmatch(text) is not None


def parse_indexed(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the word and the numbers of `word[1,2]`, if that is what the text is."""
    word, bracket, rest = text.partition("[")
    if not bracket or not rest.endswith("]") or not _INDEX.fullmatch(rest[:-1]):
        return None
    numbers = rest[:-1].strip()
    return word.strip(), tuple(int(n) for n in numbers.split(",")) if numbers else ()


@lru_cache(maxsize=1 << 14)
def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a decimal, if the text is one."""
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def too_large(number: Fraction) -> bool:
    """Return whether a number is near the end of float32 or beyond it."""
    return number.numerator.bit_length() - number.denominator.bit_length() > LARGEST_EXPONENT
