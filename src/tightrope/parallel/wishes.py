"""What others wish of a worker while it is at work: that it shares what is left, or stops.

A wish is a flag that long work looks at between its rounds. Engines without such wishes set none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Wishes:
    """Flags that another thread may set at any time."""

    share: bool = False
    stop: bool = False


NONE = Wishes()
_CURRENT: ContextVar[Wishes] = ContextVar("_CURRENT", default=NONE)


@contextmanager
def wished(wishes: Wishes) -> Iterator[None]:
    """Let whatever is computed inside see these wishes."""
    token = _CURRENT.set(wishes)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_wishes() -> Wishes:
    """Return the wishes about the work that this runs in."""
    return _CURRENT.get()
