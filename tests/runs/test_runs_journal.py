"""The journal and the summary: complete, resumable, and never those of another network."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certified_runs import EXPECTED, certify, files, lines

import tightrope as tr
from tightrope.runs import Run

certify_module = importlib.import_module("tightrope.certification.session")
deciding_module = importlib.import_module("tightrope.certification.deciding")

pytestmark = pytest.mark.usefixtures("one_thread")


def timeless(value: Any) -> Any:
    """Drop what depends on the clock."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "times")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def results(run: Run) -> tuple[Any, Any, dict[str, bytes]]:
    """Return everything a certification leaves behind, without times."""
    summary = json.loads(run.certification.read_text())
    points = {path.name: path.read_bytes() for path in run.counterexamples.iterdir()}
    return timeless(lines(run)), timeless(summary), points


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "BATCH", 4)
    # However slow the machine is: one report per batch.
    monkeypatch.setattr(certify_module, "PROGRESS_SECONDS", float("inf"))


@pytest.fixture
def clean(certifiable: Run, tmp_path: Path, small_batches: None) -> Run:
    """A copy of the run, certified without any interruption."""
    copy = Run(tmp_path / "clean")
    shutil.copytree(certifiable.folder, copy.folder)
    certify(copy)
    return copy


# --- what is written ----------------------------------------------------------------------------


def test_every_sample_has_one_complete_record(certifiable: Run) -> None:
    certify(certifiable)
    records = lines(certifiable)
    assert sorted(r["index"] for r in records) == list(range(10))
    assert {r["index"]: (r["verdict"], r["stage"]) for r in records} == EXPECTED
    labels = np.load(certifiable.folder / "data.npz")["y_test"]
    for record in records:
        names = {"index", "label", "prediction", "verdict", "stage", "margin", "seconds"}
        assert names <= set(record)
        assert record["label"] == labels[record["index"]]
        assert record["seconds"] > 0
        attacked = (record["verdict"], record["stage"]) == ("falsified", "attack")
        assert ("counterexample" in record) == attacked
        margin = {"verified": 1, "falsified": -1, "unknown": -1}[record["verdict"]]
        assert record["margin"] * margin >= 0


def test_the_summary_follows_its_definitions(certifiable: Run) -> None:
    summary = certify(certifiable)
    assert (summary.samples, summary.complete) == (10, True)
    assert (summary.verified, summary.falsified, summary.unknown) == (3, 5, 2)
    assert summary.natural == pytest.approx(8 / 10)
    assert summary.adversarial == pytest.approx(5 / 10)
    assert summary.certified == pytest.approx(3 / 10)
    assert list(summary.stages) == ["natural", "ibp", "attack"]
    counts = [(s["verified"], s["falsified"]) for s in summary.stages.values()]
    assert counts == [(0, 2), (3, 0), (0, 3)]
    assert summary.seconds == pytest.approx(sum(r["seconds"] for r in lines(certifiable)))
    assert summary.settings["eps"] == "0.1"
    written = json.loads(certifiable.certification.read_text())
    assert written == json.loads(json.dumps(summary.to_json()))


@pytest.mark.parametrize("stages", [("ibp",), ("attack",), ("attack", "ibp"), ("ibp", "attack")])
@pytest.mark.parametrize(("start", "samples"), [(0, 10), (0, 1), (3, 4), (9, 1), (4, None)])
def test_counts_add_up(
    certifiable: Run, stages: tuple[str, ...], start: int, samples: int | None
) -> None:
    summary = certify(certifiable, stages=stages, start=start, samples=samples)
    asked = 10 - start if samples is None else samples
    assert summary.samples == asked == len(lines(certifiable))
    assert summary.verified + summary.falsified + summary.unknown == asked
    assert [r["index"] for r in sorted(lines(certifiable), key=lambda r: r["index"])] == list(
        range(start, start + asked)
    )
    by_stage = [s["verified"] + s["falsified"] for s in summary.stages.values()]
    assert sum(by_stage) + summary.unknown == asked
    assert (summary.adversarial is None) == ("attack" not in stages)
    if summary.adversarial is not None:
        assert summary.certified <= summary.adversarial <= summary.natural


def test_without_an_attack_adversarial_accuracy_is_null(certifiable: Run) -> None:
    summary = certify(certifiable, stages=("ibp",))
    assert summary.adversarial is None
    assert (summary.verified, summary.falsified, summary.unknown) == (3, 2, 5)
    assert json.loads(certifiable.certification.read_text())["adversarial"] is None
    assert {r["stage"] for r in lines(certifiable) if r["verdict"] == "unknown"} == {"ibp"}


