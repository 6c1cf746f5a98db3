"""Threads sleep while they wait, in every process of ours, and the user has the last word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightrope import waiting
from tightrope.parallel import Watcher, run_in_processes

ROOT = Path(__file__).parent.parent
SCRIPT = Path(sys.executable).with_name("tightrope")
DECISIONS = {
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "1000",
    "KMP_BLOCKTIME": "200",
    "KMP_LIBRARY": "turnaround",
}
BENCHMARKS = sorted(
    path
    for path in (ROOT / "benchmarks").glob("*.py")
    if "\nimport torch\n" in path.read_text(encoding="utf-8")
    and path.stem not in ("networks", "planting")
)
PROCESSES = {
    "tightrope": [SCRIPT, "methods"],
    "python -m tightrope": [sys.executable, "-m", "tightrope", "methods"],
    "demo": [sys.executable, ROOT / "examples" / "demo.py"],
    "tests": [sys.executable, "-m", "pytest", ROOT / "tests" / "test_waiting.py"],
    **{path.stem: [sys.executable, path] for path in BENCHMARKS},
}
# Stands in for torch, and says how it would wait.
STAND_IN = "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), flush=True); os._exit(0)"


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nobody has said anything about waiting."""
    for name in DECISIONS:
        monkeypatch.delenv(name, raising=False)


def test_threads_sleep_where_nobody_decided_otherwise() -> None:
    assert waiting.sleeping_threads({"A": "b"}) == {"A": "b", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_users_decision_stays(
    name: str, monkeypatch: pytest.MonkeyPatch, undecided: None
) -> None:
    assert waiting.sleeping_threads({name: DECISIONS[name]}) == {name: DECISIONS[name]}
    monkeypatch.setenv(name, DECISIONS[name])
    before = dict(os.environ)
    with waiting.children_sleep_while_waiting():
        assert os.environ == before
    waiting.sleep_while_waiting()
    assert os.environ == before


def test_this_process_and_its_children(undecided: None) -> None:
    with pytest.raises(KeyboardInterrupt), waiting.children_sleep_while_waiting():
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        raise KeyboardInterrupt
    assert "OMP_WAIT_POLICY" not in os.environ
    waiting.sleep_while_waiting()
    assert os.environ.pop("OMP_WAIT_POLICY") == "PASSIVE"


def first_word(command: list[str | Path], folder: Path) -> str:
    """Start a process that finds the stand-in for torch, and return what that says."""
    (folder / "torch.py").write_text(STAND_IN)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("process", PROCESSES)
def test_it_is_settled_before_torch_is_loaded(
    process: str, tmp_path: Path, undecided: None
) -> None:
    assert first_word(PROCESSES[process], tmp_path) == "PASSIVE"


def test_an_import_decides_nothing(tmp_path: Path, undecided: None) -> None:
    command = [sys.executable, "-c", "import tightrope as tr; tr.certify"]
    assert first_word(command, tmp_path) == "None"


def test_openmp_reads_it_when_torch_is_imported(undecided: None) -> None:
    """The library that computes for torch tells how it waits; other builds say nothing."""
    code = (
        "from tightrope.waiting import sleep_while_waiting\n"
        "sleep_while_waiting()\n"
        "import torch\n"
        "print(torch.__config__.parallel_info())\n"
    )
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("this torch computes without OpenMP")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert "GOMP_SPINCOUNT = '0'" in done.stderr or "GOMP" not in done.stderr


def test_workers(monkeypatch: pytest.MonkeyPatch, undecided: None) -> None:
    """Theirs are the threads of a process of ours, whoever started it."""
    seen: list[str | None] = []

    def start(process: Any) -> None:
        seen.append(os.environ.get("OMP_WAIT_POLICY"))
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)
    with pytest.raises(KeyboardInterrupt):
        run_in_processes(print, [1], Watcher(), workers=1, threads=2)  # type: ignore[arg-type]
    assert seen == ["PASSIVE"] and "OMP_WAIT_POLICY" not in os.environ
