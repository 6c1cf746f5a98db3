"""The analysis of `precision` on run folders made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from analyses import FAILS, HOLDS, analyse, claim, precision_runs, verdicts

from tightrope.study import published


def test_precision_as_published(tmp_path: Path) -> None:
    precision_runs(tmp_path, published.EXACT)
    found = analyse("precision", tmp_path)
    assert set(verdicts(found)) == {HOLDS} and not found.problems
    accuracies, errors, comparison = found.tables
    taps = next(row for row in accuracies.rows if row["method"] == "TAPS")
    assert taps["exact"] == pytest.approx(87.14) and taps["paper_exact"] == 87.14
    assert (taps["seeds"], taps["mean"]) == (3, pytest.approx(87.14))
    assert taps["deviation"] == pytest.approx(0.3)
    assert next(row for row in accuracies.rows if row["method"] == "PGD")["seeds"] == 1
    assert (taps["pgd"], taps["taps"], taps["ibp"]) == (75.0, 75.0, 25.0)
    sabr = next(r for r in errors.rows if (r["method"], r["estimate"]) == ("TAPS", "SABR"))
    assert sabr["mean"] == pytest.approx(0.15) and sabr["absolute"] == pytest.approx(0.3)
    assert sabr["samples"] == 4 and sabr["paper_absolute"] == 0.290
    assert [row["compared"] for row in comparison.rows] == [2] * 5
    assert [row["contradictions"] for row in comparison.rows] == [0] * 5


def test_precision_tells_what_does_not_hold(tmp_path: Path) -> None:
    precision_runs(tmp_path, {**published.EXACT, "sabr": 88.0, "pgd": 90.0}, taps_error=0.08)
    found = analyse("precision", tmp_path)
    assert claim(found, "rises from IBP").verdict == FAILS
    assert claim(found, "least robust").verdict == FAILS
    assert claim(found, "within a point").verdict == FAILS
    assert "sabr +1.79" in claim(found, "within a point").evidence
    assert claim(found, "five times smaller").verdict == FAILS
    assert claim(found, "On the TAPS-trained network TAPS is the most").verdict == HOLDS


def test_robust_accuracies_are_judged_in_the_mean(tmp_path: Path) -> None:
    precision_runs(tmp_path, published.EXACT)
    for name, accuracy in (("tiny-taps", 88.6), ("tiny-taps-seed1", 87.1)):
        with_accuracy(tmp_path / name, accuracy)
    near = claim(analyse("precision", tmp_path), "within a point")
    assert near.verdict == HOLDS and "taps +0.37" in near.evidence
    with_accuracy(tmp_path / "tiny-taps-seed2", 89.0)
    near = claim(analyse("precision", tmp_path), "within a point")
    assert near.verdict == FAILS and "taps +1.09" in near.evidence


def with_accuracy(run: Path, percent: float) -> None:
    path = run / "certification.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "certified": percent / 100}))


def test_staps_may_be_half_a_point_below_taps(tmp_path: Path) -> None:
    precision_runs(tmp_path / "a", {**published.EXACT, "staps": 86.7})
    assert claim(analyse("precision", tmp_path / "a"), "rises from IBP").verdict == HOLDS
    precision_runs(tmp_path / "b", {**published.EXACT, "staps": 86.6})
    assert claim(analyse("precision", tmp_path / "b"), "rises from IBP").verdict == FAILS


@pytest.mark.parametrize("shift", [0.01, -0.01])
def test_a_disagreement_with_the_program_is_a_problem(tmp_path: Path, shift: float) -> None:
    precision_runs(tmp_path, published.EXACT, shift=shift)
    found = analyse("precision", tmp_path)
    assert len(found.problems) == 5 and "contradict each other on 2 samples" in found.problems[0]
    assert [row["contradictions"] for row in found.tables[2].rows] == [2] * 5


def test_samples_that_nobody_solved_do_not_count(tmp_path: Path) -> None:
    precision_runs(tmp_path, published.EXACT)
    path = tmp_path / "tiny-taps" / "exact.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = '{"index": 0, "by": "nobody", "lower": -1e30, "upper": 1e30, "milp": null}'
    path.write_text("\n".join(lines) + '\n{"index": 4, "by"')  # and a torn line
    found = analyse("precision", tmp_path)
    row = next(r for r in found.tables[2].rows if r["method"] == "TAPS")
    assert (row["solved"], row["open"], row["compared"]) == (3, 1, 1)
