"""Errors meant for the person at the keyboard.

Everything a user can get wrong raises `UserError` with a message that fits on one line and
says what was wrong, what was expected and what to do. The command line prints that line and
exits with code 2; anything else that escapes is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something in the input is wrong; the message says what to do about it."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that does not exist, with the nearest one that does."""
    choices = {choice.lower(): choice for choice in sorted(known)}
    near = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    every = ", ".join(choices.values())
    hint = f"did you mean {choices[near[0]]!r}?" if near else f"choose one of: {every}"
    return UserError(f"unknown {kind} {shorten(name)}; {hint}")


def shorten(value: object, length: int = 60) -> str:
    """Return what a user gave, quoted, in a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
