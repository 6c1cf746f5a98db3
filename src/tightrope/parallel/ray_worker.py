"""The worker's side on a cluster: what an actor of Ray does.

Its calls run in threads: one computes, one waits for something to tell, one takes wishes. What
goes either way is pickled here, so that arrays arrive as what they were, not as read-only views.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

from tightrope.errors import UserError
from tightrope.parallel.task import Shared
from tightrope.parallel.wishes import Wishes, wished
from tightrope.parallel.worker import Says, portable
from tightrope.version import __version__

CONCURRENCY = 4  # calls at a time: begin or take, listen, wish


class RayWorker:
    """Sets up once, then works on what it is given; what it has to tell is asked for."""

    def __init__(self, version: str, threads: int) -> None:
        self.version, self.threads = version, threads
        self.told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.wishes = Wishes()
        self.work: Callable[[Any, Any], Any] | None = None

    def begin(self, task: bytes) -> None:
        """Set up in a thread of its own."""
        self._start(self._begin, task)

    def take(self, item: bytes) -> None:
        """Work on an item in a thread of its own."""
        self.wishes = Wishes()
        self._start(self._take, item, self.wishes)

    def wish(self, name: str) -> None:
        """Take a wish: `share` or `stop`."""
        setattr(self.wishes, name, True)

    def listen(self) -> list[bytes]:
        """Return what there is to tell, as soon as there is something."""
        told = [self.told.get()]
        while True:
            try:
                told.append(self.told.get_nowait())
            except queue.Empty:
                return told

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _begin(self, task: bytes) -> None:
        import torch

        try:
            if self.version != __version__:
                raise UserError(
                    f"a machine of the cluster has Tightrope {__version__}, this one has "
                    f"{self.version}; install the same everywhere"
                )
            torch.set_num_threads(self.threads)
            self.work = pickle.loads(task)()
        except Exception as error:
            self._say(Says.UNABLE, portable(error))
        else:
            self._say(Says.READY)

    def _take(self, content: bytes, wishes: Wishes) -> None:
        def send(message: Any) -> None:
            kind = Says.SHARED if isinstance(message, Shared) else Says.MESSAGE
            self._say(kind, message.items if isinstance(message, Shared) else message)

        assert self.work is not None
        try:
            with wished(wishes):
                result = self.work(pickle.loads(content), send)
            answer = pickle.dumps((Says.FINISHED, result))
        except Exception as error:
            answer = pickle.dumps((Says.FAILED, portable(error)))
        self.told.put(answer)

    def _say(self, kind: Says, content: Any = None) -> None:
        self.told.put(pickle.dumps((kind, content)))
