"""Two commands on one run folder: one at a time, and the other one is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import (
    PATIENCE,
    SCRIPT,
    SMALL,
    Commands,
    Outcome,
    assert_refused,
    environment,
    json_lines,
    temporary_files,
    unchanged,
)

import tightrope as tr
from tightrope.runs import Run

QUICK = ("--samples", "20", "--steps", "3", "--restarts", "1")
CERTIFY = ("certify", "run", *QUICK)
EQUAL = tuple(a for i, a in enumerate(SMALL) if "--method" not in (a, SMALL[i - 1]))
COMPARE = ("compare", "--methods", "ibp", "--out", ".", "--samples", "20", *EQUAL)
WRITERS = {
    "certify": CERTIFY,
    "certify --force": (*CERTIFY, "--force"),
    "certify --jobs": (*CERTIFY, "--jobs", "2"),
    "attack": ("attack", "run", *QUICK),
    "estimate": ("estimate", "run", *QUICK),
    "train --resume": ("train", "--out", "run", "--resume"),
    "train --force": ("train", "--out", "run", *SMALL, "--force"),
}


@contextmanager
def in_use(run: Path, command: str = "certify") -> Iterator[None]:
    """Hold the lock of a run, as another command."""
    with Run(run).lock(command):
        yield


# --- refused or waiting ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_in_use_is_refused(commands: Commands, run: Path, name: str) -> None:
    with in_use(run), unchanged(run):
        outcome = commands.run(*WRITERS[name], cwd=run.parent)
    who = f"tightrope certify (process {os.getpid()} on "
    assert_refused(outcome, "run is in use by", who, ", since ", "--wait")


@pytest.mark.parametrize("name", WRITERS)
def test_waiting_for_a_run_in_use(commands: Commands, run: Path, name: str) -> None:
    with in_use(run):
        running = commands.start(*WRITERS[name], "--wait", cwd=run.parent)
        assert running.wait(0.5) is None
    outcome = running.wait()
    assert outcome is not None and outcome.code == 0, outcome
    assert not temporary_files(run)
    # It says that it waits, unless it was not even there while the run was in use.
    assert outcome.err == "" or (
        outcome.err.startswith("tightrope: waiting: run is in use by tightrope certify (process ")
        and outcome.err.count("\n") == 1
    )


def test_waiting_is_told(run: Path) -> None:
    """Nothing is written as long as somebody else is at work."""
    told: list[str] = []
    ended = threading.Event()

    def hold() -> None:
        with in_use(run):
            held.set()
            ended.wait(PATIENCE)

    def tell(reason: str) -> None:
        told.append(reason)
        assert not Run(run).journal.exists()
        ended.set()

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    assert tr.certify(run, samples=5, steps=3, wait=tell).complete
    thread.join(PATIENCE)
    assert len(told) == 1 and f"process {os.getpid()}" in told[0]


@pytest.mark.parametrize("command", ["report", "export"])
def test_readers_need_no_lock(commands: Commands, run: Path, command: str) -> None:
    options = ("--onnx", "net.onnx") if command == "export" else ()
    with in_use(run):
        assert commands.run(command, "run", *options, cwd=run.parent).code == 0


def test_comparing_a_run_in_use(commands: Commands, tmp_path: Path, run: Path) -> None:
    run.rename(tmp_path / "ibp-0")
    with in_use(tmp_path / "ibp-0"):
        outcome = commands.run(*COMPARE, cwd=tmp_path)
        assert outcome.code == 1, outcome
        assert "ibp-0 is in use by tightrope certify" in " ".join(outcome.out.split())
        running = commands.start(*COMPARE, "--wait", cwd=tmp_path)
        assert running.wait(0.5) is None
    outcome = running.wait()
    assert outcome is not None and outcome.code == 0, outcome


def test_bad_settings_are_refused_before_waiting(commands: Commands, run: Path) -> None:
    with in_use(run), unchanged(run):
        wait = (*CERTIFY, "--wait", "--stages", "magic")
        assert_refused(commands.run(*wait, cwd=run.parent), "magic")
        wait = ("train", "--out", "run", "--wait", *SMALL, "--force", "--set", "epochs=0")
        assert_refused(commands.run(*wait, cwd=run.parent), "epochs")


def test_a_folder_that_somebody_else_has_filled_meanwhile(run: Path, tmp_path: Path) -> None:
    """What was checked before waiting is checked again: two trainings do not mix."""
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    ended, held = threading.Event(), threading.Event()

    def hold() -> None:
        with in_use(fresh, "train"):
            held.set()
            ended.wait(PATIENCE)

    def fill(reason: str) -> None:
        shutil.copytree(run, fresh, dirs_exist_ok=True)
        ended.set()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    with pytest.raises(tr.UserError, match="already holds a run"):
        tr.train(out=fresh, net="mlp", epochs=1, annealing_epochs=0, wait=fill)
    thread.join(PATIENCE)
    assert (fresh / "config.toml").read_bytes() == (run / "config.toml").read_bytes()


# --- really two processes -----------------------------------------------------------------------


def both(cwd: Path, *arguments: str) -> list[Outcome]:
    """Run a command twice at the same time, as two people would."""
    processes = [
        subprocess.Popen(
            [SCRIPT, *arguments],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outcomes = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE)
        outcomes.append(Outcome(process.returncode, out, err))
    return outcomes


def assert_one_certification(run: Path, samples: int) -> None:
    records = json_lines(run / "certification.jsonl")
    assert sorted(record["index"] for record in records) == list(range(samples))
    summary = json.loads((run / "certification.json").read_text())
    assert summary["complete"] and summary["samples"] == samples
    assert not temporary_files(run)


def test_two_certifications_at_once(commands: Commands, run: Path) -> None:
    """They had written two lines per sample."""
    options = ("--samples", "300", "--steps", "20", "--restarts", "1")
    outcomes = both(run.parent, "certify", "run", *options)
    assert 0 in [outcome.code for outcome in outcomes], outcomes
    for outcome in outcomes:
        assert outcome.code == 0 or "in use by tightrope certify" in outcome.err, outcome
    assert_one_certification(run, 300)
    assert commands.run("certify", "run", *options, cwd=run.parent).code == 0


def test_two_trainings_at_once(finished_run: Path, tmp_path: Path) -> None:
    outcomes = both(tmp_path, "train", "--out", "run", *SMALL)
    codes = sorted(outcome.code for outcome in outcomes)
    assert codes == [0, 2], outcomes
    (refusal,) = (outcome.err for outcome in outcomes if outcome.code)
    assert "in use by tightrope train" in refusal or "already holds a run" in refusal
    for name in ("config.toml", "model.json", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (finished_run / name).read_bytes()
    history = json_lines(tmp_path / "run" / "history.jsonl")
    assert [record["epoch"] for record in history] == [0, 1, 2, 3]
    assert not temporary_files(tmp_path / "run")


# --- killed ---------------------------------------------------------------------------------------


def test_a_killed_command_leaves_no_lock(commands: Commands, run: Path) -> None:
    running = commands.start(*CERTIFY[:2], "--steps", "1000000", cwd=run.parent)
    while not (run / "certification.json").exists():
        assert running.wait(0.01) is None
    running.kill(signal.SIGKILL)
    outcome = running.wait()
    assert outcome is not None and outcome.code == -signal.SIGKILL
    assert (run / ".tightrope.lock").exists()
    assert commands.run(*CERTIFY, "--force", cwd=run.parent).code == 0
    assert not temporary_files(run)


def test_a_training_may_begin_where_a_lock_was_left(commands: Commands, tmp_path: Path) -> None:
    """A kill before the first file leaves a folder with a lock in it, which is as good as none."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".tightrope.lock").write_text("")
    assert commands.run("train", "--out", "run", *SMALL, cwd=tmp_path).code == 0
    assert not temporary_files(tmp_path / "run")
