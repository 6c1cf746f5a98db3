"""Ctrl-C: exit code 130, one line, and everything finished is kept."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from commands import PATIENCE, SCRIPT, SMALL, Commands, environment, temporary_files

LONG = (*SMALL, "--epochs", "25", "--set", "decay_epochs=20")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def assert_interrupted(code: int, err: str) -> None:
    assert "Traceback" not in err, err[-1500:]
    assert code == 130
    # Before the line there may be an end of line, for the ^C that a terminal shows.
    assert err.lstrip("\n").startswith("tightrope: interrupted") and err.strip().count("\n") == 0


def test_training_goes_on_where_ctrl_c_stopped_it(commands: Commands, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = commands.start("train", "--out", run, *LONG)
    wait_for(lambda: len(lines(run / "history.jsonl")) >= 3)
    running.kill(signal.SIGINT)
    outcome = running.wait()
    assert outcome is not None
    assert_interrupted(outcome.code, outcome.err)
    done = lines(run / "history.jsonl")
    assert 3 <= len(done) < 25
    assert not temporary_files(run)
    assert commands.run("train", "--out", run, "--resume").code == 0
    history = lines(run / "history.jsonl")
    assert len(history) == 25
    # At most the epoch in flight is trained again; the seconds of the others prove it.
    assert history[: len(done) - 1] == done[:-1]


def test_certifying_goes_on_where_ctrl_c_stopped_it(commands: Commands, run: Path) -> None:
    options = ("--samples", "2000", "--eps", "0.03", "--steps", "20", "--restarts", "1")
    running = commands.start("certify", run, *options)
    journal = run / "certification.jsonl"
    wait_for(lambda: len(lines(journal)) > 300)
    running.kill(signal.SIGINT)
    outcome = running.wait()
    assert outcome is not None
    assert_interrupted(outcome.code, outcome.err)
    done = lines(journal)
    assert 300 < len(done) < 2000
    assert commands.run("certify", run, *options).code == 0
    assert lines(journal)[: len(done)] == done
    assert len(lines(journal)) == 2000
    assert not temporary_files(run)


def test_ctrl_c_during_the_import(tmp_path: Path) -> None:
    """The first seconds are spent importing torch; people press Ctrl-C then, too."""
    process = subprocess.Popen(
        [SCRIPT, "train", "--out", tmp_path / "run", *SMALL],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: process.poll() is not None or "libtorch_python" in maps.read_text())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert_interrupted(process.returncode, err)
    assert not (tmp_path / "run").exists()
