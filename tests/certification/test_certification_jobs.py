"""Several processes certify as one does: same records, none lost, none twice.

Starting a process imports torch, so most tests here talk to the parts without one.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hangs import PATIENCE

import tightrope as tr
from tightrope.certification.deciding import Batch, Decider, Task
from tightrope.runs import Run
from tightrope.runs.journal import Record
from tightrope.runs.lock import Lock

certify_module = importlib.import_module("tightrope.certification.session")
engine_module = importlib.import_module("tightrope.parallel.engine")

pytestmark = pytest.mark.usefixtures("one_thread")


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
        "from tightrope.certification import session\n"
        "session.BATCH = 2\n"
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

    def instead(task: Any, todo: Any, watcher: Any, **options: Any) -> None:
        asked.append((options["workers"], options["threads"]))
        assert isinstance(options["share"], Lock)
        engine_module.run_here(task, todo, watcher)

    monkeypatch.setattr(engine_module, "run_in_processes", instead)
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


def batch() -> Batch:
    return Batch(np.array([40, 41]), np.zeros((2, 2), np.float32), np.array([0, 1]))


def test_a_task_travels_with_its_weights(certifiable: Run) -> None:
    module, architecture = certifiable.network()
    settings = {"stages": ["ibp"], "steps": 1, "restarts": 1, "timeout": 1.0, "seed": 0}
    task = Task(
        *(certifiable, module, architecture.input_shape, certifiable.settings().eps, settings),
        torch.device("cpu"),
    )
    sent = pickle.dumps(partial(Decider, task))
    certifiable.weights.unlink()
    expected: list[Record] = []
    Decider(task)(batch(), expected.append)
    assert len(expected) == 2
    work = pickle.loads(sent)()
    for _ in range(2):
        got: list[Record] = []
        work(pickle.loads(pickle.dumps(batch())), got.append)
        assert [(r.index, r.verdict, r.margin) for r in got] == [
            (r.index, r.verdict, r.margin) for r in expected
        ]


def test_what_a_dead_worker_had_sent_is_neither_lost_nor_doubled(
    certifiable: Run, clean: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch is decided again by another worker, who is told what is known."""
    known: list[set[int]] = []

    def instead(prepare: Any, items: Any, watcher: Any, **_: Any) -> None:
        work = prepare()
        for item in items:
            sent: list[Record] = []
            work(watcher.give(item), sent.append)
            watcher.message(item, sent[0])  # and dies
            again = watcher.give(item)
            known.append(set(again.known))
            for record in [*sent, *sent]:
                watcher.message(again, record)
            watcher.finished(again, None)

    monkeypatch.setattr(engine_module, "run_in_processes", instead)
    assert certify(certifiable, jobs=2).complete
    assert len(lines(certifiable)) == 10 and results(certifiable) == results(clean)
    assert len(known) == 5 and all(len(indices) == 1 for indices in known)
