"""The last word of `verify`: in time, even where nothing looks at the clock.

Everything that takes long looks at its deadline; but loading libraries on a busy machine does not,
nor does a single operation on something very large. A thread then says that the time is up and ends
the process. It imports nothing, since the import that takes so long may hold what it needs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TENTH, MORE = 1.1, 1.2  # of the limit, and seconds: an answer may come 2 s after the first


@contextmanager
def last_word(started: float, limit: float, text: str) -> Iterator[None]:
    """Print `text` and end the process soon after a limit, unless the block ends before.

    `started` is when the limit began, on the clock of `time.monotonic`.
    """
    left = started + TENTH * limit + MORE - time.monotonic()
    speaking = threading.Lock()

    def speak() -> None:
        with speaking:
            try:
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
                sys.stderr.write(
                    "tightrope: the time was up, and what was being done did not end\n"
                )
                sys.stderr.flush()
            finally:  # also if nobody reads it: what follows would be a second answer
                os._exit(0)

    alarm = threading.Timer(min(max(left, 0.0), threading.TIMEOUT_MAX), speak)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        speaking.acquire()  # for good: one of the two speaks
