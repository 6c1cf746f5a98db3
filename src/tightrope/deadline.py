"""A point in time by which something has to end, given to everything that can take long."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


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
