"""Meeting the other processes of a training, and ending in order when told to.

`torchrun` tells all processes to end as soon as one has died, and passes Ctrl-C on to them.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tightrope.errors import UserError
from tightrope.launched import Place

T = TypeVar("T")

_times_met = 0


class ToldToEnd(KeyboardInterrupt):
    """This process was told to end.

    No error of the input: whoever reads a file takes those for damage, and goes on.
    """


@contextmanager
def told_to_end() -> Iterator[None]:
    """Raise `ToldToEnd` when told to, also if what was interrupted made another error of it.

    After an error, the signals stay ignored: this process has something to say before it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def end(*_: Any) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ToldToEnd

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException as error:
        ignore_signals()
        if told and not isinstance(error, ToldToEnd):
            raise ToldToEnd from error
        raise
    signal.signal(signal.SIGTERM, before)


def ignore_signals() -> None:
    """Hear of nothing that would keep this process from its last words."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def find_store(place: Place) -> dist.Store:
    """Return where the processes leave each other messages."""
    global _times_met
    if dist.is_initialized():
        raise UserError("torch.distributed is in use already; training sets it up by itself")
    _times_met += 1
    # A process that is started again, or trains again, must not meet what it said before.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = dist.rendezvous("env://", place.rank, place.size)
    found, _, _ = _waiting(place, lambda: next(rendezvous))
    return dist.PrefixStore(f"tightrope/{restarts}/{_times_met}", found)


def meet(place: Place, store: dist.Store) -> None:
    """Wait until all processes are there."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    own = store.clone()  # type: ignore[attr-defined]  # whoever waits on a store keeps others from it

    def start() -> None:
        dist.init_process_group(backend, store=own, rank=place.rank, world_size=place.size)

    _waiting(place, start)


def _waiting(place: Place, function: Callable[[], T]) -> T:
    """Wait for others in a thread of its own: where C++ waits, no signal is heard."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    value, error = outcome.get()
    if isinstance(error, RuntimeError):
        reason = str(error).splitlines()[0]
        raise UserError(f"the {place.size} processes did not find each other: {reason}") from None
    if error is not None:
        raise error
    found: T = value
    return found
