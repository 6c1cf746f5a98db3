"""A full disk: one line, no half-written file, and the same run once there is space again."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from commands import SMALL, Commands, Outcome, json_lines, snapshot, temporary_files, unchanged

TIMES = ("seconds", "validation_seconds", "times")
CERTIFY = ("--samples", "260", "--eps", "0.03", "--steps", "5", "--restarts", "1")


def assert_no_space(outcome: Outcome) -> None:
    assert "Traceback" not in outcome.err, outcome.err[-2000:]
    assert outcome.code == 2
    assert outcome.err.startswith("tightrope: ") and outcome.err.count("\n") == 1
    assert "space" in outcome.err or "too large" in outcome.err, outcome.err


def assert_whole(run: Path) -> None:
    """Check that every file of a training is complete or not there."""
    assert not temporary_files(run)
    readers = {
        "config.toml": lambda path: tomllib.loads(path.read_text()),
        "history.jsonl": json_lines,
        "model.json": lambda path: json.loads(path.read_text()),
        "model.safetensors": safetensors.torch.load_file,
        "checkpoint.pt": lambda path: torch.load(path, weights_only=True),
    }
    for path in run.iterdir():
        assert readers[path.name](path), path


def assert_same_run(run: Path, clean: Path) -> None:
    for name in ("config.toml", "model.safetensors", "model.json"):
        assert (run / name).read_bytes() == (clean / name).read_bytes()
    histories = [json_lines(f / "history.jsonl", without=TIMES) for f in (run, clean)]
    assert histories[0] == histories[1]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 kB, or none if mounting is not allowed here."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


# In bytes: not even the config; no longer history; no weights; no checkpoint.
LIMITS = [0, 1000, 10_000, 50_000]


@pytest.mark.parametrize("limit", LIMITS)
def test_training_with_a_limit_on_files(
    commands: Commands, finished_run: Path, tmp_path: Path, limit: int
) -> None:
    run = tmp_path / "run"
    outcome = commands.run("train", "--out", run, *SMALL, file_limit=limit)
    assert_no_space(outcome)
    if run.exists():
        assert_whole(run)
    if limit == 0:
        assert not run.exists() or not list(run.iterdir())
    assert commands.run("train", "--out", run, *SMALL, "--resume").code == 0
    assert_same_run(run, finished_run)


@pytest.mark.parametrize("limit", [0, 10_000])
def test_the_advice_after_a_full_disk_works(
    commands: Commands, finished_run: Path, tmp_path: Path, limit: int
) -> None:
    """Either the message says --resume, or the same command really can be run again."""
    command = ("train", "--out", tmp_path / "run", *SMALL)
    outcome = commands.run(*command, file_limit=limit)
    assert_no_space(outcome)
    again = (*command, "--resume") if "--resume" in outcome.err else command
    outcome = commands.run(*again)
    assert outcome.code == 0, outcome.err
    assert_same_run(tmp_path / "run", finished_run)


@pytest.mark.parametrize("pages", [1, 4, 12, 30])
def test_training_on_a_full_disk(
    commands: Commands, finished_run: Path, tiny_disk: Path, pages: int
) -> None:
    resize(tiny_disk, f"{4 * pages}k")
    run = tiny_disk / "run"
    outcome = commands.run("train", "--out", run, *SMALL)
    assert_no_space(outcome)
    assert_whole(run)
    resize(tiny_disk, "4m")
    assert commands.run("train", "--out", run, *SMALL, "--resume").code == 0
    assert_same_run(run, finished_run)


def test_a_full_disk_does_not_cost_a_started_run_its_settings(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    """Resumed before its first checkpoint and again without space, the config must survive."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(finished_run / "config.toml", run)
    with unchanged(run):
        assert_no_space(commands.run("train", "--out", run, "--resume", file_limit=0))
    assert commands.run("train", "--out", run, "--resume").code == 0
    assert_same_run(run, finished_run)


def test_a_full_disk_does_not_cost_a_trained_run_its_weights(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    """Two more files fit, but not the checkpoint: what was there stays usable."""
    with unchanged(run):
        assert commands.run("train", "--out", run, "--resume", file_limit=0).code == 0
    history = (run / "history.jsonl").read_text().splitlines(keepends=True)
    assert len(history) == 4


@pytest.fixture(scope="module")
def certified(
    commands: Commands, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("certified") / "run"
    shutil.copytree(finished_run, folder)
    assert commands.run("certify", folder, *CERTIFY).code == 0
    return folder


def assert_same_certification(run: Path, clean: Path) -> None:
    assert not temporary_files(run)
    journals = [json_lines(f / "certification.jsonl", without=TIMES) for f in (run, clean)]
    assert journals[0] == journals[1]
    points = [snapshot(f / "counterexamples") for f in (run, clean)]
    assert points[0] == points[1]
    assert json.loads((run / "certification.json").read_text())["complete"]


@pytest.mark.parametrize("limit", [0, 1000, 3000, 20_000])
def test_certifying_with_a_limit_on_files(
    commands: Commands, run: Path, certified: Path, limit: int
) -> None:
    before = snapshot(run)
    assert_no_space(commands.run("certify", run, *CERTIFY, file_limit=limit))
    assert not temporary_files(run)
    after = snapshot(run)
    assert {name: after[name] for name in before} == before
    outcome = commands.run("certify", run, *CERTIFY)
    assert outcome.code == 0, outcome.err
    assert_same_certification(run, certified)


@pytest.mark.parametrize("pages", [1, 4, 12])
def test_certifying_on_a_full_disk(
    commands: Commands, finished_run: Path, certified: Path, tiny_disk: Path, pages: int
) -> None:
    resize(tiny_disk, "4m")
    run = tiny_disk / "run"
    shutil.copytree(finished_run, run)
    used = shutil.disk_usage(tiny_disk).used
    resize(tiny_disk, str(used + 4096 * pages))
    assert_no_space(commands.run("certify", run, *CERTIFY))
    assert not temporary_files(run)
    resize(tiny_disk, "4m")
    outcome = commands.run("certify", run, *CERTIFY)
    assert outcome.code == 0, outcome.err
    assert_same_certification(run, certified)


def test_a_full_disk_keeps_the_last_attack_and_export(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    attack = ("attack", run, "--samples", "20", "--steps", "3", "--restarts", "1")
    assert commands.run(*attack).code == 0
    (tmp_path / "net.onnx").write_bytes(b"an earlier export")
    with unchanged(tmp_path):
        assert_no_space(commands.run(*attack, "--seed", "1", file_limit=100))
        assert_no_space(
            commands.run("export", run, "--onnx", tmp_path / "net.onnx", file_limit=100)
        )
