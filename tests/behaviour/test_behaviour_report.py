"""`tightrope report`, end to end on a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import Commands, assert_refused, run_script, temporary_files, unchanged

import tightrope as tr

CERTIFY = ("--samples", "40", "--eps", "0.03", "--steps", "5", "--stages", "ibp,attack,crown-ibp")
SECTIONS = ("summary", "training", "certification", "tradeoff", "margins", "gallery", "settings")


@pytest.fixture(scope="module")
def certified_run(
    commands: Commands, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("certified") / "run"
    shutil.copytree(finished_run, folder)
    assert commands.run("certify", folder, *CERTIFY).code == 0
    return folder


@pytest.fixture
def run(certified_run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(certified_run, folder)
    return folder


def test_one_run(commands: Commands, run: Path) -> None:
    outcome = commands.run("report", run)
    page = run / "report.html"
    assert outcome.code == 0 and not outcome.err
    assert outcome.out == f"{page}\n"
    html = page.read_text(encoding="utf-8")
    for section in SECTIONS:
        assert f'<section id="{section}"' in html
    summary = json.loads((run / "certification.json").read_text())
    for name in ("natural", "adversarial", "certified"):
        assert f"{100 * summary[name]:.2f}\u202f%" in html
    assert html.count("data:image/png;base64,") >= 12 + 1
    assert not temporary_files(run)


def test_several_runs(commands: Commands, run: Path, finished_run: Path, tmp_path: Path) -> None:
    with unchanged(run):
        outcome = commands.run("report", run, finished_run, "--json", cwd=tmp_path)
    assert outcome.code == 0 and outcome.json == {"report": "report.html", "runs": 2}
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>2 runs</h1>" in html and "aria-sort" in html
    outcome = commands.run("report", run, finished_run, "-o", tmp_path / "a/b.html", "--json")
    assert outcome.json == {"report": str(tmp_path / "a/b.html"), "runs": 2}


def test_a_page_is_replaced_and_the_same_again(commands: Commands, run: Path) -> None:
    page = run / "report.html"
    page.write_text("old")
    assert commands.run("report", run).code == 0
    first = page.read_bytes()
    assert first != b"old" and commands.run("report", run).code == 0
    assert page.read_bytes() == first


def test_the_twin_writes_the_same_page(commands: Commands, run: Path, tmp_path: Path) -> None:
    assert commands.run("report", run, "--out", tmp_path / "command.html").code == 0
    result = tr.report(run, out=tmp_path / "function.html")
    assert result == tr.Report(tmp_path / "function.html", 1)
    assert result.page.read_bytes() == (tmp_path / "command.html").read_bytes()


def test_what_is_wrong_is_said(commands: Commands, run: Path, tmp_path: Path) -> None:
    (run / "history.jsonl").write_text("{\n")
    (tmp_path / "empty").mkdir()
    page = tmp_path / "page.html"
    outcome = commands.run("report", run, tmp_path / "empty", "-o", page)
    assert outcome.code == 0
    *notes, last = outcome.out.splitlines()
    assert last == str(page)
    assert any("history.jsonl is damaged at line 1" in note for note in notes)
    assert f"note: {tmp_path / 'empty'}: empty" in notes
    assert "history.jsonl is damaged at line 1" in page.read_text(encoding="utf-8")


def test_nothing_to_show(commands: Commands, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with unchanged(tmp_path):
        assert_refused(commands.run("report", tmp_path / "empty"), "nothing to report", "empty")
        assert_refused(commands.run("report", tmp_path / "none"), "none does not exist")
        assert_refused(commands.run("report", run, tmp_path / "none"), "none does not exist")
        assert_refused(commands.run("report", run, "-o", tmp_path), "--out must be a file")
        assert_refused(commands.run("report"), "Missing argument")


def test_a_full_disk_leaves_no_half_page(commands: Commands, run: Path) -> None:
    with unchanged(run):
        outcome = commands.run("report", run, file_limit=20_000)
    assert outcome.code == 2 and "no space left" in outcome.err


def test_the_installed_command(run: Path) -> None:
    outcome = run_script("report", "run", cwd=run.parent)
    assert outcome.code == 0, outcome.err
    assert outcome.out == "run/report.html\n" and (run / "report.html").exists()
