"""How the threads of a process wait: asleep, where the process is ours.

OpenMP's threads, which compute for torch, by default spin while they wait for each other: they
keep a core busy to lose no time. Beside other busy processes that is the core which the awaited
thread needs, and training becomes many times slower. Asleep they cost a few per cent of a quiet
machine's time (`benchmarks/busy.py`).

OpenMP reads its variables when it is loaded, so they must be set before torch is imported; this
module imports nothing that does. Where Tightrope is imported as a library, the process and its
variables are the user's, and nothing here is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
# Whoever sets one of these has decided: OpenMP's own, GNU's and LLVM's (also Intel's) variables.
_DECISIONS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def sleeping_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a process's variables with those added that let its threads sleep.

    What a user has chosen stays as it is.
    """
    decided = any(name in environment for name in _DECISIONS)
    return dict(environment) if decided else {**environment, **ASLEEP}


def sleep_while_waiting() -> None:
    """Let the threads of this process, and of those it starts, sleep while they wait."""
    os.environ.update(sleeping_threads(os.environ))


@contextmanager
def children_sleep_while_waiting() -> Iterator[None]:
    """Start processes whose threads sleep, from one that may be the user's."""
    before = dict(os.environ)
    sleep_while_waiting()
    try:
        yield
    finally:
        for name in ASLEEP.keys() - before.keys():
            os.environ.pop(name, None)
