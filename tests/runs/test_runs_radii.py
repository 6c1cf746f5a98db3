"""Several radii and ranges of samples in one folder."""

from __future__ import annotations

import importlib
import json
import shutil
from fractions import Fraction
from typing import Any

import pytest
from certified_runs import certify, lines

from tightrope.answer import Verdict
from tightrope.errors import UserError
from tightrope.radius import parse_radii
from tightrope.runs import Run
from tightrope.runs.coverage import asked, at_radius, joined, named
from tightrope.runs.journal import Record, read_journal

certify_module = importlib.import_module("tightrope.certification.session")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "BATCH", 4)


def verdicts(run: Run, eps: Fraction) -> dict[int, str]:
    records = read_journal(run.journal).whole()
    return {i: str(r.verdict) for i, r in at_radius(records, eps, Fraction(1, 10)).items()}


def test_more_samples_keep_the_first(certifiable: Run) -> None:
    first = certify(certifiable, samples=4)
    before = certifiable.journal.read_bytes()
    whole = certify(certifiable, samples=10)
    assert certifiable.journal.read_bytes().startswith(before)
    assert (first.samples, whole.samples) == (4, 10)
    assert sorted(r["index"] for r in lines(certifiable)) == list(range(10))
    again = certifiable.journal.read_bytes()
    few = certify(certifiable, samples=3)  # all of that is known
    assert (few.samples, few.complete) == (3, True)
    assert certifiable.journal.read_bytes() == again
    # The folder's own summary is about everything in it.
    written = json.loads(certifiable.certification.read_text())
    assert (written["samples"], written["settings"]["samples"]) == (10, 10)


def test_ranges_with_a_gap(certifiable: Run) -> None:
    certify(certifiable, samples=2)
    certify(certifiable, start=7, samples=3)
    written = json.loads(certifiable.certification.read_text())
    assert written["samples"] == 5 and written["complete"]
    assert written["settings"]["ranges"] == {"0.1": [[0, 2], [7, 10]]}
    certify(certifiable)
    settings = json.loads(certifiable.certification.read_text())["settings"]
    assert "ranges" not in settings and settings["samples"] == 10
    assert len(lines(certifiable)) == 10


def test_a_list_of_radii_is_one_after_the_other(certifiable: Run, tmp_path: Any) -> None:
    """Each verdict is the one of a certification of that radius alone, or follows from another."""
    radii = ["0.01", "0.05", "0.1", "0.3"]
    alone: dict[str, dict[int, str]] = {}
    for eps in radii:
        copy = Run(tmp_path / eps)
        shutil.copytree(certifiable.folder, copy.folder)
        certify(copy, eps=eps)
        alone[eps] = {r["index"]: r["verdict"] for r in lines(copy)}
    summary = certify(certifiable, eps=",".join(radii))
    assert summary.settings["eps"] == "0.1"  # the run's own
    assert [point["eps"] for point in summary.curve] == radii
    opposite = {"verified": "falsified", "falsified": "verified"}
    for eps in radii:
        found = verdicts(certifiable, Fraction(eps))
        assert sorted(found) == list(range(10))
        for index, verdict in found.items():
            assert alone[eps][index] != opposite.get(verdict)
    certified = [point["certified"] for point in summary.curve]
    assert certified == sorted(certified, reverse=True)
    assert len({point["natural"] for point in summary.curve}) == 1
    # What another radius settles has no line of its own.
    settled = sum(len(lines(Run(tmp_path / eps))) for eps in radii) - len(lines(certifiable))
    assert settled > 5
    before = certifiable.journal.read_bytes()
    assert certify(certifiable, eps=radii).curve == summary.curve
    assert certifiable.journal.read_bytes() == before


def test_another_radius_later(certifiable: Run) -> None:
    own = certify(certifiable)
    small = certify(certifiable, eps="0.01", samples=6)
    assert (small.settings["eps"], small.samples, small.curve) == ("0.01", 6, [])
    written = json.loads(certifiable.certification.read_text())
    assert (written["settings"]["eps"], written["verified"]) == ("0.1", own.verified)
    assert [(p["eps"], p["samples"]) for p in written["curve"]] == [("0.01", 6), ("0.1", 10)]
    named_lines = [r for r in lines(certifiable) if "eps" in r]
    assert named_lines and {r["eps"] for r in named_lines} == {"0.01"}
    proved = {
        r["index"] for r in lines(certifiable) if r["verdict"] == "verified" and "eps" not in r
    }
    assert not proved & {r["index"] for r in named_lines}
    for record in named_lines:
        if "counterexample" in record:
            assert record["counterexample"].endswith("-0.01.npy")
            assert (certifiable.folder / record["counterexample"]).exists()
    certify(certifiable, force=True)
    assert not any("-0.01" in path.name for path in certifiable.counterexamples.iterdir())


