"""Ctrl-C: exit code 130, one line, and everything finished is kept."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from commands import SCRIPT, SMALL, Commands, environment, temporary_files
from hangs import PATIENCE
from moments import Moment

LONG = (*SMALL, "--epochs", "25", "--set", "decay_epochs=20")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def assert_interrupted(code: int, err: str) -> None:
    assert "Traceback" not in err, err[-1500:]
    assert code == 130
    # Before the line there may be an end of line, for the ^C that a terminal shows.
    assert err.lstrip("\n").startswith("tightrope: interrupted") and err.strip().count("\n") == 0


def test_training_goes_on_where_ctrl_c_stopped_it(commands: Commands, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # In the middle of an epoch, after some that are finished.
    moment = Moment("change", 30, signal.SIGINT, calls=2000)
    outcome = commands.run("train", "--out", run, *LONG, cwd=tmp_path, moment=moment)
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
    journal = run / "certification.jsonl"
    moment = Moment("change", 200, signal.SIGINT, calls=2000)
    outcome = commands.run("certify", run, *options, cwd=run, moment=moment)
    assert_interrupted(outcome.code, outcome.err)
    done = lines(journal)
    assert 300 < len(done) < 2000
    assert commands.run("certify", run, *options).code == 0
    assert lines(journal)[: len(done)] == done
    assert len(lines(journal)) == 2000
    assert not temporary_files(run)


def test_merging_goes_on_where_ctrl_c_stopped_it(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    options = ("--samples", "60", "--eps", "0.03", "--steps", "20", "--restarts", "1")
    for shard in ("1/2", "2/2"):
        assert commands.run("certify", run, *options, "--shard", shard).code == 0
    whole = shutil.copytree(run, tmp_path / "whole")
    assert commands.run("merge", whole).code == 0
    for change in (1, 3, 6, 9):  # the lock, counterexamples, the summary, the journal
        moment = Moment("change", change, signal.SIGINT)
        outcome = commands.run("merge", run, cwd=run, moment=moment)
        assert_interrupted(outcome.code, outcome.err)
        assert len(lines(run / "certification.jsonl")) in (0, 60)
    assert commands.run("merge", run).code == 0
    assert merged(run) == merged(whole)
    assert not temporary_files(run)


def merged(run: Path) -> dict[str, bytes]:
    """Return what `merge` writes."""
    points = {path.name: path.read_bytes() for path in (run / "counterexamples").iterdir()}
    assert points
    names = ("certification.jsonl", "certification.json")
    return {**points, **{name: (run / name).read_bytes() for name in names}}


def test_ctrl_c_in_smoothing_leaves_nothing(commands: Commands, run: Path) -> None:
    before = {path.name for path in run.iterdir()}
    moment = Moment("change", 1, signal.SIGINT, calls=5000)  # after the lock
    outcome = commands.run("smooth", run, "--samples", "50", cwd=run, moment=moment)
    assert_interrupted(outcome.code, outcome.err)
    assert {path.name for path in run.iterdir()} - before <= {".tightrope.lock"}
    assert commands.run("smooth", run, "--samples", "5", "--draws", "50").code == 0


@pytest.mark.parametrize("module", ["tightrope.runs", "torch", "torch.nn.functional"])
def test_ctrl_c_during_the_import(tmp_path: Path, module: str) -> None:
    """The first seconds are spent importing torch; people press Ctrl-C then, too."""
    moment = Moment(f"import {module}", how=signal.SIGINT, where=str(SCRIPT))
    done = subprocess.run(
        [SCRIPT, "train", "--out", tmp_path / "run", *SMALL],
        env=environment(moment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        # Whoever started the tests may ignore interrupts (a background shell does).
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert_interrupted(done.returncode, done.stderr)
    assert not (tmp_path / "run").exists()
