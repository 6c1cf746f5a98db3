"""Several processes certify as one does: same records, none lost, none twice.

Starting a process imports torch, so most tests here talk to the parts without one.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.spawn
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hangs import PATIENCE

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.certification import workers
from tightrope.runs import Run
from tightrope.runs.journal import Record
from tightrope.runs.lock import Lock

certify_module = importlib.import_module("tightrope.certification.certifying")

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "BATCH", 2)
    monkeypatch.setattr(certify_module, "PROGRESS_SECONDS", float("inf"))


def certify(run: Run, **options: Any) -> tr.Certification:
    defaults = {"stages": ("ibp", "attack", "bab"), "steps": 10, "restarts": 2}
    return tr.certify(run, **{**defaults, **options})


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "times")}
    return value


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.journal.read_text().splitlines()]


def results(run: Run) -> tuple[Any, Any, dict[str, bytes]]:
    """Return everything that a certification leaves behind, apart from times and order."""
    records = sorted(map(timeless, lines(run)), key=lambda r: r["index"])
    summary = timeless(json.loads(run.certification.read_text()))
    return records, summary, {p.name: p.read_bytes() for p in run.counterexamples.iterdir()}


@pytest.fixture
def clean(certifiable: Run, tmp_path: Path) -> Run:
    """A copy of the run, certified by one process."""
    copy = Run(tmp_path / "clean")
    shutil.copytree(certifiable.folder, copy.folder)
    certify(copy)
    return copy


class _Stop(Exception):
    pass


# --- with processes -----------------------------------------------------------------------------


def test_two_jobs_give_the_records_of_one(certifiable: Run, clean: Run) -> None:
    seen: list[tr.Certification] = []
    summary = certify(certifiable, jobs=2, progress=seen.append)
    assert results(certifiable) == results(clean)
    assert len(lines(certifiable)) == 10
    assert len(seen) == 5 and seen[-1] == summary
    known = [s.samples - s.open for s in seen]
    assert known == sorted(known)
    assert not multiprocessing.active_children()


def test_one_job_resumes_what_two_began(certifiable: Run, clean: Run) -> None:
    def stop(summary: tr.Certification) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        certify(certifiable, jobs=2, progress=stop)
    assert not multiprocessing.active_children()
    done = certifiable.journal.read_bytes()
    assert 2 <= done.count(b"\n") < 10
    certifiable.journal.write_bytes(done[:-20])  # torn
    certify(certifiable, jobs=1)
    assert certifiable.journal.read_bytes().startswith(done[: done[:-1].rfind(b"\n") + 1])
    assert results(certifiable) == results(clean)


def test_an_error_in_a_worker_is_that_of_one_process(certifiable: Run) -> None:
    certify(certifiable, stages=("ibp",))
    certifiable.clear_certification()
    certifiable.counterexamples.write_text("not a folder")
    with pytest.raises(FileExistsError) as caught:
        certify(certifiable, jobs=2)
    assert Path(caught.value.filename).name == "counterexamples"
    assert "in a worker process" in "".join(caught.value.__notes__)
    assert not multiprocessing.active_children()
    certifiable.counterexamples.unlink()
    assert certify(certifiable).complete


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_by_the_workers(certifiable: Run) -> None:
    script = certifiable.folder / "script.py"
    script.write_text(
        "import tightrope as tr\n"
        "from tightrope.certification import certifying\n"
        "certifying.BATCH = 2\n"
        "print('here')\n"
        f"print(tr.certify({str(certifiable.folder)!r}, steps=5, jobs=2).complete)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr) == ("here\nTrue\n", "")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"jobs": 0}, "jobs"),
        ({"jobs": -3}, "jobs"),
        *(({"timeout": t}, "timeout") for t in (0, 0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_jobs_and_timeouts_that_make_no_sense(
    certifiable: Run, options: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(tr.UserError, match=fragment) as caught:
        certify(certifiable, **options)
    assert "\n" not in str(caught.value)
    assert not certifiable.journal.exists()


def test_the_timeout_is_a_setting_and_the_number_of_jobs_is_not(certifiable: Run) -> None:
    settings = certify(certifiable, timeout=7).settings
    assert settings["timeout"] == 7.0 and "jobs" not in settings
    assert certify(certifiable, timeout=7.0, jobs=2).complete
    written = json.loads(certifiable.certification.read_text())
    del written["settings"]["timeout"]
    certifiable.certification.write_text(json.dumps(written))
    with pytest.raises(tr.UserError, match=r"timeout.*--force"):
        certify(certifiable, timeout=7)


@pytest.mark.parametrize(
    ("jobs", "samples", "workers", "threads"),
    [(1, 10, 1, 1), (8, 2, 1, 1), (8, 1, 1, 1), (2, 10, 2, 4), (8, 6, 3, 1), (3, 10, 3, 2)],
)
def test_workers_and_threads(
    certifiable: Run,
    monkeypatch: pytest.MonkeyPatch,
    jobs: int,
    samples: int,
    workers: int,
    threads: int,
) -> None:
    """No more workers than batches, none for one, and each has its part of the threads."""
    asked: list[tuple[int, int]] = []

    def instead(
        task: Any, todo: Any, device: Any, add: Any, notice: Any, lock: Lock, **numbers: int
    ) -> None:
        asked.append((numbers["workers"], numbers["threads"]))
        certify_module.decide_here(task, todo, device, add, notice)

    monkeypatch.setattr(certify_module, "decide_in_workers", instead)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert certify(certifiable, jobs=jobs, samples=samples).complete
    assert asked == ([(workers, threads)] if workers > 1 else [])


def test_progress_within_a_long_batch(certifiable: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(certify_module, "BATCH", 10)
    seen: list[tr.Certification] = []
    certify(certifiable, progress=seen.append)
    assert [s.open for s in seen] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]


# --- parts, without processes -------------------------------------------------------------------


def record(index: int) -> Record:
    return Record(index, 0, 0, Verdict.VERIFIED, "ibp", 1.0, 0.5, {"ibp": 0.5})


def batch() -> workers.Batch:
    return workers.Batch(np.array([40, 41]), np.zeros((2, 2), np.float32), np.array([0, 1]))


@pytest.mark.parametrize("torn", [b"", b"\x00", b"\x00\x00\x00\x50", b"\x00\x00\x00\x50abc"])
def test_what_a_stopped_worker_had_sent_is_kept(torn: bytes) -> None:
    worker = workers._Worker(CPU, 1, Lock(None))
    worker.far_end.send(record(1))
    worker.far_end.send(None)
    worker.far_end.send(ValueError("of no interest any more"))
    worker.far_end.send(record(2))
    os.write(worker.far_end.fileno(), torn)
    workers._stop([worker])
    assert list(worker.last_records()) == [record(1), record(2)]
    assert worker.pipe.closed or not list(worker.last_records())


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
    told = workers._explained(workers._portable(error), batch())
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

    told = workers._portable(Local("lost luggage"))
    assert type(told) is RuntimeError and "lost luggage" in str(told)


@pytest.mark.parametrize(
    ("code", "given", "fragments"),
    [
        (-signal.SIGKILL, True, ("signal 9 (Killed)", "samples 40 to 41", "again")),
        (3, True, ("exit code 3", "samples 40 to 41", "again")),
        (-signal.SIGSEGV, False, ("signal 11", "before its first batch", "again")),
    ],
)
def test_the_end_of_a_worker_is_told_in_one_line(
    code: int, given: bool, fragments: tuple[str, ...]
) -> None:
    class Ended:
        exitcode = code

        def join(self, timeout: float) -> None:
            """It has ended already."""

    worker = workers._Worker(CPU, 1, Lock(None))
    worker.process = Ended()  # type: ignore[assignment]
    worker.batch = batch() if given else None
    message = str(worker.death())
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_workers_start_without_the_callers_script_and_without_interrupts() -> None:
    script = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(_Stop), workers._on_their_own():
        prepared = multiprocessing.spawn.get_preparation_data("worker")
        assert not any(name.startswith("init_main") for name in prepared)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        raise _Stop
    assert sys.modules["__main__"] is script
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_a_task_travels_with_its_weights(certifiable: Run) -> None:
    module, architecture = certifiable.network()
    settings = {"stages": ["ibp"], "steps": 1, "restarts": 1, "timeout": 1.0, "seed": 0}
    task = workers.Task(
        certifiable, module, architecture.input_shape, certifiable.settings().eps, settings
    )
    near, far = multiprocessing.Pipe()
    near.send_bytes(task.to_bytes())
    near.send(batch())
    near.send(batch())
    ended = []

    def serve() -> None:
        with pytest.raises(EOFError):
            workers._decide_all(far, "cpu")
        ended.append(True)

    thread = threading.Thread(target=serve)
    thread.start()
    messages = [near.recv() for _ in range(7)]
    near.close()
    thread.join(PATIENCE)
    expected = list(workers.Decider(task, CPU).decide(batch()))
    assert ended and messages[0] is None and messages[3] is None and messages[6] is None
    for got in (messages[1:3], messages[4:6]):
        assert [(r.index, r.verdict, r.margin) for r in got] == [
            (r.index, r.verdict, r.margin) for r in expected
        ]
