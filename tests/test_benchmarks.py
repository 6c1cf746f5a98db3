"""Benchmarks and examples use what there is; two versions in turn are compared by medians."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRINTED = ROOT / "docs" / "results" / "benchmarks" / "steps.txt"
SCRIPTS = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_what_there_is(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tightrope"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.import_module(submodule)


@pytest.fixture
def in_turn(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
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
