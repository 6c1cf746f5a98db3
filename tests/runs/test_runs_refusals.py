"""Journals that are damaged, or of another network or other settings."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from certified_runs import EXPECTED, certify, files, lines
from handmade import blind_spot, network
from torch import nn

import tightrope as tr
from tightrope import nets
from tightrope.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")


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
        ("stages", ("attack", "ibp")),
        ("stages", ("ibp",)),
        ("steps", 11),
        ("restarts", 1),
        ("seed", 1),
        ("timeout", 30.0),
        ("split", "input"),
        ("branching", "babsr"),
        ("cuts", "off"),
    ],
)
def test_other_settings_need_force(certifiable: Run, name: str, value: Any) -> None:
    certify(certifiable)
    assert_refused(certifiable, name, "--force", **{name: value})
    summary = certify(certifiable, force=True, **{name: value})
    asked = summary.settings[name]
    assert asked == (list(value) if isinstance(value, tuple) else value)
    assert summary.complete
    assert_refused(certifiable, name, "--force")  # back to what was not said


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
