"""Several processes on this machine.

Workers only compute: they get items one at a time, as they become free, and send back what they
find. Each has a pipe of its own: there is no lock that a killed worker could leave locked, and the
end of the pipe tells either side that the other one is gone. (The pools of `concurrent.futures`
and loky share one queue for results, have no messages on the way, and break with one worker.)
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any, Generic

from tightrope.budget import is_out_of_memory
from tightrope.errors import UserError
from tightrope.parallel.scheduler import ATTEMPTS, Turn, Waiting
from tightrope.parallel.task import Item, Prepare, Watcher
from tightrope.parallel.worker import Says, serve
from tightrope.waiting import children_sleep_while_waiting


def run_in_processes(
    prepare: Prepare[Item],
    items: Iterable[Item],
    watcher: Watcher[Item],
    *,
    workers: int,
    threads: int,
    share: object = None,
) -> None:
    """Do the work in processes of `threads` threads each; the watcher lives in this one only.

    The item of a worker that dies is given to another one, and fails if all of them die of it.
    However this ends, no worker survives, and every message that they had sent is delivered.
    Each worker holds what is to be shared: if this process is killed, a lock among it is
    nobody else's before the last worker has ended.
    """
    crew = _Crew(pickle.dumps(prepare), Waiting(items), watcher, threads, share)
    try:
        crew.hire(workers)
        crew.supervise()
    except BaseException:
        crew.stop()
        crew.deliver_the_rest()
        raise
    finally:
        crew.stop()
        for worker in crew.members:
            worker.pipe.close()


class _Worker(Generic[Item]):
    """The parent's side of a worker process."""

    def __init__(self, threads: int, share: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, self.far_end = context.Pipe()
        # A daemon: at the latest it ends when this process does.
        self.process: SpawnProcess = context.Process(
            target=serve, args=(self.far_end, threads, share), daemon=True
        )
        self.turn: Turn[Item] | None = None

    def start(self) -> None:
        """Start the process; from then on the other end of the pipe is the worker's alone."""
        self.process.start()
        self.far_end.close()

    def send(self, content: bytes) -> None:
        """Send a pickled value."""
        with suppress(OSError):  # a dead worker is found when its answer is awaited
            self.pipe.send_bytes(content)

    def last_messages(self) -> Iterator[Any]:
        """Yield what a stopped worker had sent and nobody has read yet."""
        with suppress(EOFError, OSError):  # also a message that is torn
            while not self.pipe.closed:
                kind, content = self.pipe.recv()
                if kind is Says.MESSAGE:
                    yield content

    def death(self) -> UserError:
        """Return the error that tells of the end of this worker."""
        self.process.join(timeout=5)
        code = self.process.exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f" ({signal.strsignal(-code)})" if code < 0 else ""
        item = None if self.turn is None else self.turn.item
        return continue_later(f"{ATTEMPTS} times a worker process {how}{reason}", item)


@dataclass
class _Crew(Generic[Item]):
    """All workers, and what is left for them."""

    task: bytes
    waiting: Waiting[Item]
    watcher: Watcher[Item]
    threads: int
    share: object
    members: list[_Worker[Item]] = field(default_factory=list)
    early_deaths: int = 0  # in a row

    def hire(self, count: int) -> None:
        """Start workers."""
        with on_their_own(self.threads), children_sleep_while_waiting():
            for _ in range(count):
                self.members.append(_Worker(self.threads, self.share))
                self.members[-1].start()

    def supervise(self) -> None:
        """Give items to whoever is free and pass on what comes back, until nothing is left."""
        while self.waiting or any(worker.turn is not None for worker in self.members):
            pipes = {w.pipe: w for w in self.members if not w.pipe.closed}
            for pipe in connection.wait(list(pipes)):
                worker = pipes[pipe]  # type: ignore[index]
                try:
                    kind, content = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                else:
                    self._hear(worker, kind, content)

    def stop(self) -> None:
        """End all workers at once; those that were dismissed are about to end anyway."""
        started = [worker.process for worker in self.members if worker.process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for worker in self.members:
            worker.far_end.close()  # still open if the start was interrupted

    def deliver_the_rest(self) -> None:
        """Pass on what stopped workers had sent."""
        for worker in self.members:
            if worker.turn is not None:
                for message in worker.last_messages():
                    with suppress(Exception):  # told is what ended the task, not what follows
                        self.watcher.message(worker.turn.item, message)

    def _hear(self, worker: _Worker[Item], kind: Says, content: Any) -> None:
        turn = worker.turn
        if kind is Says.STARTED:
            worker.send(self.task)
        elif kind is Says.READY:
            self.early_deaths = 0
            self._give(worker)
        elif turn is None:
            assert kind is Says.UNABLE
            raise explained(content, None)
        elif kind is Says.MESSAGE:
            self.watcher.message(turn.item, content)
        else:
            self._give(worker)
            if kind is Says.FINISHED:
                self.watcher.finished(turn.item, content)
            else:
                self.watcher.failed(turn.item, explained(content, turn.item))

    def _give(self, worker: _Worker[Item]) -> None:
        """Hand out the next item, or dismiss the worker."""
        turn = worker.turn = self.waiting.next()
        if turn is None:
            worker.pipe.close()
        else:
            turn.attempts += 1
            worker.send(pickle.dumps(self.watcher.give(turn.item)))

    def _replace(self, worker: _Worker[Item]) -> None:
        """Let another worker take over from one that died."""
        worker.pipe.close()
        if (turn := worker.turn) is None:
            self.early_deaths += 1
            if self.early_deaths == ATTEMPTS:
                raise worker.death()
        elif not turn.is_lost:
            self.waiting.again.append(turn)
        else:
            self.watcher.failed(turn.item, worker.death())
        worker.turn = None
        if self.waiting:
            self.hire(1)


def explained(error: Exception, item: object) -> Exception:
    """Return a worker's error, or what to do about it."""
    if is_out_of_memory(error):
        return continue_later("a worker process ran out of memory", item)
    return error


def continue_later(what: str, item: object) -> UserError:
    """Return the error for something that ends the work on an item, or all of it."""
    where = " before it began" if item is None else f" on {item}"
    return UserError(
        f"{what}{where}; what is finished is saved, run it again to continue "
        "(with fewer jobs if memory is short)"
    )


@contextmanager
def on_their_own(threads: int) -> Iterator[None]:
    """Start processes that neither see Ctrl-C nor run the caller's script again.

    A terminal sends the interrupt to all processes; only the parent shall react. And a worker
    needs nothing of a script that, without a guard, would train or certify in each worker.
    """
    script, number = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    block = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if block:
        resource_tracker.ensure_running()  # later on, its start would lift the block
    before = block(signal.SIG_BLOCK, {signal.SIGINT}) if block else None
    try:
        sys.modules["__main__"] = ModuleType("__main__")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        yield
    finally:
        sys.modules["__main__"] = script
        if number is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = number
        if block:
            block(signal.SIG_SETMASK, before)
