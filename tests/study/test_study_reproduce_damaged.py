"""A damaged run is named and does not stop an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import make_run, robust

from tightrope.study import families
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.measured import Measurements
from tightrope.study.remaining import unfinished


def with_certification(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / "certification.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def with_margins(value: Any) -> Callable[[Path], None]:
    content = {"settings": {"eps": "0.1"}, "margins": {"taps": value}}
    return lambda run: (run / "margins.json").write_text(json.dumps(content)) and None


def a_folder_for_settings(run: Path) -> None:
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "history without seconds": lambda run: (run / "history.jsonl").write_text('{"epoch": 0}\n'),
    "history is no history": lambda run: (run / "history.jsonl").write_text("[]\n"),
    "natural is null": with_certification(natural=None),
    "natural is text": with_certification(natural="high"),
    "more than everything": with_certification(certified=7),
    "not a number": with_certification(certified=float("nan")),
    "no samples": with_certification(samples=0),
    "stages are a list": with_certification(stages=[]),
    "settings are a list": with_certification(settings=[]),
    "cut off": lambda run: (run / "certification.json").write_text('{"samples": 10'),
    "margins are text": with_margins("many"),
    "margins of text": with_margins(["a"]),
    "margins are a table": with_margins({"0": 1.0}),
    "no margins": with_margins([]),
    "settings are damaged": lambda run: (run / "config.toml").write_text("= 3"),
    "settings are a folder": a_folder_for_settings,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_experiments_survive_a_damaged_run(tmp_path: Path, damage: str) -> None:
    margins = {name: robust(80.0) for name in ("natural", "taps", "ibp")}
    for name in ("equal-ibp", "equal-taps", "equal-taps-weight20"):
        make_run(tmp_path, name, margins=margins)
    DAMAGE[damage](tmp_path / "equal-taps")
    problems = []
    for name in ("weight", "proxy", "cost"):
        findings = EXPERIMENTS[name].analyse(Measurements(tmp_path))
        assert findings.tables and findings.claims
        problems += findings.problems
    assert problems and all(problem.startswith("equal-taps: ") for problem in problems)


def test_a_run_that_is_not_certified_yet_is_no_problem(tmp_path: Path) -> None:
    make_run(tmp_path, "equal-taps", accuracies=None)
    make_run(tmp_path, "equal-ibp")
    with_certification(complete=False, natural=None)(tmp_path / "equal-ibp")
    for name in ("proxy", "cost"):
        assert not EXPERIMENTS[name].analyse(Measurements(tmp_path)).problems


@pytest.mark.parametrize(
    "record",
    [
        {"index": 0, "lower": 0.0, "upper": 0.0},
        {"index": 5000, "by": "search", "lower": 0.0, "upper": 0.0},
        {"index": 0, "by": "search", "lower": None, "upper": 0.0},
        [1, 2],
    ],
)
def test_damaged_exact_margins(tmp_path: Path, record: Any) -> None:
    margins = {name: robust(80.0) for name in families.EVERY}
    make_run(tmp_path, "tiny-taps", margins=margins, exact=[record], eps="0.05")
    findings = EXPERIMENTS["precision"].analyse(Measurements(tmp_path))
    assert len(findings.tables) == 3
    plan = families.tiny("taps", exact=1, milp=0)
    assert "exact" in unfinished(plan, tmp_path / "tiny-taps")
