"""Brackets of a VNN-LIB file that are being read, and those that hold nothing."""

from __future__ import annotations

from typing import Protocol

from tightrope.errors import UserError


class Brackets(Protocol):
    """A pair of brackets that is being read."""

    position: int

    def open(self, head: str, position: int) -> Brackets:
        """Begin the brackets inside whose first word is `head` (empty if they have none)."""

    def word(self, word: str, position: int) -> None:
        """Read a word."""

    def close(self, outer: Brackets) -> None:
        """End here, and give the outer brackets what this means."""


class Skipped:
    """Brackets that say nothing about the property."""

    def __init__(self, position: int) -> None:
        self.position = position

    def open(self, head: str, position: int) -> Brackets:
        """Skip what is inside, too."""
        return Skipped(position)

    def word(self, word: str, position: int) -> None:
        """Skip a word."""

    def close(self, outer: Brackets) -> None:
        """Leave no trace."""


class Empty:
    """Brackets that must close at once."""

    def __init__(self, error: UserError, position: int) -> None:
        self.error, self.position = error, position

    def open(self, head: str, position: int) -> Brackets:
        """Refuse brackets inside."""
        raise self.error

    def word(self, word: str, position: int) -> None:
        """Refuse a word inside."""
        raise self.error

    def close(self, outer: Brackets) -> None:
        """Leave no trace."""


class Words:
    """Brackets that hold words alone; what these mean is decided at the end."""

    def __init__(self, error: UserError, position: int) -> None:
        self.error, self.position = error, position
        self.words: list[str] = []

    def open(self, head: str, position: int) -> Brackets:
        """Refuse brackets inside."""
        raise self.error

    def word(self, word: str, position: int) -> None:
        """Read a word."""
        self.words.append(word)

    def close(self, outer: Brackets) -> None:
        """Leave no trace."""
