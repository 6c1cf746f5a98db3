"""Two searches that take turns, for where nobody knows which one is the faster.

Splitting ReLUs is, where few neurons are unstable. But signs of many neurons may hang on those of
some inputs, as where a network encodes a formula: cutting the box then decides in hundreds of parts
what splitting ReLUs does not in a million. Turns become longer, so that whatever one of the two
decides is decided within about four times its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from tightrope.answer import Answer, Cause, Verdict

FIRST = 0.05  # of the time, for the first turn of each


class Search(Protocol):
    """A search that can be continued."""

    def run(self, deadline: float) -> Answer:
        """Search on until something is decided or `time.monotonic()` passes the deadline."""


class Turns:
    """A search, and another one that is made when its turn comes."""

    def __init__(self, first: Search, make_second: Callable[[], Search | None]) -> None:
        self.first, self.make_second = first, make_second

    def run(self, deadline: float) -> Answer:
        """Let them search until one decides, both are at their end, or time is up."""
        turn = FIRST * (deadline - time.monotonic())
        found = self.first.run(min(deadline, time.monotonic() + turn))
        if _over(found, deadline) or _at_its_end(found):
            return found
        second = self.make_second()
        if second is None:
            return found
        counts = [found.subproblems, 0]
        going = [(1, second)] if found.cause is not Cause.TIME else [(1, second), (0, self.first)]
        while going:
            number, search = going.pop(0)
            turn *= 2 - number  # both have turns of the same length
            end = time.monotonic() + turn if going else deadline
            found = search.run(min(deadline, end))
            counts[number] = found.subproblems
            found = replace(found, subproblems=sum(counts))
            if _over(found, deadline) or (number == 0 and _at_its_end(found)):
                return found
            if found.cause is Cause.TIME:
                going.append((number, search))
        return found


def _over(found: Answer, deadline: float) -> bool:
    """Return whether something is decided, or there is no time to decide it."""
    return found.verdict is not Verdict.UNKNOWN or time.monotonic() >= deadline


def _at_its_end(found: Answer) -> bool:
    """Return whether all signs are known and zero is too close: cutting boxes would never end."""
    return found.cause is Cause.TOO_CLOSE