def test_the_order_of_stages_is_the_users(certifiable: Run) -> None:
    summary = certify(certifiable, stages=("attack", "ibp"))
    assert list(summary.stages) == ["natural", "attack", "ibp"]
    assert (summary.verified, summary.falsified, summary.unknown) == (3, 5, 2)
    for record in lines(certifiable):
        if record["verdict"] == "verified":
            assert list(record["times"]) == ["natural", "attack", "ibp"]
        elif record["stage"] == "attack":
            assert list(record["times"]) == ["natural", "attack"]


def test_a_radius_of_ones_own_is_used_and_stored(certifiable: Run) -> None:
    summary = certify(certifiable, eps="1/1000")
    assert summary.settings["eps"] == "0.001"
    assert (summary.falsified, summary.settings["samples"]) == (2, 10)
    assert certify(certifiable, eps=0.001).falsified == 2


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 250])
def test_verdicts_do_not_depend_on_the_batch(
    certifiable: Run, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(certify_module, "BATCH", batch)
    certify(certifiable)
    assert {r["index"]: (r["verdict"], r["stage"]) for r in lines(certifiable)} == EXPECTED


# --- interrupted --------------------------------------------------------------------------------


class _Stop(Exception):
    pass


def interrupt_after(batches: int) -> Any:
    calls: list[tr.Certification] = []

    def progress(summary: tr.Certification) -> None:
        calls.append(summary)
        if len(calls) == batches:
            raise _Stop

    return progress


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_an_interrupted_certification_resumes(certifiable: Run, clean: Run, batches: int) -> None:
    with pytest.raises(_Stop):
        certify(certifiable, progress=interrupt_after(batches))
    done = lines(certifiable)
    assert len(done) == min(4 * batches, 10)
    certify(certifiable)
    assert lines(certifiable)[: len(done)] == done  # the times, too: nothing was done again
    assert results(certifiable) == results(clean)


def test_a_journal_cut_anywhere_resumes_to_the_same_end(certifiable: Run, clean: Run) -> None:
    """A kill can leave any number of whole lines and a part of the next one."""
    whole = clean.journal.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cuts = sorted({0, 1, *ends, *(end - 1 for end in ends), *(end - 40 for end in ends)})
    for cut in cuts:
        shutil.rmtree(certifiable.folder)
        shutil.copytree(clean.folder, certifiable.folder)
        certifiable.journal.write_bytes(whole[:cut])
        for path in certifiable.counterexamples.iterdir():
            if path.name.encode() not in whole[:cut]:
                path.unlink()
        certify(certifiable)
        assert results(certifiable) == results(clean), f"cut after {cut} bytes"


def test_a_torn_last_line_is_dropped(certifiable: Run, clean: Run) -> None:
    shutil.copytree(clean.folder, certifiable.folder, dirs_exist_ok=True)
    content = certifiable.journal.read_bytes()
    certifiable.journal.write_bytes(content + b'{"index": 3, "label"')
    certify(certifiable)
    assert certifiable.journal.read_bytes() == content


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_the_summary_of_an_interrupted_certification_adds_up(
    certifiable: Run, small_batches: None, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """Whatever is on disk counts every sample asked for and claims nothing of the others."""
    if batches == 0:

        def stop(*_: Any, **__: Any) -> None:
            raise _Stop

        monkeypatch.setattr(deciding_module, "decide", stop)
    with pytest.raises(_Stop):
        certify(certifiable, progress=interrupt_after(batches))
    summary = json.loads(certifiable.certification.read_text())
    assert not summary["complete"]
    counts = [summary[name] for name in ("verified", "falsified", "unknown", "open")]
    assert sum(counts) == summary["samples"] == 10
    if summary["adversarial"] is not None:
        assert summary["certified"] <= summary["adversarial"] <= summary["natural"]


def test_certifying_twice_does_nothing_the_second_time(
    certifiable: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = certify(certifiable)
    journal = certifiable.journal.stat().st_mtime_ns
    before = {k: content for k, (content, _) in files(certifiable).items()}
    points = {p: p.stat().st_mtime_ns for p in certifiable.counterexamples.iterdir()}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a sample was decided again")

    monkeypatch.setattr(deciding_module, "decide", refuse)
    assert certify(certifiable) == first
    assert {k: content for k, (content, _) in files(certifiable).items()} == before
    assert certifiable.journal.stat().st_mtime_ns == journal
    assert {p: p.stat().st_mtime_ns for p in certifiable.counterexamples.iterdir()} == points
