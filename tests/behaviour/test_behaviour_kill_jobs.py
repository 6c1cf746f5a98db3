"""`certify --jobs`: killed or interrupted anywhere, nothing is lost, doubled or left running."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import (
    SCRIPT,
    Commands,
    assert_refused,
    environment,
    json_lines,
    temporary_files,
)
from hangs import PATIENCE
from moments import Moment
from processes import children, is_alive, wait_for, wait_until_gone

TIMES = ("seconds", "times")
SAMPLES = 4000  # several batches for each worker
CERTIFY = ("certify", "run", "--samples", str(SAMPLES), "--eps", "0.03", "--steps", "30")
CERTIFY = (*CERTIFY, "--stages", "ibp,attack")
WORKER = "spawn_main"  # part of the command lines of workers, and of theirs alone


# --- results --------------------------------------------------------------------------------------


def lines(run: Path) -> int:
    journal = run / "certification.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return value


def results(run: Path) -> tuple[Any, Any, dict[str, bytes]]:
    """Return everything that a certification leaves behind, apart from times and order."""
    records = json_lines(run / "certification.jsonl", without=TIMES)
    summary = timeless(json.loads((run / "certification.json").read_text()))
    points = {p.name: p.read_bytes() for p in (run / "counterexamples").iterdir()}
    return sorted(records, key=lambda r: r["index"]), summary, points


@pytest.fixture(scope="module")
def clean(
    commands: Commands, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, dict[str, bytes]]:
    """What one process finds without any interruption."""
    folder = tmp_path_factory.mktemp("clean")
    shutil.copytree(finished_run, folder / "run")
    outcome = commands.run(*CERTIFY, cwd=folder)
    assert outcome.code == 0, outcome.err
    found = results(folder / "run")
    assert len(found[0]) == SAMPLES and found[2]
    return found


def finish(commands: Commands, run: Path, jobs: int, clean: tuple[Any, ...]) -> None:
    """Let the certification come to its end and compare it with that of one process."""
    before = (run / "certification.jsonl").read_bytes()
    outcome = commands.run(*CERTIFY, "--jobs", str(jobs), cwd=run.parent)
    assert outcome.code == 0, outcome.err
    assert not outcome.err
    after = (run / "certification.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])  # nothing was written anew
    assert results(run) == clean
    assert not temporary_files(run)


# --- kills ----------------------------------------------------------------------------------------


def workers(parent: int) -> list[int]:
    """Return the workers of a command; multiprocessing has a helper besides."""
    found = []
    for pid in children(parent):
        try:
            if WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def after_records(count: int, dice: random.Random | None = None) -> Moment:
    """Some time after the command has received so many records from its workers."""
    return Moment("record", count, calls=dice.randint(1, 3000) if dice else 0)


def after_changes(count: int, dice: random.Random) -> Moment:
    """Some time after the command, on its own, has stored so many counterexamples or so."""
    return Moment("change", 2 * count, calls=dice.randint(1, 3000))


def at_the_start(dice: random.Random) -> Moment:
    """While a worker imports; it signals to its parent."""
    module = dice.choice(
        ("numpy", "torch", "torch.nn.functional", "tightrope.certification.cascade")
    )
    return Moment(f"import {module}", where=WORKER, to="parent")


def kill_parent(commands: Commands, run: Path, jobs: int, moment: Moment) -> None:
    """Kill the parent at some moment; its workers must end by themselves."""
    moment = replace(moment, noted=str(run.parent / "family"))
    Path(moment.noted).unlink(missing_ok=True)
    outcome = commands.run(*CERTIFY, "--jobs", str(jobs), cwd=run.parent, moment=moment)
    assert outcome.code == -signal.SIGKILL
    family = moment.family()
    assert family if jobs > 1 else True
    wait_until_gone(family, PATIENCE)


def test_parent_killed_and_resumed(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    kill_parent(commands, run, 2, after_records(300, random.Random(3)))
    assert 0 < lines(run) < SAMPLES
    finish(commands, run, 1, clean)


def test_workers_do_not_finish_their_batch_for_a_dead_parent(commands: Commands, run: Path) -> None:
    """The attack would take hours, and until it is over there is nothing to send."""
    endless = ("--steps", "1000000", "--jobs", "2")
    running = commands.start(*CERTIFY, *endless, cwd=run.parent)
    wait_for(lambda: lines(run) > 0, PATIENCE, running.pid)
    family = children(running.pid)
    assert len(workers(running.pid)) == 2
    running.kill()
    wait_until_gone(family, PATIENCE)
    outcome = running.wait()
    assert outcome is not None and outcome.code == -signal.SIGKILL


def is_free(run: Path) -> bool:
    """Whether nobody has the lock of a run."""
    with (run / ".tightrope.lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_the_lock_is_held_until_the_last_worker_has_ended(commands: Commands, run: Path) -> None:
    """One that has not noticed yet may still write a counterexample."""
    running = commands.start(*CERTIFY, "--jobs", "2", cwd=run.parent)
    wait_for(lambda: lines(run) > 0, PATIENCE, running.pid)
    family, crew = children(running.pid), workers(running.pid)
    assert not is_free(run)
    os.kill(crew[0], signal.SIGSTOP)
    running.kill()
    wait_for(lambda: not is_alive(running.pid), PATIENCE)
    assert not is_free(run)
    os.kill(crew[0], signal.SIGKILL)
    wait_until_gone(family, PATIENCE)
    assert is_free(run)
    outcome = running.wait()  # not before: the worker has its output open
    assert outcome is not None and outcome.code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_parent_killed_many_times_with_changing_jobs(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]], seed: int
) -> None:
    dice = random.Random(seed)
    for _ in range(8):
        jobs = dice.choice((1, 2, 2, 3))
        if jobs == 1:
            moment = after_changes(dice.randint(3, 20), dice)
        elif dice.random() < 0.3:
            moment = at_the_start(dice)
        else:
            moment = after_records(dice.randint(1, 300), dice)
        kill_parent(commands, run, jobs, moment)
    assert 0 < lines(run) < SAMPLES
    finish(commands, run, dice.choice((1, 2, 3)), clean)


def test_one_worker_killed(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    """Another one takes its batch, and nobody notices: no sample is lost, none is there twice."""
    # More than a batch, so that both workers have begun.
    noted = str(run.parent / "family")
    moment = Moment("record", SAMPLES // 4, to="worker", noted=noted)
    outcome = commands.run(*CERTIFY, "--jobs", "2", cwd=run.parent, moment=moment)
    assert (outcome.code, outcome.err) == (0, "")
    wait_until_gone(moment.family(), PATIENCE)
    assert lines(run) == SAMPLES and results(run) == clean
    assert not temporary_files(run)


def test_every_worker_killed_by_the_same_batch(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    """One line says which samples they had; what they found is kept."""
    moment = Moment("change", 3, where=WORKER)  # in the middle of a batch
    outcome = commands.run(*CERTIFY, "--jobs", "2", cwd=run.parent, moment=moment)
    assert_refused(outcome, "3 times a worker", "signal 9", "samples ", "again")
    assert 0 < lines(run) < SAMPLES
    assert not temporary_files(run)
    finish(commands, run, 1, clean)


@pytest.mark.slow
def test_workers_killed_before_they_began(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    moment = Moment("import torch.nn.functional", where=WORKER)
    outcome = commands.run(*CERTIFY, "--jobs", "2", cwd=run.parent, moment=moment)
    assert_refused(outcome, "3 times a worker", "signal 9", "before it began", "again")
    finish(commands, run, 2, clean)


def test_ctrl_c_in_a_terminal(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    """A terminal interrupts the workers, too: still one line, 130, and nobody left."""
    moment = Moment("record", 300, signal.SIGINT, to="group", calls=1000, where=str(SCRIPT))
    interrupt(run, replace(moment, noted=str(run.parent / "family")))
    assert 0 < lines(run) < SAMPLES
    finish(commands, run, 1, clean)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_while_workers_start(run: Path, seed: int) -> None:
    moment = replace(at_the_start(random.Random(seed)), how=signal.SIGINT, to="group")
    interrupt(run, moment)
    assert lines(run) < SAMPLES


def interrupt(run: Path, moment: Moment) -> None:
    """Interrupt the real script and its workers at some moment, as a terminal does."""
    process = subprocess.Popen(
        [SCRIPT, *CERTIFY, "--jobs", "2"],
        cwd=run.parent,
        env=environment(moment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.lstrip("\n").startswith("tightrope: interrupted") and err.strip().count("\n") == 0
    assert not out.strip()
    assert not temporary_files(run)
    if moment.noted:
        family = moment.family()
        assert len(family) >= 2
        wait_until_gone(family, PATIENCE)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--jobs", "0"), "jobs must be at least 1, got 0"),
        (("--jobs", "-1"), "jobs must be at least 1"),
        (("--jobs", "two"), "two"),
        (("--jobs", "1.5"), "1.5"),
        (("--timeout", "0"), "timeout must be a positive number of seconds, got 0.0"),
        (("--timeout", "-1"), "timeout"),
        (("--timeout", "nan"), "timeout"),
        (("--timeout", "inf"), "timeout"),
        (("--timeout", "soon"), "soon"),
    ],
)
def test_bad_jobs_and_timeouts(
    commands: Commands, run: Path, options: tuple[str, str], fragment: str
) -> None:
    assert_refused(commands.run("certify", run, *options), fragment)
    assert not (run / "certification.jsonl").exists()
