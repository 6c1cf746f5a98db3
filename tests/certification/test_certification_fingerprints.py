"""Verdicts are about one network and one data set, and are not taken for those of another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handmade import blind_spot, write_run

import tightrope as tr
from tightrope import nets
from tightrope.data.dataset import Dataset
from tightrope.runs.folder import FINGERPRINTS, Run

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"stages": ("ibp", "attack"), "steps": 10, "restarts": 2}


def certify(run: Run, **options: Any) -> tr.Certification:
    return tr.certify(run, **{**OPTIONS, **options})


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.journal.read_text().splitlines()]


def files(run: Run) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def assert_refused(run: Run, *fragments: str, **options: Any) -> None:
    before = files(run)
    with pytest.raises(tr.UserError) as caught:
        certify(run, **options)
    assert "\n" not in str(caught.value)
    for fragment in (*fragments, "--force"):
        assert fragment in str(caught.value), str(caught.value)
    assert files(run) == before


def change_data(run: Run, **changes: Callable[[np.ndarray], None]) -> None:
    path = run.folder / "data.npz"
    with np.load(path) as stored:
        arrays = dict(stored)
    for name, change in changes.items():
        change(arrays[name])
    np.savez(path, **arrays)


def change_architecture(run: Run, **changes: Any) -> None:
    path = run.folder / nets.ARCHITECTURE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def as_before(run: Run) -> None:
    """Make a certification look as one by a version that noted neither network nor samples."""
    summary = json.loads(run.certification.read_text())
    for name in ("architecture", "normalization"):
        del summary["settings"][name]
    run.certification.write_text(json.dumps(summary, indent=2) + "\n")
    old = [{k: v for k, v in line.items() if k != "fingerprint"} for line in lines(run)]
    run.journal.write_text("".join(json.dumps(line) + "\n" for line in old))


def interrupted(run: Run) -> None:
    """Forget all records but the first four."""
    kept = run.journal.read_text().splitlines(keepends=True)[:4]
    run.journal.write_text("".join(kept))


# --- what is noted ------------------------------------------------------------------------------


def test_every_record_and_the_settings_have_their_hashes(certifiable: Run) -> None:
    summary = certify(certifiable)
    hashes = {line["index"]: line["fingerprint"] for line in lines(certifiable)}
    assert len(set(hashes.values())) == 10  # ten different samples
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes.values())
    assert {name: summary.settings[name] for name in FINGERPRINTS} == certifiable.fingerprints()
    assert len({summary.settings[name] for name in FINGERPRINTS}) == 3


def dataset(images: torch.Tensor, labels: list[int]) -> Dataset:
    y = torch.tensor(labels)
    return Dataset("made up", images, y, images, y, ("a", "b", "c"), (0.0,), (1.0,))


def test_hashes_tell_images_labels_and_order_apart() -> None:
    images = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 1]], dtype=torch.uint8)
    hashes = list(dataset(images, [0, 0, 1, 0]).fingerprints(torch.arange(4)))
    assert hashes[0] == hashes[3] and len(set(hashes)) == 3
    again = list(dataset(images, [0, 0, 1, 0]).fingerprints(torch.tensor([2, 0])))
    assert again == [hashes[2], hashes[0]]
    # The network gets the same numbers, whatever they are stored as.
    floats = dataset(images.float() / 255, [0, 0, 1, 0])
    assert list(floats.fingerprints(torch.arange(4))) == hashes
    wide = dataset(images.reshape(4, 1, 1, 2), [0, 0, 1, 0])
    assert not set(wide.fingerprints(torch.arange(4))) & set(hashes)


def test_a_sample_that_is_gone_has_changed() -> None:
    images = torch.zeros(2, 2, dtype=torch.uint8)
    here = dataset(images, [0, 1])
    known = dict(enumerate(here.fingerprints(torch.arange(2))))
    assert here.changed_sample(known) is None and here.changed_sample({}) is None
    assert here.changed_sample({**known, 5: known[0]}) == 5
    assert here.changed_sample({0: known[1], 1: known[1]}) == 0


# --- the data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [True, False])
def test_another_image(certifiable: Run, complete: bool) -> None:
    certify(certifiable)
    index = lines(certifiable)[2]["index"]
    if not complete:
        interrupted(certifiable)

    def change(x: np.ndarray) -> None:
        x[index, 0] = np.nextafter(x[index, 0], np.float32(2))

    change_data(certifiable, x_test=change)
    assert_refused(certifiable, f"test sample {index} has another image", "data.npz")
    certify(certifiable, force=True)
    assert certify(certifiable).complete


def test_another_label(certifiable: Run) -> None:
    certify(certifiable)

    def change(y: np.ndarray) -> None:
        y[3] = 1 - y[3]

    change_data(certifiable, y_test=change)
    assert_refused(certifiable, "test sample 3 has another label")


def test_two_data_sets_do_not_mix(certifiable: Run) -> None:
    """Interrupted, and then the file was replaced by another one of the same size."""
    certify(certifiable)
    interrupted(certifiable)
    change_data(certifiable, x_test=lambda x: np.copyto(x, x[::-1].copy()))
    assert_refused(certifiable, "has another image")


def test_samples_that_were_not_certified_may_change(certifiable: Run) -> None:
    certify(certifiable, samples=5)
    change_data(certifiable, x_test=lambda x: np.copyto(x[5:], 0.5))
    assert certify(certifiable, samples=5).complete


def test_a_file_written_anew_with_the_same_content(certifiable: Run) -> None:
    first = certify(certifiable)
    change_data(certifiable)
    assert certify(certifiable) == first


# --- the network ----------------------------------------------------------------------------------


@pytest.fixture
def normalized(tmp_path: Path) -> Run:
    """A run whose certified accuracy depends on its normalisation."""
    x = np.array([[0.875, 0.0], [0.9375, 0.0], [0.75, 0.125], [0.8125, 0.0]], np.float32)
    run = write_run(tmp_path / "run", blind_spot(), x, [0, 0, 0, 0])
    plain = nets.load_architecture(run.folder)
    architecture = dataclasses.replace(plain, normalize=((0.0,), (1.0,)))
    module = architecture.build()
    for mine, theirs in zip(module.parameters(), blind_spot().parameters(), strict=True):
        mine.data.copy_(theirs)
    nets.save(module, architecture, run.folder)
    return run


@pytest.mark.parametrize("complete", [True, False])
def test_another_normalisation(normalized: Run, complete: bool) -> None:
    """It had kept the certified accuracy of the network before."""
    assert certify(normalized).certified == 1.0
    if not complete:
        kept = normalized.journal.read_text().splitlines(keepends=True)[:2]
        normalized.journal.write_text("".join(kept))
    change_architecture(normalized, normalize={"mean": [0.4], "std": [1.0]})
    assert_refused(normalized, "another network", "normalization")
    assert certify(normalized, force=True).certified < 1.0


def test_other_weights(certifiable: Run) -> None:
    certify(certifiable)
    module = blind_spot()
    with torch.no_grad():
        module[1].weight[0, 0] += 2.0**-10
    nets.save(module, nets.load_architecture(certifiable.folder), certifiable.folder)
    assert_refused(certifiable, "another network", "changed: weights)")


def test_another_architecture(certifiable: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the same weights."""
    certify(certifiable)
    described = nets.Architecture.to_json

    def other(self: nets.Architecture) -> dict[str, Any]:
        return {**described(self), "architecture": "a twin"}

    monkeypatch.setattr(nets.Architecture, "to_json", other)
    assert_refused(certifiable, "another network", "changed: architecture)")


