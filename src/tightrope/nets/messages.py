"""Other libraries' errors inside our one-line messages."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
