"""Reports on run folders of every kind: whole, half-finished, damaged, from the future."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import EPOCHS, Page, write_run

import tightrope as tr
from tightrope.runs import Run


def shown(*runs: Path | Run, **options: Any) -> Page:
    return Page(tr.report(runs, **options).page.read_text(encoding="utf-8"))


def notices(run: Run) -> str:
    """Return what the page says of a run, without looking at anything else."""
    result = tr.report(run)
    page = Page(result.page.read_text(encoding="utf-8"))
    assert result.runs == 1
    for notice in result.notices:
        assert "\n" not in notice and notice.removeprefix(f"{run.folder}: ") in page.text
    return " | ".join(result.notices)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "run").folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_whole_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "whole")
    before = files(run.folder)
    state = torch.random.get_rng_state()
    result = tr.report(run)
    assert result == tr.Report(run.folder / "report.html", 1, ())
    after = files(run.folder)
    assert after.pop(str(result.page)) and after == before
    assert torch.equal(torch.random.get_rng_state(), state)
    page = Page(result.page.read_text(encoding="utf-8"))
    text = page.text
    # 12 samples: 6 verified, 3 falsified (one without a change), 3 unknown.
    for words in ("91.67 %", "75.00 %", "50.00 %", "3 samples stayed unknown (3 time is up)"):
        assert words in text, words
    pictures = page.all("img")
    assert len(pictures) == 2 * 3 + 1 + 6
    assert all((p["src"] or "").startswith("data:image/png;base64,") and p["alt"] for p in pictures)
    assert "without any change" in text and "margin 0.5" in text
    assert "tightrope train --out" in text and "tightrope certify" in text


def test_numbers_are_those_of_the_certification(run_folder: Path) -> None:
    summary = json.loads((run_folder / "certification.json").read_text())
    page = shown(run_folder)
    text = page.text
    for name in ("natural", "adversarial", "certified"):
        assert f"{100 * summary[name]:.2f} %" in text
    assert len(page.all("img")) >= 24
    assert "reads" in text


def test_names_and_default_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / part / "same") for part in ("one", "two")]
    monkeypatch.chdir(tmp_path)
    result = tr.report(runs)
    assert result.page == Path("report.html") and result.runs == 2
    text = Page(result.page.read_text(encoding="utf-8")).text
    assert str(runs[0].folder) in text and str(runs[1].folder) in text
    assert tr.report([runs[0], str(runs[0].folder) + "/"]).page == runs[0].folder / "report.html"
    monkeypatch.chdir(runs[0].folder)
    assert "<h1>same</h1>" in tr.report(".", out="x/here.html").page.read_text(encoding="utf-8")


def test_training_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", certified=False, epochs=2)
    run.weights.unlink()
    said = notices(run)
    assert f"not finished: 2 of {EPOCHS} epochs" in said
    assert "there is no trained network yet" in said
    page = shown(run)
    assert len(page.all("svg", role="img")) == 3
    assert "Nothing is certified yet" in page.text


def test_settings_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", certified=False, epochs=0)
    run.weights.unlink()
    run.history_file.unlink()
    assert "0 of" in notices(run)
    assert "No epoch has been trained yet." in shown(run).text


def test_a_certification_that_runs_is_shown_and_left_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = run.journal.read_bytes().splitlines(keepends=True)
    torn = b"".join(lines[:7]) + lines[7][:20]
    run.journal.write_bytes(torn)
    assert "not finished: 7 of 12 samples" in notices(run)
    assert run.journal.read_bytes() == torn
    assert "5 samples are not decided yet" in shown(run).text
    run.journal.write_bytes(b"")
    summary = json.loads(run.certification.read_text())
    for name in ("verified", "falsified", "unknown"):
        summary[name] = 0
    run.certification.write_text(json.dumps({**summary, "open": 12}))
    assert "no sample is decided yet" in notices(run)


def test_paths_are_shortened_by_the_folder_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its name wherever that occurs."""
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    config = Path("run/config.toml").read_text(encoding="utf-8")
    path = "\\u0000elsewhere/run/data.npz"
    Path("run/config.toml").write_text(f'data = "{path}"\n' + config.partition("\n")[2])
    said = notices(Run(Path("run")))
    assert "elsewhere/run/data.npz" in said and "run/config.toml" not in said


