"""Run folders with links, pipes and second names in them: nothing outside is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import SMALL, Commands, assert_refused, snapshot, unchanged

import tightrope as tr
from tightrope.runs import Run

QUICK = ("--samples", "20", "--steps", "3", "--restarts", "1")
CERTIFY = ("certify", "run", "--eps", "0.1", *QUICK)
ATTACK = ("attack", "run", *QUICK)
ESTIMATE = ("estimate", "run", *QUICK)
RESUME = ("train", "--out", "run", "--resume")
REPLACE = ("train", "--out", "run", *SMALL, "--force")
EXPORT = ("export", "run", "--onnx", "net.onnx")
REPORT = ("report", "run")
WRITERS = (CERTIFY, ATTACK, ESTIMATE, RESUME, REPLACE)
FILES = Run(Path("run")).files()
PRECIOUS = b"the work of weeks"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, with names like ours in it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("precious", "000000.npy", "000001.npy", "mine.npy"):
        (folder / name).write_bytes(PRECIOUS)
    return folder


def refused(
    commands: Commands, run: Path, arguments: tuple[str, ...], elsewhere: Path, *fragments: str
) -> None:
    """Check for one line, and that nothing has changed here or there."""
    with unchanged(elsewhere), unchanged(run.parent):
        assert_refused(commands.run(*arguments, cwd=run.parent, timeout=60), *fragments)


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


# --- links in a run folder ------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [CERTIFY, (*CERTIFY, "--force"), REPLACE], ids=lambda a: a[0])
def test_counterexamples_elsewhere(
    commands: Commands, run: Path, elsewhere: Path, arguments: tuple[str, ...]
) -> None:
    """There is no journal, so that what is in the folder looks like a remnant."""
    link(run / "counterexamples", elsewhere)
    refused(commands, run, arguments, elsewhere, "run/counterexamples is a link")


@pytest.mark.parametrize("target", ["precious", "absent"])
def test_a_journal_elsewhere(commands: Commands, run: Path, elsewhere: Path, target: str) -> None:
    link(run / "certification.jsonl", elsewhere / target)
    refused(commands, run, CERTIFY, elsewhere, "run/certification.jsonl is a link")
    refused(commands, run, (*CERTIFY, "--force"), elsewhere, "is a link")


@pytest.mark.parametrize("arguments", WRITERS, ids=lambda a: a[0])
def test_every_file_elsewhere(
    commands: Commands, run: Path, elsewhere: Path, arguments: tuple[str, ...]
) -> None:
    """Whoever writes to a run folder refuses a link in place of any of its files."""
    needed = {"config.toml", "model.json", "model.safetensors", "checkpoint.pt", "history.jsonl"}
    for name in (*FILES, "counterexamples", "tensorboard"):
        original = run / name
        target = elsewhere / "precious"
        if name in needed:  # a faithful copy, so that only the link is wrong
            target = elsewhere / name
            shutil.copy(original, target)
            original.unlink()
        original.symlink_to(target)
        refused(commands, run, arguments, elsewhere, f"run/{name} is a link")
        original.unlink()
        if name in needed:
            shutil.move(target, original)


def test_a_page_elsewhere(commands: Commands, run: Path, elsewhere: Path) -> None:
    link(run / "report.html", elsewhere / "precious")
    refused(commands, run, REPORT, elsewhere, "run/report.html is a link")
    link(run.parent / "page.html", elsewhere / "precious")
    refused(commands, run, (*REPORT, "-o", "page.html"), elsewhere, "page.html is a link")


def test_an_export_elsewhere(commands: Commands, run: Path, elsewhere: Path) -> None:
    link(run.parent / "net.onnx", elsewhere / "precious")
    refused(commands, run, EXPORT, elsewhere, "net.onnx is a link")


def test_one_counterexample_elsewhere(commands: Commands, run: Path, elsewhere: Path) -> None:
    """Other files in the folder are not ours; a link that is in our way is refused."""
    (run / "counterexamples").mkdir()
    for index in range(20):
        (run / "counterexamples" / f"{index:06d}.npy").symlink_to(elsewhere / "precious")
    with unchanged(elsewhere):
        outcome = commands.run(*CERTIFY, cwd=run.parent)
    assert_refused(outcome, ".npy is a link")


@pytest.mark.parametrize("arguments", [CERTIFY, REPORT, RESUME], ids=lambda a: a[0])
def test_the_run_folder_itself_may_be_a_link(
    commands: Commands, run: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """So may the folder that it is in."""
    (tmp_path / "disk").mkdir()
    run.rename(tmp_path / "disk" / "stored")
    run.symlink_to(tmp_path / "disk" / "stored")
    assert commands.run(*arguments, cwd=tmp_path).code == 0
    (tmp_path / "other").symlink_to("disk")
    moved = [a if a != "run" else "other/stored" for a in arguments]
    assert commands.run(*moved, cwd=tmp_path).code == 0


def test_training_into_a_linked_folder(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    assert commands.run("train", "--out", "run", *SMALL, cwd=tmp_path).code == 0
    assert (tmp_path / "disk" / "model.json").exists()


# --- names that can be guessed ------------------------------------------------------------------


def calls(run: Path) -> dict[str, Callable[[], Any]]:
    quick = {"samples": 20, "steps": 3, "restarts": 1}
    settings = {"data": "mnist", "net": "mlp", "width": 4, "depth": 1, "batch_norm": False}
    settings |= {"train_samples": 200, "epochs": 2, "validation": 20, "annealing_epochs": 0}
    return {
        "attack": lambda: tr.attack(run, **quick),
        "certify": lambda: tr.certify(run, eps=0.1, stages=("ibp", "attack"), **quick),
        "estimate": lambda: tr.estimate(run, **quick),
        "report": lambda: tr.report(run),
        "export": lambda: tr.export(run, onnx=run / "net.onnx"),
        "train": lambda: tr.train(out=run, force=True, **settings),
        "compare": lambda: tr.compare(["ibp"], out=run, samples=10, **settings),
    }


@pytest.mark.parametrize("command", sorted(calls(Path("run"))))
def test_temporary_names_of_this_process(run: Path, elsewhere: Path, command: str) -> None:
    """Links under the names that a file has before it is finished, in earlier versions."""
    for folder in (run, run / "counterexamples", run / "ibp-0"):
        folder.mkdir(exist_ok=True)
        points = [f"{index:06d}.npy" for index in range(20)]
        for name in (*FILES, "net.onnx", "comparison.json", *points):
            link(folder / f".{name}.{os.getpid()}.tmp", elsewhere / "precious")
    if command == "compare":
        shutil.rmtree(run / "ibp-0")
    with unchanged(elsewhere):
        calls(run)[command]()


# --- only what we could have made is removed ----------------------------------------------------


def test_only_our_counterexamples_are_removed(commands: Commands, run: Path) -> None:
    points = run / "counterexamples"
    points.mkdir()
    ours = [points / "000003.npy", points / "1234567.npy"]
    theirs = ["mine.npy", "3.npy", "00003.npy", "000003.npy.bak", "000003.npz", ".000003.npy"]
    for path in (*ours, *(points / name for name in theirs)):
        path.write_bytes(PRECIOUS)
    outcome = commands.run(*CERTIFY, "--stages", "ibp", cwd=run.parent)
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in points.iterdir()) == sorted(theirs)
    outcome = commands.run(*REPLACE, cwd=run.parent)
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in points.iterdir()) == sorted(theirs)


# --- comparisons ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["comparison.json", "figures", "figures/comparison.png"])
def test_comparisons_elsewhere(
    commands: Commands, tmp_path: Path, elsewhere: Path, name: str
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(elsewhere if name == "figures" else elsewhere / "precious")
    arguments = ("compare", "--methods", "ibp", "--out", "out", "--samples", "10")
    equal = [a for i, a in enumerate(SMALL) if "--method" not in (a, SMALL[i - 1])]
    with unchanged(elsewhere), unchanged(tmp_path):
        outcome = commands.run(*arguments, *equal, cwd=tmp_path)
    assert_refused(outcome, f"out/{name} is a link")


@pytest.mark.parametrize("name", ["logs", "logs/a.log", "estimators", "estimators/table.md"])
def test_reproductions_elsewhere(
    commands: Commands, tmp_path: Path, elsewhere: Path, name: str
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(elsewhere if "." not in name else elsewhere / "precious")
    with unchanged(elsewhere), unchanged(tmp_path):
        outcome = commands.run("reproduce", "estimators", "--out", "out", cwd=tmp_path)
    assert_refused(outcome, f"out/{name} is a link")


# --- pipes, devices and second names ------------------------------------------------------------


@pytest.mark.parametrize("arguments", [CERTIFY, RESUME, EXPORT], ids=lambda a: a[0])
@pytest.mark.parametrize("device", [False, True], ids=["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(
    commands: Commands, run: Path, elsewhere: Path, arguments: tuple[str, ...], device: bool
) -> None:
    """A pipe without a writer, and a link to an endless device."""
    assert commands.run(*CERTIFY, cwd=run.parent).code == 0
    read = {
        "certify": ("config.toml", "model.json", "model.safetensors", "certification.jsonl"),
        "train": ("config.toml", "checkpoint.pt", "history.jsonl"),
        "export": ("config.toml", "model.json", "model.safetensors"),
    }
    for name in (*read[arguments[0]], *(["certification.json"] if arguments is CERTIFY else [])):
        kept = (run / name).read_bytes()
        (run / name).unlink()
        if device:
            (run / name).symlink_to("/dev/zero")
        else:
            os.mkfifo(run / name)
        outcome = commands.run(*arguments, cwd=run.parent, timeout=60)
        assert_refused(outcome, name)
        (run / name).unlink()
        (run / name).write_bytes(kept)


@pytest.mark.parametrize("device", [False, True], ids=["pipe", "device"])
def test_a_report_about_what_is_no_file(commands: Commands, run: Path, device: bool) -> None:
    assert commands.run(*CERTIFY, cwd=run.parent).code == 0
    points = [f"counterexamples/{path.name}" for path in (run / "counterexamples").iterdir()]
    assert points
    for name in (*sorted(set(FILES) - {"report.html"}), *points):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        if device:
            (run / name).symlink_to("/dev/zero")
        else:
            os.mkfifo(run / name)
        outcome = commands.run(*REPORT, cwd=run.parent, timeout=60)
        assert outcome.code == 0, (name, outcome.err)
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)


def test_a_journal_with_two_names(commands: Commands, run: Path, elsewhere: Path) -> None:
    """A copy made of hard links shares its journal with the original."""
    assert commands.run(*CERTIFY, cwd=run.parent).code == 0
    journal = run / "certification.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    (elsewhere / "journal").write_bytes(b"".join(lines[:5]) + lines[5][:20])
    journal.unlink()
    journal.hardlink_to(elsewhere / "journal")
    refused(commands, run, CERTIFY, elsewhere, "certification.jsonl has other names")
    with unchanged(elsewhere):
        assert commands.run(*CERTIFY, "--force", cwd=run.parent).code == 0
    assert len(journal.read_text().splitlines()) == 20


def test_other_files_with_two_names_are_replaced(
    commands: Commands, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is replaced as a whole leaves its other names alone."""
    twin = tmp_path_factory.mktemp("twin") / "run"
    shutil.copytree(run, twin, copy_function=os.link)
    before = snapshot(twin)
    assert commands.run(*REPLACE, "--seed", "7", cwd=run.parent).code == 0
    for arguments in (CERTIFY, ATTACK, ESTIMATE, REPORT):
        assert commands.run(*arguments, cwd=run.parent).code == 0
    assert snapshot(twin) == before
    assert (run / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_counterexamples_are_what_they_were(commands: Commands, run: Path) -> None:
    """The checks above lose nothing: real counterexamples are still written and read."""
    assert commands.run(*CERTIFY, cwd=run.parent).code == 0
    points = sorted((run / "counterexamples").iterdir())
    assert points and all(np.load(path).shape == (1, 28, 28) for path in points)
