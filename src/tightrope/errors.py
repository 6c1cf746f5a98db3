"""Errors meant for the person at the keyboard.

Everything a user can get wrong raises `UserError` with a message that fits on one line and
says what was wrong, what was expected and what to do. The command line prints that line and
exits with code 2; anything else that escapes is a bug of ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

# Control characters, line ends, what reverses the direction of writing, halves of characters:
# printed as they are, they would move the cursor, clear the screen or hide what is there.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
_LINE_END = re.compile(r"\s*[\r\n]+\s*")
_LONGEST_INTEGER = 4000  # bits; Python refuses to write out numbers of more than 4300 digits


class UserError(ValueError):
    """Something in the input is wrong; the message, one line, says what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(_LINE_END.sub(" ", message.strip())))


def check_path(path: Path) -> Path:
    """Return a path, unless no file can have that name."""
    if "\0" in str(path):
        raise UserError(f"{str(path)!r} is not the name of a file")
    return path


def printable(text: str) -> str:
    """Return text of whatever origin with everything escaped that a terminal would obey."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that does not exist, with the nearest one that does."""
    choices = {choice.lower(): choice for choice in sorted(known)}
    near = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    every = ", ".join(choices.values())
    hint = f"did you mean {choices[near[0]]!r}?" if near else f"choose one of: {every}"
    return UserError(f"unknown {kind} {shorten(name)}; {hint}")


def shorten(value: object, length: int = 60) -> str:
    """Return what a user gave, quoted, in a length that fits into a message."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
        return "a number of thousands of digits"
    if isinstance(value, str | bytes):
        value = value[: length + 1]  # the rest would not be seen
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep; a number that is too long inside
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}..."
