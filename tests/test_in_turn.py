"""Two versions in turn: what the benchmark of steps prints is read, and compared by medians."""

import importlib
from pathlib import Path

import pytest

PRINTED = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "steps.txt"


@pytest.fixture
def in_turn(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("in_turn")


def test_what_is_printed_is_read(in_turn):
    lines = [line for line in PRINTED.read_text().splitlines() if line.startswith("  ")]
    found = in_turn.read(PRINTED.read_text())
    assert len(found) == sum(not line.startswith("  step") for line in lines) >= 18
    assert {"cnn3: taps, 1 ReLU", "cnn7: plain PyTorch"} < found.keys()
    assert found["cnn3: standard"][1] == found["cnn7: standard"][1] == 1.0


def test_medians_decide_what_is_slower(in_turn, capsys):
    old = [{"a": (ms, 1.0), "b": (10.0, 1.0), "gone": (1.0, 1.0)} for ms in (9.0, 10.0, 30.0)]
    new = [{"a": (ms, 1.0), "b": (10.6, 1.0), "added": (1.0, 1.0)} for ms in (90.0, 10.4, 10.0)]
    assert in_turn.slower(old, new) == ["b"]
    assert in_turn.slower(old, old) == []
    assert "+4.0%" in capsys.readouterr().out
