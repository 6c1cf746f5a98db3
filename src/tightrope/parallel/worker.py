"""The worker's side: set up once, then work on what comes through the pipe until it is closed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from contextlib import suppress
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

import torch


class Says(Enum):
    """What a message of a worker is about."""

    STARTED = auto()  # it needs the task
    READY = auto()  # it needs an item
    UNABLE = auto()  # an error before the first item
    MESSAGE = auto()
    SHARED = auto()  # parts of an item, for others
    FINISHED = auto()
    FAILED = auto()


def serve(pipe: Connection, threads: int, share: object) -> None:
    """Be a worker. What is shared is only held: it ends with this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process().daemon = False  # the work may have workers of its own
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, ConnectionError):  # dismissed, or the parent is gone
        work_through(pipe)


def work_through(pipe: Connection) -> None:
    """Work on all items; ends by the error that the end of the pipe is."""

    def say(kind: Says, content: Any = None) -> None:
        # Not `pipe.send`: torch has taught that to leave tensors in shared memory.
        pipe.send_bytes(pickle.dumps((kind, content)))

    say(Says.STARTED)
    task = pipe.recv_bytes()
    try:
        work = pickle.loads(task)()
    except Exception as error:
        say(Says.UNABLE, portable(error))
        return
    say(Says.READY)
    while True:
        item = pipe.recv()
        try:
            result = work(item, lambda message: say(Says.MESSAGE, message))
            answer = pickle.dumps((Says.FINISHED, result))
        except Exception as error:
            answer = pickle.dumps((Says.FAILED, portable(error)))
        pipe.send_bytes(answer)


def portable(error: Exception) -> Exception:
    """Return an error that survives the way to the parent, with the story of its origin."""
    story = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker process:\n{story}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(story)
    return error


def _end_with_parent() -> None:
    """End this process, whatever it is doing, when its parent is gone, killed or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
