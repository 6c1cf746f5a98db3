"""Killed at any moment and resumed, a run ends as if nothing had happened.

Once with the real script, too, and at random moments, ten kills in a row; once at every single
change that a command makes to a file.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from commands import SCRIPT, SMALL, Commands, environment, json_lines, temporary_files
from hangs import PATIENCE
from moments import Moment

TIMES = ("seconds", "validation_seconds", "times")
TRAIN = ("train", "--out", "run", *SMALL, "--epochs", "30", "--set", "decay_epochs=20", "--resume")
CERTIFY = ("certify", "run", "--samples", "1000", "--eps", "0.03", "--steps", "8")
CERTIFY = (*CERTIFY, "--restarts", "1")


# --- comparing runs -------------------------------------------------------------------------------


def assert_equal_tensors(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_tensors(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_equal_tensors(first, second)
    else:
        assert one == other


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_same_training(run: Path, clean: Path) -> None:
    for name in ("config.toml", "model.safetensors", "model.json"):
        assert (run / name).read_bytes() == (clean / name).read_bytes(), name
    histories = [json_lines(f / "history.jsonl", without=TIMES) for f in (run, clean)]
    assert histories[0] == histories[1]
    checkpoints = [torch.load(f / "checkpoint.pt", weights_only=True) for f in (run, clean)]
    assert_equal_tensors(*checkpoints)
    assert not temporary_files(run)
    assert names(run) == names(clean)


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return value


def assert_same_certification(run: Path, clean: Path) -> None:
    journals = [json_lines(f / "certification.jsonl", without=TIMES) for f in (run, clean)]
    assert journals[0] == journals[1]
    summaries = [json.loads((f / "certification.json").read_text()) for f in (run, clean)]
    assert timeless(summaries[0]) == timeless(summaries[1])
    for path in (clean / "counterexamples").iterdir():
        assert (run / "counterexamples" / path.name).read_bytes() == path.read_bytes()
    assert not temporary_files(run)
    assert names(run) == names(clean)


# --- ten kills in a row ----------------------------------------------------------------------


# Modules that every command imports on its way, the first and the last of them.
IMPORTS = ("click", "tightrope.runs", "numpy", "torch", "torch.nn.functional", "torch.autograd")


class Killer:
    """Starts a command again and again; it is killed before it is done."""

    def __init__(self, commands: Commands, arguments: tuple[str, ...], cwd: Path, seed: int):
        self.commands, self.arguments, self.cwd = commands, arguments, cwd
        self.random = random.Random(seed)
        self.kills = 0

    def during_import(self) -> None:
        """Kill the real script while it imports."""
        self._kill_real(Moment(f"import {self.random.choice(IMPORTS)}"))

    def real_after_progress(self) -> None:
        """Kill the real script some time after it has changed files."""
        self._kill_real(self._after_progress())

    def after_progress(self) -> None:
        """Kill a command, without the import, some time after it has changed files."""
        self._count(self._run(self._after_progress()))

    def during_a_write(self) -> None:
        """Kill a command, without the import, just before some change of a file."""
        self._count(self._run(Moment("change", self.random.randint(1, 12))))

    def _after_progress(self) -> Moment:
        changes, calls = self.random.randint(5, 12), self.random.randint(1, 3000)
        return Moment("change", changes, calls=calls)

    def _run(self, moment: Moment) -> int:
        return self.commands.run(*self.arguments, cwd=self.cwd, moment=moment).code

    def _kill_real(self, moment: Moment) -> None:
        moment = replace(moment, where=str(SCRIPT), folder=str(self.cwd.resolve()))
        done = subprocess.run(
            [SCRIPT, *self.arguments],
            cwd=self.cwd,
            env=environment(moment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
        self._count(done.returncode)

    def _count(self, code: int) -> None:
        assert code == -signal.SIGKILL, "it ended before it was killed"
        self.kills += 1

    def ten_times(self) -> None:
        """Kill ten times in a row, in all of these ways."""
        self.during_import()
        self.real_after_progress()
        self.during_a_write()
        self.after_progress()
        self.during_a_write()
        self.during_import()
        self.after_progress()
        self.during_a_write()
        self.after_progress()
        self.during_a_write()
        assert self.kills == 10


def test_training_killed_ten_times(commands: Commands, tmp_path: Path) -> None:
    clean, broken = tmp_path / "clean", tmp_path / "broken"
    for folder in (clean, broken):
        folder.mkdir()
    assert commands.run(*TRAIN, cwd=clean).code == 0
    Killer(commands, TRAIN, broken, seed=1).ten_times()
    finished = json_lines(broken / "run" / "history.jsonl")
    assert 4 <= len(finished) < 30
    outcome = commands.run(*TRAIN, cwd=broken)
    assert outcome.code == 0, outcome.err
    assert_same_training(broken / "run", clean / "run")


def test_certification_killed_ten_times(commands: Commands, run: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "run").mkdir()
    for path in run.iterdir():
        (clean / "run" / path.name).write_bytes(path.read_bytes())
    assert commands.run(*CERTIFY, cwd=clean).code == 0
    Killer(commands, CERTIFY, tmp_path, seed=2).ten_times()
    done = (run / "certification.jsonl").read_text().count("\n")
    assert 50 < done < 1000
    outcome = commands.run(*CERTIFY, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert_same_certification(run, clean / "run")
    summary = json.loads((run / "certification.json").read_text())
    assert summary["complete"] and summary["samples"] == 1000


# --- at every change of a file ---------------------------------------------------------------


def events(commands: Commands, arguments: tuple[str, ...], cwd: Path) -> list[str]:
    """Run a command to its end and return what it did to files."""
    log = commands.scratch / "events"
    outcome = commands.run(*arguments, cwd=cwd, events=log)
    assert outcome.code == 0, outcome.err
    return log.read_text().splitlines()


def killed_everywhere(
    commands: Commands,
    arguments: tuple[str, ...],
    prepare: Callable[[Path], None],
    check: Callable[[Path], None],
    tmp_path: Path,
    count: int,
    check_killed: Callable[[Path], None] = lambda run: None,
) -> None:
    """Kill a command before each of `count` changes, run it again and check the result.

    All problems are collected, since one cause usually shows at many moments.
    """
    problems = []
    for moment in range(1, count + 1):
        cwd = tmp_path / f"kill{moment}"
        cwd.mkdir()
        prepare(cwd)
        killed = commands.run(*arguments, cwd=cwd, kill_at=moment)
        assert killed.code == -signal.SIGKILL
        check_killed(cwd / "run")
        again = commands.run(*arguments, cwd=cwd)
        assert again.code == 0, f"kill {moment}: {again.err}"
        try:
            check(cwd / "run")
        except AssertionError as error:
            problems.append(f"kill {moment}: {str(error).splitlines()[0]}")
    assert not problems, "\n".join(problems)


# The second of three epochs is the best, so that its weights have to survive the third.
SHORT = ("train", "--out", "run", *SMALL, "--epochs", "3", "--set", "train_samples=128")
SHORT = (*SHORT, "--set", "learning_rate=0.2", "--resume")


def test_training_killed_at_every_change_of_a_file(commands: Commands, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    happened = events(commands, SHORT, clean)
    renamed = [event for event in happened if event.startswith("os.rename")]
    assert len(renamed) >= 11  # config; history and checkpoint thrice; the network twice
    best = torch.load(clean / "run" / "checkpoint.pt", weights_only=True)["selected_epoch"]
    assert best == 1
    killed_everywhere(
        commands,
        SHORT,
        lambda cwd: None,
        lambda run: assert_same_training(run, clean / "run"),
        tmp_path,
        len(happened),
    )


def test_certification_killed_at_every_change_of_a_file(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    arguments = ("certify", "run", "--samples", "40", "--eps", "0.05", "--steps", "8")

    def prepare(cwd: Path) -> None:
        (cwd / "run").mkdir()
        for path in run.iterdir():
            (cwd / "run" / path.name).write_bytes(path.read_bytes())

    def nothing_is_lost(folder: Path) -> None:
        """At most the counterexample in flight is on disk but not in the journal."""
        journal, points = folder / "certification.jsonl", folder / "counterexamples"
        stored = len(list(points.glob("*.npy"))) if points.exists() else 0
        known = journal.read_text().count('"counterexample"') if journal.exists() else 0
        assert known <= stored <= known + 1

    clean = tmp_path / "clean"
    clean.mkdir()
    prepare(clean)
    happened = events(commands, arguments, clean)
    assert 4 <= sum("npy" in event for event in happened) <= 16  # some counterexamples
    killed_everywhere(
        commands,
        arguments,
        prepare,
        lambda folder: assert_same_certification(folder, clean / "run"),
        tmp_path,
        len(happened),
        nothing_is_lost,
    )


def test_starting_over_killed_at_every_change_of_a_file(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    """`certify --force` with another seed and radius: nothing of the old certification may survive.

    Run again without --force it is either refused, because the old one is still there, or it
    ends like a certification that never knew another radius.
    """
    options = ("certify", "run", "--samples", "40", "--steps", "8", "--stages", "ibp,attack")
    wide, narrow = (*options, "--eps", "0.1", "--seed", "1"), (*options, "--eps", "0.05")

    def copy(source: Path, name: str) -> Path:
        shutil.copytree(source, tmp_path / name / "run")
        return tmp_path / name

    clean = copy(run, "clean")
    assert commands.run(*narrow, cwd=clean).code == 0
    assert commands.run(*wide, cwd=tmp_path).code == 0
    stale = set(names(run / "counterexamples")) - set(names(clean / "run" / "counterexamples"))
    assert stale
    count = len(events(commands, (*narrow, "--force"), copy(run, "count")))
    outcomes = []
    for moment in range(1, count + 1):
        cwd = copy(run, f"kill{moment}")
        killed = commands.run(*narrow, "--force", cwd=cwd, kill_at=moment)
        assert killed.code == -signal.SIGKILL
        again = commands.run(*narrow, cwd=cwd)
        outcomes.append(again.code)
        if again.code == 2:
            assert "--force" in again.err
            assert commands.run(*narrow, "--force", cwd=cwd).code == 0
        assert_same_certification(cwd / "run", clean / "run")
    assert outcomes[0] == 2 and outcomes[-1] == 0


def test_leftovers_of_killed_writes_are_removed(commands: Commands, run: Path) -> None:
    """What a kill in the middle of a write leaves is gone once the command has finished."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    (run / f".checkpoint.pt.{dead.pid}.tmp").write_bytes(b"half a checkpoint")
    outcome = commands.run("train", "--out", run, *SMALL, "--resume")
    assert outcome.code == 0, outcome.err
    assert not temporary_files(run)
    (run / f".certification.json.{dead.pid}.tmp").write_bytes(b"{")
    (run / "counterexamples").mkdir()
    (run / "counterexamples" / f".000001.npy.{dead.pid}.tmp").write_bytes(b"half")
    outcome = commands.run("certify", run, "--samples", "12", "--steps", "5")
    assert outcome.code == 0, outcome.err
    assert not temporary_files(run)
    few = ("--samples", "3", "--device", "cpu")
    others = ("attack", "--steps", "2"), ("estimate",), ("smooth", "--draws", "9")
    for command, *options in others:
        (run / f".smoothing.json.{dead.pid}.tmp").write_bytes(b"{")
        outcome = commands.run(command, run, *few, *options)
        assert outcome.code == 0, outcome.err
        assert not temporary_files(run), command
