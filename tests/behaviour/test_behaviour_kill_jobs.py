"""`certify --jobs`: killed or interrupted anywhere, nothing is lost, doubled or left running."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import (
    PATIENCE,
    SCRIPT,
    Commands,
    assert_refused,
    environment,
    json_lines,
    temporary_files,
)

TIMES = ("seconds", "times")
SAMPLES = 4000  # several batches for each worker
CERTIFY = ("certify", "run", "--samples", str(SAMPLES), "--eps", "0.03", "--steps", "30")
CERTIFY = (*CERTIFY, "--stages", "ibp,attack")


# --- processes ------------------------------------------------------------------------------------


def process_stat(pid: int) -> tuple[str, int, str, int] | None:
    """Return state, parent, starting time and computing time, or None if there is no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19], int(fields[11]) + int(fields[12])


def children(parent: int) -> dict[int, str]:
    """Return the processes that `parent` has started, with their starting times."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        stat = process_stat(int(path.name))
        if stat is not None and stat[1] == parent:
            found[int(path.name)] = stat[2]
    return found


def workers(parent: int) -> list[int]:
    """Return the workers of a command; multiprocessing has a helper besides."""
    found = []
    for pid in children(parent):
        try:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def busiest(processes: list[int]) -> int:
    """Return the process that has computed most: once there are records, it has a batch."""
    stats = {pid: process_stat(pid) for pid in processes}
    return max(processes, key=lambda pid: stat[3] if (stat := stats[pid]) else 0)


def wait_for(condition: Callable[[], bool], pid: int | None = None) -> None:
    """Wait for something that is to happen while a process lives."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        assert pid is None or is_alive(pid), "it ended too early"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat[0] != "Z"


def wait_until_gone(processes: dict[int, str]) -> None:
    """Wait until none of these runs; whoever adopts them may take its time to bury them."""

    def gone() -> bool:
        stats = [(process_stat(pid), start) for pid, start in processes.items()]
        return all(s is None or s[0] == "Z" or s[2] != start for s, start in stats)

    wait_for(gone)


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


def kill_parent(commands: Commands, run: Path, jobs: int, moment: Callable[[int], None]) -> None:
    """Start, wait for the moment, kill the parent; its workers must end by themselves."""
    running = commands.start(*CERTIFY, "--jobs", str(jobs), cwd=run.parent)
    moment(running.pid)
    family = children(running.pid)
    assert family if jobs > 1 else True
    running.kill()
    outcome = running.wait()
    assert outcome is not None and outcome.code == -signal.SIGKILL
    wait_until_gone(family)


def at_the_start(dice: random.Random) -> Callable[[int], None]:
    """While the workers import torch."""

    def moment(pid: int) -> None:
        wait_for(lambda: bool(workers(pid)), pid)
        time.sleep(dice.uniform(0.0, 1.0))

    return moment


def after_progress(run: Path, dice: random.Random) -> Callable[[int], None]:
    """Soon after the journal has grown."""
    before = lines(run)

    def moment(pid: int) -> None:
        wait_for(lambda: lines(run) > before, pid)
        time.sleep(dice.uniform(0.0, 0.1))

    return moment


def test_parent_killed_and_resumed(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    kill_parent(commands, run, 2, after_progress(run, random.Random(3)))
    assert 0 < lines(run) < SAMPLES
    finish(commands, run, 2, clean)


def test_workers_do_not_finish_their_batch_for_a_dead_parent(commands: Commands, run: Path) -> None:
    """The attack would take hours, and until it is over there is nothing to send."""
    endless = ("--steps", "100000000", "--jobs", "2")
    running = commands.start(*CERTIFY, *endless, cwd=run.parent)
    wait_for(lambda: lines(run) > 0, running.pid)
    family = children(running.pid)
    assert len(workers(running.pid)) == 2
    running.kill()
    wait_until_gone(family)
    outcome = running.wait()
    assert outcome is not None and outcome.code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_parent_killed_many_times_with_changing_jobs(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]], seed: int
) -> None:
    dice = random.Random(seed)
    for _ in range(8):
        if lines(run) > 800:
            break
        jobs = dice.choice((1, 2, 2, 3))
        early = jobs > 1 and dice.random() < 0.3
        moment = at_the_start(dice) if early else after_progress(run, dice)
        kill_parent(commands, run, jobs, moment)
    finish(commands, run, dice.choice((1, 2, 3)), clean)


def test_one_worker_killed(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    """One line says which samples it had; what the other one found is kept."""
    running = commands.start(*CERTIFY, "--jobs", "2", cwd=run.parent)
    # More than a batch, so that both workers have begun.
    wait_for(lambda: lines(run) > SAMPLES // 4, running.pid)
    family = children(running.pid)
    os.kill(busiest(workers(running.pid)), signal.SIGKILL)
    outcome = running.wait()
    assert outcome is not None
    assert_refused(outcome, "worker", "signal 9", "samples ", "again")
    wait_until_gone(family)
    assert 0 < lines(run) < SAMPLES
    assert not temporary_files(run)
    finish(commands, run, 1, clean)


@pytest.mark.slow
def test_a_worker_killed_before_it_began(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    running = commands.start(*CERTIFY, "--jobs", "2", cwd=run.parent)
    wait_for(lambda: len(workers(running.pid)) == 2, running.pid)
    family = children(running.pid)
    os.kill(workers(running.pid)[1], signal.SIGKILL)
    outcome = running.wait()
    assert outcome is not None
    assert_refused(outcome, "worker", "signal 9", "again")
    wait_until_gone(family)
    finish(commands, run, 2, clean)


def test_ctrl_c_in_a_terminal(
    commands: Commands, run: Path, clean: tuple[Any, Any, dict[str, bytes]]
) -> None:
    """A terminal interrupts the workers, too: still one line, 130, and nobody left."""
    interrupt(run, lambda pid: wait_for(lambda: lines(run) > 0, pid))
    assert 0 < lines(run) < SAMPLES
    finish(commands, run, 1, clean)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_while_workers_start(run: Path, seed: int) -> None:
    interrupt(run, at_the_start(random.Random(seed)))
    assert lines(run) < SAMPLES


def interrupt(run: Path, moment: Callable[[int], None]) -> None:
    """Interrupt the real script and its workers at some moment, as a terminal does."""
    process = subprocess.Popen(
        [SCRIPT, *CERTIFY, "--jobs", "2"],
        cwd=run.parent,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        moment(process.pid)
        family = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.lstrip("\n").startswith("tightrope: interrupted") and err.strip().count("\n") == 0
    assert not out.strip()
    assert len(family) >= 2
    wait_until_gone(family)
    assert not temporary_files(run)


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