def test_only_the_content_of_model_json_counts(certifiable: Run) -> None:
    first = certify(certifiable)
    path = certifiable.folder / nets.ARCHITECTURE_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items()))))
    assert certify(certifiable) == first


# --- folders of earlier versions ----------------------------------------------------------------


@pytest.mark.parametrize("complete", [True, False])
def test_a_certification_by_an_earlier_version_needs_force(
    certifiable: Run, complete: bool
) -> None:
    first = certify(certifiable)
    as_before(certifiable)
    if not complete:
        interrupted(certifiable)
    assert_refused(certifiable, "by an earlier version")
    again = certify(certifiable, force=True)
    assert again.verified == first.verified and all("fingerprint" in r for r in lines(certifiable))
    assert certify(certifiable) == again


@pytest.mark.parametrize("part", ["journal", "settings"])
def test_half_a_certification_by_an_earlier_version(certifiable: Run, part: str) -> None:
    certify(certifiable)
    summary, journal = certifiable.certification.read_text(), certifiable.journal.read_text()
    as_before(certifiable)
    if part == "journal":
        certifiable.certification.write_text(summary)
    else:
        certifiable.journal.write_text(journal)
    assert_refused(certifiable, "by an earlier version")


def test_other_weights_of_an_earlier_version_are_still_told(certifiable: Run) -> None:
    certify(certifiable)
    as_before(certifiable)
    weights = certifiable.weights.read_bytes()
    certifiable.weights.write_bytes(weights[:-4] + b"\0\0\0\1")
    assert_refused(certifiable, "changed: weights)")


