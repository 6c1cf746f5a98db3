"""Other libraries' errors and names from files inside our one-line messages."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def short(name: str, length: int = 60) -> str:
    """Return a name in a form and a length that fit into a message."""
    shown = name if len(name) <= length else f"{name[:length]}..."
    return shown if shown.isprintable() else repr(shown)[1:-1]
