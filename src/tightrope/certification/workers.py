"""Deciding batches of samples: in this process, or in several that report to it.

Workers only compute. They get batches one at a time, as they become free, and send records
back; the parent alone writes the journal. Each worker has a pipe of its own: there is no lock
that a killed worker could leave locked, and the end of the pipe tells either side that the
other one is gone.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tightrope.certification.cascade import Samples, decide
from tightrope.certification.stages import STAGES, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.errors import UserError
from tightrope.files import write_bytes
from tightrope.runs import Run
from tightrope.runs.journal import Record
from tightrope.runs.lock import Lock
from tightrope.waiting import children_sleep_while_waiting

Add = Callable[[Record], None]
# Called after each record with False and after each batch with True.
Notice = Callable[[bool], None]


@dataclass(frozen=True)
class Batch:
    """Samples to decide together. Arrays, since tensors would travel by shared memory."""

    indices: np.ndarray
    x: np.ndarray
    labels: np.ndarray
    known: frozenset[int] = frozenset()  # samples that have a record from an earlier session

    def __str__(self) -> str:
        return f"samples {self.indices[0]} to {self.indices[-1]}"


@dataclass(frozen=True)
class Task:
    """What a process must know to decide batches of a run."""

    run: Run
    module: nn.Module
    input_shape: tuple[int, ...]
    eps: Fraction
    settings: dict[str, Any]

    def to_bytes(self) -> bytes:
        """Return the task as a worker receives it, whatever happens to the run's files."""
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return buffer.getvalue()


class Decider:
    """Decides batches in the process that it lives in."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self.subject = Subject.of(task.module, task.input_shape)
        self.stages = {name: STAGES[name] for name in task.settings["stages"]}
        chosen = {name: task.settings[name] for name in ("steps", "restarts", "timeout")}
        self.settings = StageSettings(**chosen)

    def decide(self, batch: Batch) -> Iterator[Record]:
        """Yield a record per sample, as each is decided."""
        indices, x, labels = map(torch.from_numpy, (batch.indices, batch.x, batch.labels))
        return decide(
            self.subject,
            Samples(indices, x.to(self.device), labels.to(self.device), self.task.eps),
            stages=self.stages,
            settings=self.settings,
            keep=self._keep,
            known=batch.known,
            seed=self.task.settings["seed"],
        )

    def _keep(self, index: int, point: Tensor) -> str:
        """Store a counterexample and return its name relative to the run folder."""
        buffer = io.BytesIO()
        np.save(buffer, point.cpu().numpy(), allow_pickle=False)
        path = self.task.run.counterexample(index)
        write_bytes(path, buffer.getvalue(), own_folder=True)
        return f"{path.parent.name}/{path.name}"


def decide_here(
    task: Task, batches: Iterable[Batch], device: torch.device, add: Add, notice: Notice
) -> None:
    """Decide batches one after the other in this process."""
    decider = Decider(task, device)
    for batch in batches:
        for record in decider.decide(batch):
            add(record)
            notice(False)
        notice(True)


# --- the parent ---------------------------------------------------------------------------------


def decide_in_workers(
    task: Task,
    batches: Iterable[Batch],
    device: torch.device,
    add: Add,
    notice: Notice,
    lock: Lock,
    *,
    workers: int,
    threads: int,
) -> None:
    """Decide batches in processes of `threads` threads each; `add` runs in this one only.

    However this ends, no worker survives, and all that they had sent is added. A worker that
    dies is an error. The workers share in the lock of the run: if this process is killed, nobody
    else gets it before they have ended.
    """
    crew: list[_Worker] = []
    try:
        with _on_their_own(), children_sleep_while_waiting():
            for _ in range(workers):
                crew.append(_Worker(device, threads, lock))
                crew[-1].start()
        _hand_out(crew, task.to_bytes(), iter(batches), add, notice)
    except BaseException:
        _stop(crew)
        for worker in crew:
            for record in worker.last_records():
                add(record)
        raise
    finally:
        _stop(crew)
        for worker in crew:
            worker.pipe.close()
        task.run.tidy()  # what a stopped worker was just writing


class _Worker:
    """The parent's side of a worker process."""

    def __init__(self, device: torch.device, threads: int, lock: Lock) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, self.far_end = context.Pipe()
        # A daemon: at the latest it ends when this process does.
        self.process: SpawnProcess = context.Process(
            target=work, args=(self.far_end, str(device), threads, lock), daemon=True
        )
        self.batch: Batch | None = None
        self.informed = False

    def start(self) -> None:
        """Start the process; from then on the other end of the pipe is the worker's alone."""
        self.process.start()
        self.far_end.close()

    def give(self, task: bytes, batch: Batch | None) -> None:
        """Hand out the next batch, or dismiss the worker."""
        self.batch = batch
        if batch is None:
            self.pipe.close()
            return
        with suppress(OSError):  # a dead worker is found when its answer is awaited
            if not self.informed:
                self.pipe.send_bytes(task)
            self.informed = True
            self.pipe.send(batch)

    def last_records(self) -> Iterator[Record]:
        """Yield what a stopped worker had sent and nobody has read yet."""
        with suppress(EOFError, OSError):  # also a message that is torn
            while not self.pipe.closed:
                message = self.pipe.recv()
                if isinstance(message, Record):
                    yield message

    def death(self) -> UserError:
        """Return the error that tells of the end of this worker."""
        self.process.join(timeout=5)
        code = self.process.exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f" ({signal.strsignal(-code)})" if code < 0 else ""
        return _continue_later(f"a worker process {how}{reason}", self.batch)


