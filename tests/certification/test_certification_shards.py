"""Shards find what one process finds, and `merge` joins them, or says why not."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from certified_runs import EXPECTED, certify, files, lines
from handmade import certifiable_run

import tightrope as tr
from tightrope.errors import UserError
from tightrope.runs import Run
from tightrope.runs.shards import Shard

session = importlib.import_module("tightrope.certification.session")
TIMES = ("seconds", "times")


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BATCH", 4)


def records(run: Run) -> list[dict[str, Any]]:
    found = [{k: v for k, v in line.items() if k not in TIMES} for line in lines(run)]
    return sorted(found, key=lambda record: (record.get("eps", ""), record["index"]))


def points(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.counterexamples.iterdir()}


def part(run: Run, number: int, count: int) -> Run:
    return Run(run.folder / "shards" / f"{number}-of-{count}")


# --- who has which samples ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 12])
def test_every_sample_is_of_exactly_one_shard(count: int) -> None:
    batches = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    portions = [p for number in range(count) for p in Shard(number + 1, count).of(batches)]
    own = sorted(index for portion in portions for index in portion.own)
    assert own == list(range(12))
    assert all(p.batch in batches and p.own <= set(p.batch) for p in portions)


def test_a_shard_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match="shard 3/5 has no samples: there are only 3"):
        Shard(3, 5).of([[0, 1, 2]])


@pytest.mark.parametrize(
    "text", ["0/4", "5/4", "4", "1/0", "-1/4", "a/b", "1/2/3", "1/99999999", "", 3]
)
def test_a_shard_out_of_range_is_refused_in_one_line(certifiable: Run, text: Any) -> None:
    before = files(certifiable)
    with pytest.raises(UserError, match="shard must be K/N with 1 <= K <= N") as caught:
        certify(certifiable, shard=text)
    assert "\n" not in str(caught.value) and files(certifiable) == before


# --- certifying -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_shards_find_what_one_process_finds(tmp_path: Path, count: int) -> None:
    whole, run = certifiable_run(tmp_path / "whole"), certifiable_run(tmp_path / "run")
    expected = certify(whole)
    for number in range(1, count + 1):
        found = certify(run, shard=f"{number}/{count}")
        assert found.complete and 0 < found.samples < 10
        again = lines(part(run, number, count))
        assert certify(run, shard=f"{number}/{count}") == found  # goes on from what is there
        assert lines(part(run, number, count)) == again
    assert not run.journal.exists()
    merged = tr.merge(run)
    assert merged.complete and not merged.open
    assert records(run) == records(whole) and points(run) == points(whole)
    assert {r["index"]: (r["verdict"], r["stage"]) for r in lines(run)} == EXPECTED
    assert (merged.certified, merged.adversarial) == (expected.certified, expected.adversarial)
    assert merged.settings == expected.settings
    assert tr.merge(run) == merged  # once more changes nothing
    assert certify(run).samples == 10 and len(lines(run)) == 10  # and `certify` goes on from it


def test_an_interrupted_shard_goes_on(certifiable: Run) -> None:
    certify(certifiable, shard="1/2")
    shard = part(certifiable, 1, 2)
    before = records(shard)
    shard.journal.write_text("".join(shard.journal.read_text().splitlines(True)[:3]))
    assert certify(certifiable, shard="1/2").complete
    assert records(shard) == before


def test_a_shard_in_a_folder_of_its_own(certifiable: Run, tmp_path: Path) -> None:
    certify(certifiable, shard="1/2", out=tmp_path / "a")
    certify(certifiable, shard="2/2", out=tmp_path / "b")
    assert not (certifiable.folder / "shards").exists()
    with pytest.raises(UserError, match="no shards to merge; name the folders"):
        tr.merge(certifiable)
    assert tr.merge(certifiable, [tmp_path / "a"]).open == 0
    assert tr.merge(certifiable, [tmp_path / "b"]).samples == 10
    with pytest.raises(UserError, match="holds a run of its own"):
        certify(certifiable, shard="1/2", out=certifiable.folder)
    with pytest.raises(UserError, match="data, out and domain go with a network"):
        certify(certifiable, out=tmp_path / "c")


def test_shards_of_several_radii(tmp_path: Path) -> None:
    whole, run = certifiable_run(tmp_path / "whole"), certifiable_run(tmp_path / "run")
    radii = ("0.05", "0.1", "0.2")
    expected = certify(whole, eps=radii)
    for number in (1, 2, 3):
        certify(run, eps=radii, shard=f"{number}/3")
    merged = tr.merge(run)
    assert merged.curve == expected.curve and len(merged.curve) == 3
    assert merged.settings["eps"] == "0.1"
    assert certify(run, eps=radii).curve == expected.curve


def test_shards_of_another_norm(tmp_path: Path) -> None:
    whole, run = certifiable_run(tmp_path / "whole"), certifiable_run(tmp_path / "run")
    options = {"norm": "l2", "eps": "0.1"}
    expected = certify(whole, **options)
    certify(run, shard="1/2", **options)
    certify(run, shard="2/2", eps="0.1")  # the usual norm
    with pytest.raises(UserError, match="norm"):
        tr.merge(run)
    assert not run.journal.exists()
    certify(run, shard="2/2", force=True, **options)
    merged = tr.merge(run)
    assert records(run) == records(whole)
    assert merged.settings == expected.settings and merged.settings["norm"] == "l2"


def test_shards_of_a_network_from_elsewhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    data = torch.rand(9, 2), torch.randint(3, (9,))
    brought = {"data": data, "eps": "0.01", "stages": ("ibp", "attack"), "steps": 5}
    whole = tr.certify(module, out=tmp_path / "whole", **brought)
    for number in (1, 2):
        tr.certify(module, out=tmp_path / f"part{number}", shard=f"{number}/2", **brought)
    merged = tr.merge(tmp_path / "merged", [tmp_path / "part1", tmp_path / "part2"])
    assert records(Run(tmp_path / "merged")) == records(Run(tmp_path / "whole"))
    assert merged.certified == whole.certified and merged.complete


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def halves(certifiable: Run) -> Run:
    certify(certifiable, shard="1/2")
    certify(certifiable, shard="2/2")
    return certifiable


def change(run: Run, sample: int, **values: Any) -> None:
    """Change what a journal says of a sample, leaving the rest as it is."""
    changed = [{**line, **values} if line["index"] == sample else line for line in lines(run)]
    run.journal.write_text("".join(json.dumps(line) + "\n" for line in changed))


def refused(run: Run, *parts: Path) -> str:
    """Check that merging is refused in one line and changes nothing; return the line."""
    before = files(run)
    with pytest.raises(UserError) as caught:
        tr.merge(run, parts)
    assert files(run) == before and "\n" not in str(caught.value)
    return str(caught.value)


def test_another_network_is_refused(halves: Run, tmp_path: Path) -> None:
    summary = part(halves, 2, 2).certification
    told = json.loads(summary.read_text())
    told["settings"]["weights"] = "0" * 16
    summary.write_text(json.dumps(told))
    assert "2-of-2 is of another network" in refused(halves)
    assert "(other weights)" in refused(halves)
    # Without a network to compare with, the parts are compared with each other.
    parts = [part(halves, n, 2).folder for n in (1, 2)]
    assert "other settings" in refused(Run(tmp_path / "new"), *parts)


def test_other_settings_are_refused(halves: Run) -> None:
    certify(halves, shard="2/2", steps=11, force=True)
    message = refused(halves)
    assert "certified with other settings" in message and "(steps)" in message
    certify(halves, shard="2/2", force=True)
    certify(halves, steps=11, samples=3)  # what the run folder itself holds counts, too
    assert "(steps)" in refused(halves)


@pytest.mark.parametrize("index", [0, 9])
def test_contradicting_verdicts_are_refused(halves: Run, tmp_path: Path, index: int) -> None:
    shard = next(
        s
        for s in (part(halves, 1, 2), part(halves, 2, 2))
        if f'"index": {index},' in s.journal.read_text()
    )
    other = Run(tmp_path / "other")
    shutil.copytree(shard.folder, other.folder)
    change(other, index, verdict="falsified")
    message = refused(halves, shard.folder, other.folder)
    assert f"contradict each other: test sample {index} " in message
    change(other, index, verdict="unknown")  # somebody may have had less time
    for parts in ([shard, other], [other, shard]):
        merged = tr.merge(tmp_path / "new", [p.folder for p in parts])
        assert merged.complete
        (found,) = [r for r in lines(Run(tmp_path / "new")) if r["index"] == index]
        assert found["verdict"] == "verified"
        shutil.rmtree(tmp_path / "new")


def test_verdicts_of_two_radii_must_agree(certifiable: Run, tmp_path: Path) -> None:
    certify(certifiable, eps="0.05", samples=1, shard="1/1", out=tmp_path / "small")
    certify(certifiable, eps="0.1", samples=1, shard="1/1", out=tmp_path / "large")
    assert tr.merge(tmp_path / "new", [tmp_path / "small", tmp_path / "large"]).complete
    change(Run(tmp_path / "small"), 0, verdict="falsified")
    message = refused(certifiable, tmp_path / "small", tmp_path / "large")
    assert "contradict each other" in message


def test_other_samples_and_damage_are_refused(halves: Run, tmp_path: Path) -> None:
    copy = Run(tmp_path / "copy")
    shutil.copytree(part(halves, 1, 2).folder, copy.folder)
    change(copy, 0, fingerprint="0" * 16)
    parts = part(halves, 1, 2).folder, copy.folder
    assert "test sample 0 is not the same" in refused(halves, *parts)
    change(copy, 0, index=9)
    assert "which was not asked for" in refused(halves, copy.folder)
    copy.certification.write_text("{")
    assert "damaged" in refused(halves, copy.folder)
    copy.certification.unlink()
    assert "has no certification" in refused(halves, copy.folder)
    assert "is not a folder" in refused(halves, tmp_path / "nowhere")


def test_a_counterexample_that_is_missing_or_a_link_is_refused(halves: Run) -> None:
    path = next(part(halves, 1, 2).counterexamples.iterdir())
    path.rename(path.with_suffix(".moved"))
    assert "is missing: the part is not complete" in refused(halves)
    path.symlink_to(path.with_suffix(".moved"))
    assert "is a link" in refused(halves)


def test_a_kill_leaves_the_old_certification_or_the_new_one(
    halves: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At whichever file the merge is stopped, `certify` and a second merge go on."""
    merging = importlib.import_module("tightrope.runs.merging")
    for stop in range(1, 20):
        run = Run(tmp_path / f"run-{stop}")
        shutil.copytree(halves.folder, run.folder)
        left = [stop]

        def counted(name: str, left: list[int] = left) -> Any:
            write = getattr(merging, name)

            def write_or_stop(*arguments: Any, **options: Any) -> None:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
                write(*arguments, **options)

            return write_or_stop

        with monkeypatch.context() as patch:
            for name in ("write_bytes", "write_text", "write_json"):
                patch.setattr(merging, name, counted(name))
            try:
                tr.merge(run)
            except KeyboardInterrupt:
                assert certify(Run(run.folder)).complete
                assert tr.merge(run).complete and len(lines(run)) == 10
            else:
                break
    assert 5 < stop < 19
