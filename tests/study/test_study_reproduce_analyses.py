"""Each analysis on run folders made by hand: tables and verdicts follow from the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from analyses import FAILS, HOLDS, UNTESTED, analyse, claim, precision_runs, verdicts
from handmade_runs import make_run, robust

from tightrope.study import published
from tightrope.study.experiments import EXPERIMENTS, bound_gap
from tightrope.study.output import draw


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_without_runs_nothing_is_claimed(name: str, scale: str, tmp_path: Path) -> None:
    findings = analyse(name, tmp_path / "nowhere", scale=scale)
    assert findings.claims and set(verdicts(findings)) == {UNTESTED}
    assert findings.tables and not findings.problems and not findings.pictures


def test_a_failed_run_is_named_in_the_claims(tmp_path: Path) -> None:
    make_run(tmp_path, "mnist-0.1-cnn3-ibp")
    make_run(tmp_path, "mnist-0.1-cnn3-taps")
    found = analyse("main", tmp_path, failures={"mnist-0.1-cnn3-taps": "no memory"})
    about = claim(found, "mnist-0.1-cnn3: TAPS improves")
    assert about.verdict == UNTESTED
    assert about.evidence == "run mnist-0.1-cnn3-taps failed: no memory"
    rows = [r for r in found.tables[0].rows if r["group"] == "mnist-0.1-cnn3"]
    assert next(r for r in rows if r["key"] == "taps")["natural"] is None


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("content", ["", "{", "[]", '{"complete": true}', '{"margins": 3}', "\xff"])
def test_damaged_files_are_not_tested(name: str, content: str, tmp_path: Path) -> None:
    plans = EXPERIMENTS[name].plans("laptop") or EXPERIMENTS["precision"].plans("laptop")
    for plan in plans:
        run = make_run(tmp_path, plan.name)
        for file in ("certification.json", "margins.json", "exact.jsonl", "splits.json"):
            (run / file).write_bytes(content.encode("latin-1") + b"\n")
        (run / "history.jsonl").write_bytes(b"nonsense\n")
    assert set(verdicts(analyse(name, tmp_path))) == {UNTESTED}


# --- the others ---------------------------------------------------------------------------------


def test_votes_have_a_table_of_their_own(tmp_path: Path) -> None:
    name = "mnist-0.1-cnn3-noise"
    run = make_run(tmp_path, name, method="noise")
    (run / "certification.json").unlink(missing_ok=True)
    votes = {"samples": 500, "accuracy": 0.9, "abstained": 0.05, "certified": {"0.5": 0.75}}
    settings = {"sigma": 0.25, "draws": 1000, "alpha": 0.001}
    (run / "smoothing.json").write_text(json.dumps({**votes, "settings": settings}))
    proofs, noisy, _ = analyse("main", tmp_path).tables
    assert all(row["key"] != "noise" for row in proofs.rows)
    (row,) = noisy.rows
    assert (row["accuracy"], row["abstained"], row["at 0.5"]) == (90.0, 5.0, 75.0)
    assert (row["sigma"], row["draws"], row["alpha"], row["samples"]) == (0.25, 1000, 0.001, 500)
    assert row["at 1"] is None  # smoothed with other radii
    (run / "smoothing.json").write_text('{"samples": 500}')
    assert analyse("main", tmp_path).tables[1].rows[0]["accuracy"] is None


def test_main(tmp_path: Path) -> None:
    rows = {"ibp": (97.0, 93.0), "sabr": (98.0, 94.0), "taps": (97.5, 95.0), "staps": (98.2, 93.5)}
    for method, (natural, certified) in rows.items():
        name = f"mnist-0.1-cnn3-{method}"
        make_run(tmp_path, name, accuracies=(natural, 96.0, certified), method=method)
    found = analyse("main", tmp_path)
    assert claim(found, "mnist-0.1-cnn3: TAPS improves").verdict == HOLDS
    assert claim(found, "mnist-0.1-cnn3: TAPS or STAPS").verdict == HOLDS
    assert claim(found, "mnist-0.1-cnn3: STAPS improves").verdict == FAILS
    assert claim(found, "mnist-0.3-cnn3: TAPS improves").verdict == UNTESTED
    assert {row["group"] for row in found.tables[0].rows} == {"mnist-0.1-cnn3"}  # others: no run
    row = next(r for r in found.tables[0].rows if r["method"] == "SABR")
    assert (row["natural"], row["paper_natural"], row["paper_certified"]) == (98.0, 99.23, 98.22)


def test_helpers_stand_behind_what_they_help(tmp_path: Path) -> None:
    make_run(tmp_path, "mnist-0.1-cnn3-taps", accuracies=(97.5, 96.0, 95.0))
    assert not analyse("main", tmp_path).tables[2].rows
    make_run(tmp_path, "helped-sam", accuracies=(97.0, 96.5, 95.5))
    table, _, helpers = analyse("main", tmp_path).tables
    assert helpers.name == "helpers" and len(helpers.rows) == 8
    known = {row["helper"]: row["certified"] for row in helpers.rows if row["certified"]}
    assert known == {"-": 95.0, "SAM": 95.5}
    assert sum(row["certified"] is not None for row in table.rows) == 1


def test_weight(tmp_path: Path) -> None:
    names = ("equal-ibp", *(f"equal-taps-weight{w}" for w in ("0", "1")), "equal-taps")
    names = (*names, *(f"equal-taps-weight{w}" for w in ("10", "20", "inf")))
    for i, name in enumerate(names):
        certified = (85.0, 86, 88, 90, 89, 80, 40)[i]
        accuracies = (94.0 + i / 2, 91, certified)
        make_run(tmp_path, name, accuracies=accuracies, certifying=10.0 * (i + 1), by_ibp=60.0 - i)
    found = analyse("weight", tmp_path)
    assert verdicts(found) == [HOLDS] * 4 + [UNTESTED] * 4
    five = next(row for row in found.tables[0].rows if row["weight"] == "5")
    assert five["certified"] == pytest.approx(90) and five["paper_certified"] == 93.62
    assert five["seconds"] == pytest.approx(0.04)


def test_weight_without_a_peak(tmp_path: Path) -> None:
    names = ("ibp", "taps-weight0", "taps-weight1", "taps", "taps-weight10", "taps-weight20")
    for i, name in enumerate((*names, "taps-weightinf")):
        make_run(tmp_path, f"equal-{name}", accuracies=(95.0 - i, 91, 80.0 + i), certifying=9.0 - i)
    assert verdicts(analyse("weight", tmp_path)) == [FAILS] * 4 + [UNTESTED] * 4


def split_runs(folder: Path, **options: Any) -> None:
    # One ReLU is the preset's own split.
    names = ("-relus0", "", *(f"-relus{k}" for k in range(2, 7)))
    for k, ending in enumerate(names):
        own = {name: values[k] for name, values in options.items()}
        make_run(folder, f"narrow-taps{ending}", **own)


def test_split(tmp_path: Path) -> None:
    accuracies = [(93.0 + k, 92.0, 90.0 + (k == 3)) for k in range(7)]
    by_ibp = [88.0, 80, 70, 60, 5, 10, 50]
    split_runs(tmp_path, accuracies=accuracies, by_ibp=by_ibp)
    found = analyse("split", tmp_path)
    assert verdicts(found) == [HOLDS, HOLDS]
    third = found.tables[0].rows[3]
    assert (third["relus"], third["by_ibp"], third["by_crown"]) == (3, 60.0, 65.0)
    assert third["paper_by_ibp"] == 62.83
    # 2 sqrt(0.9 * 0.1 / 1000) is 1.9 points.
    assert found.claims[1].evidence.endswith(
        "-8.00 by IBP alone, on 1000 samples (certified ± 1.90)"
    )


def test_trainability(tmp_path: Path) -> None:
    good = [{t: 90.0 - abs(t - k) for t in range(7)} for k in range(7)]
    split_runs(tmp_path / "good", splits=good)
    found = analyse("trainability", tmp_path / "good")
    assert verdicts(found) == [HOLDS]
    assert found.tables[0].rows[2]["tested_4"] == pytest.approx(88.0)
    bad = [dict.fromkeys(range(7), 90.0 + 5 * (k == 1)) for k in range(7)]
    split_runs(tmp_path / "bad", splits=bad)
    assert verdicts(analyse("trainability", tmp_path / "bad")) == [FAILS]


def test_connector(tmp_path: Path) -> None:
    shapes = {"short-taps": (80, 85, 83), "equal-taps": (90, 90, 89)}
    for base, values in shapes.items():
        for ending, value in zip(("-connector0", "", "-connector1"), values, strict=True):
            # The seeds differ, by the same at every c; only their mean tells.
            seeds = {"": 0, "-seed1": 6, "-seed2": -3} if base == "short-taps" else {"": 0}
            for seed, shift in seeds.items():
                margins = {"taps": robust(value + shift), "natural": robust(value + shift + 5)}
                make_run(tmp_path, f"{base}{ending}{seed}", margins=margins)
    found = analyse("connector", tmp_path)
    assert verdicts(found) == [HOLDS, HOLDS, HOLDS, FAILS, FAILS, FAILS]
    assert [row["taps"] for row in found.tables[0].rows] == [81, 86, 84, 90, 90, 89]
    assert [row["seeds"] for row in found.tables[0].rows] == [3, 3, 3, 1, 1, 1]
    assert "c = 0: 81.00 ± 4.58, c = 0.5: 86.00" in found.claims[0].evidence
    # A reader should not have to work out what the seeds leave open.
    assert found.claims[0].evidence.endswith("c = 1: 84.00 ± 4.58")
    assert found.claims[3].evidence.endswith("c = 1: 89.00 (one seed each)")


def test_estimators(tmp_path: Path) -> None:
    natural = {"equal-taps": 96, "equal-taps-single": 30}
    natural |= {"equal-taps-relus2": 96, "equal-taps-relus2-single": 97}
    natural |= {f"short-taps{seed}": 90 + i for i, seed in enumerate(("", "-seed1", "-seed2"))}
    for name, value in natural.items():
        certified = value - 10.0
        margins = {"natural": robust(value), "taps": robust(value - 20)}
        make_run(tmp_path, name, accuracies=(value, 90, certified), margins=margins)
    found = analyse("estimators", tmp_path)
    assert verdicts(found) == [UNTESTED] * 4 + [HOLDS] * 4 + [FAILS] * 3
    assert found.tables[0].rows[3]["paper_certified"] == 93.62
    assert found.tables[0].rows[1]["certified"] == 81.0
    for seed in ("", "-seed1", "-seed2"):
        margins = {"natural": robust(91), "taps": robust(72)}
        name = f"short-taps-single{seed}"
        make_run(tmp_path, name, accuracies=(91, 90, 80.5), margins=margins)
    again = analyse("estimators", tmp_path)
    assert verdicts(again)[:4] == [HOLDS, FAILS, HOLDS, FAILS]  # natural accuracy is equal
    evidence = [claim.evidence for claim in again.claims]
    assert evidence[0].startswith("single 80.50 ± 0.00, multi 81.00 ± 1.00 on 1000 samples (± 2.5")
    assert evidence[0].endswith("each) (within the deviation over seeds)")
    # Estimates are of other samples than certificates.
    assert evidence[1] == "single 72.00 ± 0.00, multi 71.00 ± 1.00"


def test_attack_strength(tmp_path: Path) -> None:
    make_run(tmp_path, "short-ibp", accuracies=(90, 81, 80.0))
    names = {"-steps1": 82, "-steps1-restarts3": 82, "-steps5": 82, "-steps5-restarts3": 82}
    names |= {"": 83, "-restarts3": 84, "-steps100": 85}
    for ending, certified in names.items():
        natural = 95.0 - certified / 100
        make_run(tmp_path, f"short-taps{ending}", accuracies=(natural, 90, certified))
    found = analyse("attack-strength", tmp_path)
    assert verdicts(found) == [HOLDS] * 3
    last = found.tables[0].rows[-1]
    assert (last["steps"], last["certified"], last["paper_certified"]) == (100, 85.0, 93.46)


def test_bound_gap(tmp_path: Path) -> None:
    for method, scale in {"ibp": 0.1, "sabr": 0.4, "taps": 0.9, "staps": 1.2}.items():
        gaps = [scale * (1 + i / 100) for i in range(100)]
        margins = {"taps": [0.0] * 100, "staps": [0.0] * 100}
        margins |= {"ibp": gaps, "sabr": [gap / 5 for gap in gaps]}
        make_run(tmp_path, f"tiny-{method}", margins=margins)
    found = analyse("bound-gap", tmp_path)
    assert verdicts(found) == [HOLDS] * 3
    taps = next(row for row in found.tables[0].rows if row["method"] == "TAPS")
    assert taps["taps"] == pytest.approx(0.9 * 1.495) and taps["distance"] < 0.02
    assert taps["paper_taps"] == pytest.approx(0.8515)


def test_scaled_distances() -> None:
    import numpy as np

    line = np.linspace(0.5, 1.5, 200)
    assert bound_gap.scaled_distance(line, 7 * line) < 0.02
    assert bound_gap.scaled_distance(line, np.ones(200)) == pytest.approx(0.5, abs=0.02)


def test_proxy(tmp_path: Path) -> None:
    for i, value in enumerate((80, 85, 90, 95)):
        # The first 100 samples, those that were certified, are all that counts.
        margins = {"taps": robust(value, 100) + [1.0] * 50}
        triple = (99.0, value + 0.5, value - 1.0)
        make_run(tmp_path, f"run{i}", accuracies=triple, samples=100, margins=margins)
    make_run(tmp_path, "other-radius", margins={"taps": robust(10)})
    record = tmp_path / "other-radius" / "margins.json"
    record.write_text(record.read_text().replace('"0.1"', '"0.2"'))
    make_run(tmp_path, "uncertified", accuracies=None, margins={"taps": robust(10)})
    found = analyse("proxy", tmp_path)
    assert verdicts(found) == [HOLDS, HOLDS]
    (row,) = found.tables[0].rows
    assert row["runs"] == 4 and row["certified"] == pytest.approx(1.0)
    assert row["to_certified"] == pytest.approx(1.0)
    assert row["to_adversarial"] == pytest.approx(-0.5)
    assert "0.9139" in str(row["paper"])
    # A network trained without bounds: TAPS estimates nothing of its adversarial accuracy.
    make_run(
        tmp_path,
        "attacked",
        method="pgd",
        accuracies=(99.0, 93.0, 0.0),
        samples=100,
        margins={"taps": robust(0, 100)},
    )
    found = analyse("proxy", tmp_path)
    assert verdicts(found) == [FAILS, FAILS, HOLDS, HOLDS]
    assert [row["runs"] for row in found.tables[0].rows] == [5, 4]
    assert len(found.tables[1].rows) == 5


def test_repeatability(tmp_path: Path) -> None:
    for method, step in (("taps", 0.1), ("ibp", 2.0)):
        for seed, ending in enumerate(("", "-seed1", "-seed2")):
            make_run(tmp_path, f"tiny-{method}{ending}", accuracies=(95, 92, 87 + step * seed))
    found = analyse("repeatability", tmp_path)
    assert claim(found, "tiny-taps: certified").verdict == HOLDS
    assert claim(found, "tiny-ibp: certified").verdict == FAILS
    assert claim(found, "tiny-sabr: certified").verdict == UNTESTED
    row = next(r for r in found.tables[0].rows if r["run"] == "tiny-taps")
    assert row["certified"] == pytest.approx(87.1) and row["certified_deviation"] < 0.11


def test_cost(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny-ibp", training=100, certifying=5, method="ibp")
    make_run(tmp_path, "tiny-taps", training=350, certifying=4)
    make_run(tmp_path, "mnist-0.1-taps", training=7, accuracies=None)
    found = analyse("cost", tmp_path)
    assert claim(found, "tiny: training").verdict == HOLDS
    assert claim(found, "tiny: networks").verdict == FAILS
    rows = {row["run"]: row for row in found.tables[0].rows}
    assert rows["mnist-0.1-taps"]["paper_training"] == 42_622
    assert rows["mnist-0.1-taps"].get("certifying") is None
    assert rows["tiny-taps"]["sample"] == pytest.approx(0.004)


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    precision_runs(tmp_path / "runs", published.EXACT)
    names = draw(analyse("precision", tmp_path / "runs").pictures, tmp_path / "out")
    assert names == ["errors.svg", "errors.png", "intro.svg", "intro.png"]
    assert "<svg" in (tmp_path / "out" / "errors.svg").read_text()


def test_the_same_numbers_give_the_same_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    precision_runs(tmp_path / "runs", published.EXACT)
    pictures = analyse("precision", tmp_path / "runs").pictures[1:]
    for out in ("a", "b"):
        assert draw(pictures, tmp_path / out) == ["intro.svg", "intro.png"]
    for name in ("intro.svg", "intro.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    "name", ["split", "trainability", "connector", "attack-strength", "weight"]
)
def test_figures_of_unfinished_experiments_have_gaps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = EXPERIMENTS[name].plans("laptop")[1]
    splits = dict.fromkeys(range(7), 90.0)
    margins = {"taps": robust(80), "natural": robust(90)}
    make_run(tmp_path / "runs", plan.name, margins=margins, splits=splits)
    pictures = analyse(name, tmp_path / "runs").pictures
    names = draw(pictures, tmp_path / "out")
    assert names and all((tmp_path / "out" / file).stat().st_size > 1000 for file in names)