def test_an_interrupted_curve_goes_on(certifiable: Run) -> None:
    whole = certify(certifiable, eps="0.05,0.1")
    every = certifiable.journal.read_text().splitlines(keepends=True)
    for kept in range(len(every)):
        certifiable.journal.write_text("".join(every[:kept]))
        again = certify(certifiable, eps="0.05,0.1")
        assert again.curve == whole.curve
        timeless = [
            {k: v for k, v in r.items() if k not in ("seconds", "times")}
            for r in lines(certifiable)
        ]
        expected = [json.loads(line) for line in every]
        assert sorted(timeless, key=str) == sorted(
            ({k: v for k, v in r.items() if k not in ("seconds", "times")} for r in expected),
            key=str,
        )


@pytest.mark.parametrize("eps", ["", "0.1,,0.2", "0.1,0.10", [], ["0.1", "x"], "0.1;0.2"])
def test_no_radii(certifiable: Run, eps: Any) -> None:
    with pytest.raises(UserError, match="eps must be"):
        certify(certifiable, eps=eps)
    assert not certifiable.journal.exists()


# --- what follows from what -----------------------------------------------------------------------


def record(index: int, verdict: str, eps: str | None = None) -> Record:
    return Record(index, 0, 0, Verdict(verdict), "ibp", None, 1.0, {"ibp": 1.0}, eps=eps)


def test_proofs_go_down_and_counterexamples_up() -> None:
    own = Fraction(1, 10)
    records = [
        *(record(0, "verified"), record(1, "falsified"), record(2, "unknown")),
        *(
            record(3, "verified", "0.2"),
            record(4, "falsified", "0.05"),
            record(2, "verified", "0.2"),
        ),
        *(record(5, "unknown", "0.05"), record(5, "falsified", "0.01")),
    ]
    at = {eps: at_radius(records, Fraction(eps), own) for eps in ("0.05", "0.1", "0.2")}
    said = {eps: {i: str(r.verdict) for i, r in found.items()} for eps, found in at.items()}
    good, bad = "verified", "falsified"
    assert said["0.05"] == {0: good, 3: good, 2: good, 4: bad, 5: bad}
    assert said["0.1"] == {0: good, 1: bad, 2: good, 3: good, 4: bad, 5: bad}
    assert said["0.2"] == {1: bad, 2: good, 3: good, 4: bad, 5: bad}
    # Time was spent on one radius only.
    assert at["0.1"][0].seconds == 1.0 and at["0.05"][0].seconds == 0.0


def test_ranges_are_read_as_they_were_written() -> None:
    for ranges in (
        {"0.1": [(0, 10)]},
        {"0.1": [(0, 2), (5, 6)]},
        {"0.1": [(3, 4)], "2/255": [(0, 9)]},
    ):
        assert asked(named(ranges, "0.1")) == ranges
    assert joined({"0.1": [(0, 2)]}, {"0.1": [(2, 5), (9, 10)]}) == {"0.1": [(0, 5), (9, 10)]}
    assert joined({"0.1": [(0, 9)]}, {"0.2": [(1, 2)]}) == {"0.1": [(0, 9)], "0.2": [(1, 2)]}
    assert parse_radii("0.1, 2/255") == [Fraction(1, 10), Fraction(2, 255)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eps": "0.1"},
        {"eps": "0.1", "samples": "all"},
        {"eps": "0.1", "samples": 0},
        {"eps": "x", "samples": 1},
        {"ranges": []},
        {"ranges": {}},
        {"ranges": {"0.1": []}},
        {"ranges": {"0.1": [[0]]}},
        {"ranges": {"0.1": [[1, 0]]}},
        {"ranges": {"0.1": [[0, 10**15]]}},
        {"ranges": {"0.1": 3}},
    ],
)
def test_damaged_ranges(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        asked(settings)


def test_a_folder_with_damaged_ranges_is_refused(certifiable: Run) -> None:
    certify(certifiable)
    written = json.loads(certifiable.certification.read_text())
    written["settings"]["ranges"] = {"0.1": "all"}
    certifiable.certification.write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"damaged.*--force"):
        certify(certifiable)
    assert certify(certifiable, force=True).complete
