"""Ending a test that would hang, and seeing what memory a block needs."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail a block that takes longer; allow ten times what it may take on a quiet machine."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory(megabytes: int) -> Iterator[None]:
    """Let a block take no more than that much memory beyond what the process has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a real file
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