def test_other_settings_of_an_earlier_version_are_still_told(certifiable: Run) -> None:
    certify(certifiable)
    as_before(certifiable)
    assert_refused(certifiable, "other settings (seed)", seed=1)


# --- the other commands ---------------------------------------------------------------------------


def notices(run: Run) -> str:
    return " | ".join(tr.report(run).notices)


def test_reports_say_what_a_certification_is_not_of(normalized: Run) -> None:
    certify(normalized)
    assert not [n for n in tr.report(normalized).notices if "certification" in n]
    change_architecture(normalized, normalize={"mean": [0.4], "std": [1.0]})
    assert "certification is of other normalization than in the folder" in notices(normalized)
    change_architecture(normalized, normalize={"mean": [0.0], "std": [1.0]})

    def change(x: np.ndarray) -> None:
        x[3, 1] = 0.25

    change_data(normalized, x_test=change)
    assert "certification is of other samples than those in the data set" in notices(normalized)


def test_reports_of_earlier_versions_are_as_ever(certifiable: Run) -> None:
    summary = certify(certifiable)
    as_before(certifiable)
    result = tr.report(certifiable)
    assert not [n for n in result.notices if "certification" in n]
    assert f"{100 * summary.certified:.2f}" in result.page.read_text(encoding="utf-8")


def test_attacks_and_estimates_note_the_network(certifiable: Run) -> None:
    quick: dict[str, Any] = {"steps": 2, "restarts": 1}
    for result in (tr.attack(certifiable, **quick), tr.estimate(certifiable, **quick)):
        assert result.settings.items() >= certifiable.fingerprints().items()


def test_comparisons_do_not_take_other_samples_for_these(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: generator.random((40, 6), dtype=np.float32) for name in ("x_train", "x_test")
    }
    arrays |= {name: np.arange(40) % 2 for name in ("y_train", "y_test")}
    np.savez(tmp_path / "data.npz", **arrays)

    def compare() -> tr.Comparison:
        return tr.compare(
            ["ibp"],
            out=tmp_path / "out",
            samples=5,
            data=str(tmp_path / "data.npz"),
            **{"net": "mlp", "width": 4, "depth": 1, "batch_norm": False, "validation": 10},
            **{"epochs": 1, "annealing_epochs": 0, "batch_size": 10, "decay_epochs": ()},
        )

    first = compare()
    assert not first.entry("ibp").errors and compare() == first
    arrays["x_test"][2, 1] /= 2
    np.savez(tmp_path / "data.npz", **arrays)
    entry = compare().entry("ibp")
    assert not entry.values["certified"]
    assert "test sample 2 has another image" in entry.errors[0]
