"""The simulation of `certify` on many workers: nothing is lost, and its record can be repeated."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "results" / "scaling"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling")


def utilisation(
    scaling: Any, measured: Any, workers: int, mode: str, scale: float = 1.0, batch: int = 50
) -> float:
    items = scaling.drawn(measured, batch, scale)
    work = sum(item.seconds for item in items)
    samples, searches = scaling.MODES[mode]
    took = scaling.Simulation(items, workers, samples=samples, searches=searches).run()
    return float(work / (workers * took))


@pytest.mark.parametrize("mode", ["batches only", "samples shared", "searches shared, too"])
def test_no_work_is_lost(scaling: Any, mode: str) -> None:
    measured = {"common": [0.01, 0.02], "alone": [0.0, 3.0]}
    items = scaling.drawn(measured, 10, samples=60)
    work = sum(item.seconds for item in items)
    samples, searches = scaling.MODES[mode]
    for workers in (1, 4, 50):
        fresh = scaling.drawn(measured, 10, samples=60)
        took = scaling.Simulation(fresh, workers, samples=samples, searches=searches).run()
        assert work / workers < took < work + 1.0
        assert took >= 3.0 or searches  # nobody is faster than the longest sample


def test_sharing_keeps_workers_busy(scaling: Any) -> None:
    measured = {"common": [0.01] * 10, "alone": [0.0] * 8 + [1.0, 60.0]}
    found = [utilisation(scaling, measured, 1000, mode) for mode in scaling.MODES]
    assert found[0] < found[1] < found[2] < 1
    assert found[2] > 1.5 * found[1]  # what is late is one search, which has to be divided


def test_the_record_is_what_the_scheduler_does(scaling: Any) -> None:
    measured = json.loads((RECORD / "seconds.json").read_text())
    table = json.loads((RECORD / "scaling.json").read_text())
    assert len(table["rows"]) == 3 * 2 * 3 * 7
    assert table["measured"]["samples"] == len(measured["alone"]) >= 300
    chosen = [r for r in table["rows"] if (r["scale"], r["batch"], r["workers"]) == (1, 50, 30)]
    assert {row["mode"] for row in chosen} == set(scaling.MODES)
    for row in chosen:
        found = utilisation(scaling, measured, 30, row["mode"])
        assert found == pytest.approx(row["utilisation"], abs=1e-3)
