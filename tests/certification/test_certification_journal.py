"""The journal and the summary: complete, resumable, and never those of another network."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handmade import blind_spot, network
from torch import nn

import tightrope as tr
from tightrope import nets
from tightrope.runs import Run

certify_module = importlib.import_module("tightrope.certification.certifying")
deciding_module = importlib.import_module("tightrope.certification.deciding")

pytestmark = pytest.mark.usefixtures("one_thread")

EXPECTED = {
    0: ("verified", "ibp"),
    1: ("falsified", "natural"),
    2: ("falsified", "attack"),
    3: ("unknown", "attack"),
    4: ("verified", "ibp"),
    5: ("falsified", "attack"),
    6: ("falsified", "natural"),
    7: ("unknown", "attack"),
    8: ("falsified", "attack"),
    9: ("verified", "ibp"),
}


def certify(run: Run, **options: Any) -> tr.Certification:
    defaults = {"stages": ("ibp", "attack"), "steps": 10, "restarts": 2}
    return tr.certify(run, **{**defaults, **options})


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.journal.read_text().splitlines()]


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


def files(run: Run) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in run.folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_ino) for path in paths}


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


# --- damaged or of another network ----------------------------------------------------------------


def assert_refused(run: Run, *fragments: str, **options: Any) -> None:
    before = files(run)
    with pytest.raises(tr.UserError) as caught:
        certify(run, **options)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    assert files(run) == before


@pytest.mark.parametrize(
    "line",
    [
        "rubbish",
        "",
        "[]",
        "3",
        "null",
        '{"index": 1}',
        '{"index": 1, "label": 0, "prediction": 1, "verdict": "robust", "stage": "ibp", '
        '"margin": 1.0, "seconds": 0.1, "times": {}}',
        '{"index": [], "label": 0, "prediction": 1, "verdict": "verified", "stage": "ibp", '
        '"margin": 1.0, "seconds": 0.1, "times": {}}',
        '{"index": "2", "label": 0, "prediction": 1, "verdict": "verified", "stage": "ibp", '
        '"margin": 1.0, "seconds": 0.1, "times": {}}',
        '{"index": 2, "label": 0, "prediction": 0, "verdict": "verified", "stage": "ibp", '
        '"margin": 1.0, "seconds": "long", "times": {}}',
        '{"index": 2, "label": 0, "prediction": 0, "verdict": "verified", "stage": "ibp", '
        '"margin": 1.0, "seconds": 0.1, "times": 3}',
        '{"index": 77, "label": 0, "prediction": 0, "verdict": "verified", "stage": "ibp", '
        '"margin": 1.0, "seconds": 0.1, "times": {}}',
        b"\xff\xfe\x00".decode("latin-1"),
    ],
)
def test_a_damaged_line_is_a_clear_error(certifiable: Run, line: str) -> None:
    certify(certifiable)
    kept = certifiable.journal.read_text(encoding="utf-8").splitlines()
    damaged = "\n".join([*kept[:2], line, *kept[3:]]) + "\n"
    certifiable.journal.write_text(damaged, encoding="latin-1")
    assert_refused(certifiable, "certification.jsonl", "line 3", "--force")
    certify(certifiable, force=True)
    assert {r["index"]: (r["verdict"], r["stage"]) for r in lines(certifiable)} == EXPECTED


def test_a_sample_with_two_different_verdicts_is_a_clear_error(certifiable: Run) -> None:
    certify(certifiable)
    records = lines(certifiable)
    unknown = next(r for r in records if r["verdict"] == "unknown")
    claim = json.dumps({**unknown, "verdict": "verified", "stage": "ibp", "margin": 1.0})
    with certifiable.journal.open("a") as file:
        file.write(claim + "\n")
    assert_refused(certifiable, "certification.jsonl", "--force")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", '{"settings": null}', "{}"])
def test_a_damaged_summary_is_a_clear_error(certifiable: Run, content: str) -> None:
    certify(certifiable)
    certifiable.certification.write_text(content)
    assert_refused(certifiable)
    certify(certifiable, force=True)


def test_a_journal_without_its_summary_is_a_clear_error(certifiable: Run) -> None:
    certify(certifiable)
    certifiable.certification.unlink()
    assert_refused(certifiable, "certification.json")


def other_network() -> nn.Sequential:
    """Return `blind_spot` with one weight a little different."""
    module = blind_spot()
    with torch.no_grad():
        module[1].weight[0, 0] += 2.0**-10
    return module


def replace_network(run: Run, module: nn.Sequential) -> None:
    nets.save(module, nets.load_architecture(run.folder), run.folder)


def test_a_network_trained_again_needs_force(certifiable: Run) -> None:
    certify(certifiable)
    stale = {path.name for path in certifiable.counterexamples.iterdir()}
    replace_network(certifiable, other_network())
    assert_refused(certifiable, "weights", "--force")
    # Class 0 always: other samples are broken now, and the old points must not stay.
    constant = network(([[0.0, 0.0]] * 3, [0.0] * 3), ([[0.0] * 3] * 2, [1.0, 0.0]))
    replace_network(certifiable, constant)
    summary = certify(certifiable, force=True)
    assert (summary.verified, summary.falsified) == (5, 5)
    assert summary.settings.items() >= certifiable.fingerprints().items()
    assert stale and not certifiable.counterexamples.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", "0.2"),
        ("samples", 9),
        ("start", 1),
        ("stages", ("attack", "ibp")),
        ("stages", ("ibp",)),
        ("steps", 11),
        ("restarts", 1),
        ("seed", 1),
        ("timeout", 30.0),
    ],
)
def test_other_settings_need_force(certifiable: Run, name: str, value: Any) -> None:
    certify(certifiable)
    assert_refused(certifiable, name, "--force", **{name: value})
    summary = certify(certifiable, force=True, **{name: value})
    asked = summary.settings[name]
    assert asked == (list(value) if isinstance(value, tuple) else value)
    assert summary.complete


def test_the_same_radius_spelt_differently_is_the_same(certifiable: Run) -> None:
    certify(certifiable, eps="1/10")
    for eps in (0.1, "0.1", "0.10", " 1 / 10", "10/100", None):
        assert certify(certifiable, eps=eps).complete


def test_force_keeps_what_is_not_its_own(certifiable: Run) -> None:
    certify(certifiable)
    for name in ("notes.txt", "counterexamples/notes.txt"):
        (certifiable.folder / name).write_text("mine")
    certify(certifiable, force=True, eps="0.001")
    assert (certifiable.folder / "notes.txt").read_text() == "mine"
    assert [p.name for p in certifiable.counterexamples.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"stages": ("ibp", "atack")}, "attack"),
        ({"stages": ()}, "stages"),
        ({"stages": ("ibp", "ibp")}, "stages"),
        ({"eps": 0}, "(0, 1]"),
        ({"eps": 1.5}, "(0, 1]"),
        ({"eps": -0.1}, "(0, 1]"),
        ({"eps": float("nan")}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"samples": 0}, "samples"),
        ({"samples": 11}, "samples"),
        ({"start": 10}, "start"),
        ({"start": -1}, "start"),
        ({"steps": 0}, "steps"),
        ({"restarts": 0}, "restarts"),
        ({"seed": 2**80}, "seed"),
        ({"device": "abacus"}, "device"),
    ],
)
def test_bad_arguments_write_nothing(
    certifiable: Run, options: dict[str, Any], fragment: str
) -> None:
    assert_refused(certifiable, fragment, **options)


def test_the_summary_object_is_what_its_fields_say(certifiable: Run) -> None:
    summary = certify(certifiable)
    assert dataclasses.asdict(summary) == summary.to_json()
