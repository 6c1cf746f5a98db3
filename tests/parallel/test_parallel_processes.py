"""Work shared by processes: nothing is lost, nobody is left, and a death is not the end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hangs import PATIENCE
from parallel_tasks import Item, Nested, Seen, Squares, unable

import tightrope as tr
from tightrope.parallel import processes, run_here, run_in_processes
from tightrope.parallel.scheduler import Turn, Waiting
from tightrope.parallel.worker import Says, portable, work_through


class _Stop(Exception):
    pass


# --- with processes -------------------------------------------------------------------------------


def test_the_item_of_a_dead_worker_is_taken_by_another(tmp_path: Path) -> None:
    """Twice at most; then it fails, and the others are finished all the same."""
    seen = Seen()
    items = [Item(1), Item(2, deaths=2), Item(3), Item(4, deaths=9), Item(5), Item(6, error="user")]
    run_in_processes(partial(Squares, tmp_path), items, seen, workers=2, threads=3)
    assert seen.results == {1: 1, 2: 4, 3: 9, 5: 25}
    assert sorted(seen.given) == [1, 2, 2, 2, 3, 4, 4, 4, 5, 6]
    assert sorted(seen.messages) == [(number, 3, "3") for number in sorted(seen.given)]
    assert set(seen.errors) == {4, 6}
    death, error = seen.errors[4], seen.errors[6]
    assert type(death) is tr.UserError and "\n" not in str(death)
    for fragment in ("3 times a worker", "signal 9 (Killed)", "on number 4", "again"):
        assert fragment in str(death)
    assert type(error) is tr.UserError and str(error) == "user"
    assert "in a worker process" in "".join(error.__notes__)
    assert len(list(tmp_path.glob("worker-*"))) <= 2 + 5  # no more than have died
    assert not multiprocessing.active_children()
    assert "OMP_NUM_THREADS" not in os.environ or os.environ["OMP_NUM_THREADS"] != "3"


def test_a_worker_may_have_workers(tmp_path: Path) -> None:
    seen = Seen()
    run_in_processes(partial(Nested, tmp_path), [Item(2)], seen, workers=1, threads=1)
    assert seen.results == {2: 4 + 9} and not seen.errors


def test_who_cannot_begin_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        run_in_processes(unable, [Item(1)], Seen(), workers=1, threads=1)
    assert caught.value.filename == "weights"
    assert "in a worker process" in "".join(caught.value.__notes__)
    assert not multiprocessing.active_children()


def test_what_raises_in_the_parent_ends_all(tmp_path: Path) -> None:
    class Impatient(Seen):
        def finished(self, item: Item, result: int) -> None:
            raise _Stop

    seen = Impatient()
    with pytest.raises(_Stop):
        run_in_processes(
            partial(Squares, tmp_path), map(Item, range(1000)), seen, workers=1, threads=1
        )
    assert seen.given == [0, 1] and not multiprocessing.active_children()


# --- in this process ------------------------------------------------------------------------------


def test_the_same_without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen, items = Seen(), [Item(1), Item(2, error="user"), Item(3, error="key")]
    run_here(partial(Squares, tmp_path), items, seen)
    assert seen.results == {1: 1} and [m[0] for m in seen.messages] == seen.given == [1, 2, 3]
    assert type(seen.errors[2]) is tr.UserError and type(seen.errors[3]) is KeyError
    with pytest.raises(_Stop):
        run_here(_stop, items, processes.Watcher())


def _stop() -> Any:
    def work(item: Item, send: Any) -> None:
        raise _Stop

    return work


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"", b"\x00", b"\x00\x00\x00\x50", b"\x00\x00\x00\x50abc"])
def test_what_a_stopped_worker_had_sent_is_kept(torn: bytes) -> None:
    class Weary(Seen):
        def message(self, item: Item, message: Any) -> None:
            super().message(item, message)
            raise ValueError("of no interest any more")

    seen = Weary()
    crew: processes._Crew[Item] = processes._Crew(b"", Waiting(()), seen, 1, None)
    worker: processes._Worker[Item] = processes._Worker(1, None)
    worker.turn = Turn(Item(7))
    crew.members.append(worker)
    worker.far_end.send((Says.MESSAGE, (7, 1)))
    worker.far_end.send((Says.FAILED, ValueError("of no interest any more")))
    worker.far_end.send((Says.MESSAGE, (7, 2)))
    os.write(worker.far_end.fileno(), torn)
    crew.stop()
    crew.deliver_the_rest()
    assert seen.messages == [(7, 1), (7, 2)] and not seen.errors
    crew.deliver_the_rest()
    assert len(seen.messages) == 2
    worker.pipe.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), tr.UserError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), tr.UserError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), tr.UserError),
        (RuntimeError("something else"), RuntimeError),
        (OSError(28, "No space left on device", "x.npy"), OSError),
        (tr.UserError("as it is"), tr.UserError),
    ],
)
def test_errors_of_workers_are_explained(error: Exception, expected: type[Exception]) -> None:
    told = processes.explained(portable(error), "samples 40 to 41")
    assert type(told) is expected
    if expected is tr.UserError and type(error) is not tr.UserError:
        message = str(told)
        assert "memory" in message and "samples 40 to 41" in message and "again" in message
        assert "\n" not in message
    else:
        assert told is error


def test_an_error_that_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        """Not to be found by the parent."""

    told = portable(Local("lost luggage"))
    assert type(told) is RuntimeError and "lost luggage" in str(told)


@pytest.mark.parametrize(
    ("code", "given", "fragments"),
    [
        (-signal.SIGKILL, True, ("signal 9 (Killed)", "on number 40", "again")),
        (3, True, ("exit code 3", "on number 40", "again")),
        (-signal.SIGSEGV, False, ("signal 11", "before it began", "again")),
    ],
)
def test_the_end_of_a_worker_is_told_in_one_line(
    code: int, given: bool, fragments: tuple[str, ...]
) -> None:
    class Ended:
        exitcode = code

        def join(self, timeout: float) -> None:
            """It has ended already."""

    worker: processes._Worker[Item] = processes._Worker(1, None)
    worker.process = Ended()  # type: ignore[assignment]
    worker.turn = Turn(Item(40)) if given else None
    message = str(worker.death())
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_workers_start_without_the_callers_script_and_without_interrupts() -> None:
    script, environment = sys.modules["__main__"], dict(os.environ)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(_Stop), processes.on_their_own(5):
        prepared = multiprocessing.spawn.get_preparation_data("worker")
        assert not any(name.startswith("init_main") for name in prepared)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert os.environ["OMP_NUM_THREADS"] == "5"
        raise _Stop
    assert sys.modules["__main__"] is script and os.environ == environment
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_a_worker_sets_up_once_and_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    near, far = multiprocessing.Pipe()
    near.send_bytes(pickle.dumps(partial(Squares, tmp_path)))
    for item in (Item(1), Item(2, error="user"), Item(3)):
        near.send(item)
    ended = []

    def serve() -> None:
        with pytest.raises(EOFError):
            work_through(far)
        ended.append(True)

    thread = threading.Thread(target=serve)
    thread.start()
    said = [near.recv() for _ in range(8)]
    near.close()
    thread.join(PATIENCE)
    a_message, finished, failed = Says.MESSAGE, Says.FINISHED, Says.FAILED
    assert ended and [kind for kind, _ in said] == [
        *(Says.STARTED, Says.READY, a_message, finished, a_message, failed, a_message, finished)
    ]
    assert said[3][1] == 1 and str(said[5][1]) == "user" and said[7][1] == 9