def _continue_later(what: str, batch: Batch | None) -> UserError:
    where = f" on {batch}" if batch else " before its first batch"
    return UserError(
        f"{what}{where}; what is finished is saved, run it again to continue "
        "(with fewer jobs if memory is short)"
    )


def _hand_out(
    crew: list[_Worker], task: bytes, batches: Iterator[Batch], add: Add, notice: Notice
) -> None:
    """Give batches to whoever is free and add what comes back, until all are dismissed."""
    while pipes := [worker.pipe for worker in crew if not worker.pipe.closed]:
        ready = connection.wait(pipes)
        for worker in (worker for worker in crew if worker.pipe in ready):
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                raise worker.death() from None
            if isinstance(message, Record):
                add(message)
                notice(False)
            elif isinstance(message, Exception):
                raise _explained(message, worker.batch)
            else:
                finished = worker.batch is not None
                worker.give(task, next(batches, None))
                if finished:
                    notice(True)


def _explained(error: Exception, batch: Batch | None) -> Exception:
    """Return a worker's error, or what to do about it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    ):
        return _continue_later("a worker process ran out of memory", batch)
    return error


def _stop(crew: list[_Worker]) -> None:
    """End all workers at once; those that were dismissed are about to end anyway."""
    started = [worker.process for worker in crew if worker.process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
    for worker in crew:
        worker.far_end.close()  # still open if the start was interrupted


@contextmanager
def _on_their_own() -> Iterator[None]:
    """Start processes that neither see Ctrl-C nor run the caller's script again.

    A terminal sends the interrupt to all processes; only the parent shall react. And a worker
    needs nothing of a script that, without a guard, would train or certify in each worker.
    """
    script = sys.modules["__main__"]
    block = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if block:
        resource_tracker.ensure_running()  # later on, its start would lift the block
    before = block(signal.SIG_BLOCK, {signal.SIGINT}) if block else None
    try:
        sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = script
        if block:
            block(signal.SIG_SETMASK, before)


# --- the worker ---------------------------------------------------------------------------------


def work(pipe: connection.Connection, device: str, threads: int, lock: Lock) -> None:
    """Decide the batches that come through the pipe until it is closed.

    The lock is only held: it ends with this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, ConnectionError):  # dismissed, or the parent is gone
        try:
            _decide_all(pipe, device)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            pipe.send(_portable(error))


def _decide_all(pipe: connection.Connection, device: str) -> None:
    pipe.send(None)  # free
    content = io.BytesIO(pipe.recv_bytes())
    task: Task = torch.load(content, map_location=device, weights_only=False)
    decider = Decider(task, torch.device(device))
    while True:
        for record in decider.decide(pipe.recv()):
            pipe.send(record)
        pipe.send(None)


def _end_with_parent() -> None:
    """End this process, whatever it is doing, when its parent is gone, killed or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """Return an error that survives the way to the parent, with the story of its origin."""
    story = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker process:\n{story}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(story)
    return error