def test_other_weights(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.weights.write_bytes(run.weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert "the certification is of other weights" in notices(run)


def _journal(run: Run, number: int, **changes: Any) -> None:
    lines = run.journal.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    run.journal.write_text("\n".join(lines) + "\n")


def test_a_newer_version(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.config.write_text("hovering = true\n" + run.config.read_text() + '[ibp]\nwings = "two"\n')
    _journal(run, 0, certainty=3, proof="a.bin")
    said = notices(run)
    assert "config.toml has settings that this version does not know (hovering, ibp.wings)" in said
    assert (
        "certification.jsonl has fields that this version does not know (certainty, proof)" in said
    )
    page = shown(run)
    # They are shown, whatever they are.
    assert "hovering" in page.text and "ibp.wings" in page.text and "50.00 %" in page.text
    assert len(page.all("img")) == 13


def test_a_newer_network(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run.folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert "model.json" in notices(run)
    assert "reads –" in shown(run).text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'{"a": 1}'])
@pytest.mark.parametrize("name", ["certification.json", "certification.jsonl", "history.jsonl"])
def test_damage_is_said(tmp_path: Path, name: str, content: bytes) -> None:
    run = write_run(tmp_path / "run")
    (run.folder / name).write_bytes(content if name == "certification.json" else content + b"\n")
    said = notices(run)
    assert name in said or content == b""
    assert said, content
    if name != "history.jsonl":
        # The journal and the summary each tell what the other has lost.
        assert "50.00 %" in shown(run).text


@pytest.mark.parametrize("content", [b"= 3", b"\xff\xfe", b"method = 3", b'method = "flying"'])
def test_damaged_settings(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run")
    run.config.write_bytes(content)
    assert "config.toml" in notices(run)
    page = shown(run)
    assert "50.00 %" in page.text and "the data set" in page.text
    assert not page.all("img")
    run.config.unlink()
    assert "config.toml is missing" in notices(run)


@settings(max_examples=60)
@given(data=st.data())
def test_bytes_that_rotted(whole_run: Path, data: st.DataObject) -> None:
    """Whatever happened to a file, there is a page or one line about it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        shutil.copytree(whole_run, folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        path = data.draw(st.sampled_from(files), label="file")
        content = bytearray(path.read_bytes())
        start = data.draw(st.integers(0, len(content)), label="start")
        length = data.draw(st.sampled_from([0, 1, 4, 100_000]), label="length")
        content[start : start + length] = data.draw(st.binary(max_size=6), label="bytes")
        path.write_bytes(content)
        try:
            page = tr.report(folder).page
        except tr.UserError as error:
            assert "\n" not in str(error)
        else:
            assert len(Page(page.read_text(encoding="utf-8")).all("section")) == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "maybe"},
        {"margin": "large"},
        {"index": 1},
        {"times": 3},
        {"label": None},
        {"seconds": float("nan")},
    ],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run")
    _journal(run, 0, **changes)
    assert "certification.jsonl is damaged at line" in notices(run)
    # The summary is whole, so its numbers stand.
    assert "50.00 %" in shown(run).text


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": float("nan"), "natural": None, "robust": "x"},
        {"loss": 1e300, "radius": -1e300},
        {"loss": True, "seconds": [1]},
    ],
)
def test_strange_numbers_in_the_history(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run")
    records = run.history()
    records[1] |= changes
    run.write_history(records)
    html = tr.report(run).page.read_text(encoding="utf-8")
    page = Page(html)
    drawn = str([attributes for _, attributes in page.elements])
    assert "nan" not in drawn.lower() and "inf'" not in drawn
    assert len(page.all("svg", role="img")) == 5


def test_hostile_names_of_counterexamples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    np.save(tmp_path / "secret.npy", np.zeros((1, 4, 4), dtype=np.float32))
    for name in ("../secret.npy", str(tmp_path / "secret.npy"), "counterexamples/../../secret.npy"):
        _journal(run, 6, counterexample=name)
        assert len(shown(run).all("img")) == 13 - 2


@pytest.mark.parametrize(
    "content",
    [
        np.zeros((2, 2), dtype=np.float32),
        np.full((1, 4, 4), np.nan, dtype=np.float32),
        np.zeros((1, 4, 4), dtype=np.int64),
        np.array([{"a": 1}], dtype=object),
        b"",
        b"no array",
    ],
)
def test_bad_counterexamples_are_left_out(tmp_path: Path, content: Any) -> None:
    run = write_run(tmp_path / "run")
    path = run.counterexamples / "000006.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    assert len(shown(run).all("img")) == 13 - 2
    shutil.rmtree(run.counterexamples)
    assert len(shown(run).all("img")) == 13 - 4


def test_a_data_set_that_is_gone_or_another_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    data = run.folder / "data.npz"
    arrays = dict(np.load(data))
    np.savez(data, **{**arrays, "y_test": (arrays["y_test"] + 1) % 3})
    assert "of another data set" in shown(run).text
    data.unlink()
    page = shown(run)
    assert "The pictures are missing, because the data set is" in page.text
    assert not page.all("img") and "margin 0.5" in page.text


def test_samples_that_are_no_images(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    data = run.folder / "data.npz"
    arrays = dict(np.load(data))
    flat = {k: v.reshape(len(v), -1) if k.startswith("x") else v for k, v in arrays.items()}
    np.savez(data, **flat)
    page = shown(run)
    assert "The samples are not images" in page.text and not page.all("img")


def test_hostile_names(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    page = shown(write_run(tmp_path / name))
    assert name in page.text
    assert not [a for a in page.all("img") if a["src"] == "x"]


def test_attack_and_estimate_are_further_results(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.attack.write_text(
        json.dumps({"adversarial": 0.5, "samples": 7, "settings": {"eps": "0.1"}})
    )
    run.estimate.write_text(json.dumps({"pgd": 0.25, "taps": "x", "samples": None}))
    text = shown(run).text
    assert "under attack (7 samples, ε 0.1)" in text and "PGD" in text
    assert "estimate.json is damaged: its numbers are missing" in text
    run.attack.write_text("[")
    run.estimate.write_text("[]")
    text = shown(run).text
    assert "under attack (7" not in text and "attack.json is damaged" in text


def test_numbers_beyond_all_measure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    first, *rest = run.history_file.read_text().splitlines()
    first = json.dumps({**json.loads(first), "loss": 10**400})
    run.history_file.write_text("\n".join([first, *rest]) + "\n")
    summary = json.loads(run.certification.read_text())
    run.certification.write_text(json.dumps({**summary, "samples": 10**40}))
    assert "Certification" in shown(run).text


def test_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.toml").write_bytes(b"\xff")
    for name, reason in (
        ("empty", "empty"),
        ("file", "not a folder"),
        ("other", "not a run folder"),
        ("broken", "config.toml is damaged"),
        ("missing", "does not exist"),
    ):
        with pytest.raises(tr.UserError, match=reason) as error:
            tr.report(tmp_path / name)
        assert name in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(tr.UserError, match=r"empty: empty \(and 1 more\)"):
        tr.report([tmp_path / "empty", tmp_path / "other"], out=tmp_path / "x.html")
    with pytest.raises(tr.UserError, match="at least one"):
        tr.report([])
    assert not list(tmp_path.rglob("*.html"))


def test_what_cannot_be_shown_is_said_beside_what_can(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    result = tr.report([tmp_path / "empty", run], out=tmp_path / "page.html")
    assert result.runs == 1 and result.notices == (f"{tmp_path / 'empty'}: empty",)
    assert f"{tmp_path / 'empty'}: empty" in Page(result.page.read_text(encoding="utf-8")).text


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(tr.UserError, match="must be a file"):
        tr.report(run, out=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.history_file.chmod(0)
    assert "history.jsonl cannot be read" in notices(run)


def test_folders_in_place_of_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for path in (run.history_file, run.journal):
        path.unlink()
        path.mkdir()
    said = notices(run)
    assert (
        "cannot read history.jsonl: it is a folder" in said
        and "certification.jsonl is damaged" in said
    )
    assert "50.00 %" in shown(run).text
