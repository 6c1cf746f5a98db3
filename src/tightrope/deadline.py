"""A point in time by which something has to end, given to everything that can take long."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

_IMPORTED = time.monotonic()
_STARTED_FIELD = 19  # of those behind the name of the program in /proc/self/stat


class OutOfTimeError(Exception):
    """The deadline has passed. Never shown to users: whoever set the deadline answers for it."""


@dataclass(frozen=True)
class Deadline:
    """A moment on the clock of `time.monotonic`; without an argument, one that never comes."""

    end: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline that many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """The seconds left; negative when it has passed."""
        return self.end - time.monotonic()

    def check(self) -> None:
        """Raise `OutOfTimeError` if the deadline has passed."""
        if self.left <= 0:
            raise OutOfTimeError


_CURRENT: ContextVar[Deadline | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Let whatever is computed inside look at this clock: `check_time` then ends it."""
    token = _CURRENT.set(deadline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_time() -> None:
    """Raise `OutOfTimeError` if the deadline of the block that this runs in has passed."""
    deadline = _CURRENT.get()
    if deadline is not None:
        deadline.check()


def time_left() -> float:
    """Return the seconds left to the block that this runs in; infinity without a deadline."""
    deadline = _CURRENT.get()
    return math.inf if deadline is None else deadline.left


def process_start() -> float:
    """Return when this process started, on the clock of `time.monotonic`.

    Where the system does not say (it is not Linux), that is when Tightrope was imported.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(fields.rpartition(")")[2].split()[_STARTED_FIELD])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return time.monotonic() - max(age, 0.0)
