"""Ray as the engine: in a network of its own, where nobody else hears what it says."""

from __future__ import annotations

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import loopback
import pytest
from hangs import PATIENCE

CASES = Path(__file__).with_name("ray_cases.py")
ROOM = Path(__file__).parent.parent
PATHS = [
    ROOM,
    *(ROOM / name for name in ("behaviour", "certification", "parallel", "runs", "study")),
]
HERE = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
WHY_NOT = (
    "Ray is not installed: pip install 'tightrope[ray]'"
    if find_spec("ray") is None
    else loopback.why_not()
)

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def outcome(case: str, scratch: Path) -> dict[str, Any]:
    """Run a case; nobody may be left afterwards."""
    scratch.mkdir(exist_ok=True)
    paths = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
    # Ray keeps a token of its clusters in the user's home.
    variables = {"PYTHONPATH": paths, "HOME": str(scratch), "GATE": str(scratch / "gate")}
    with loopback.started(CASES, case, scratch, **variables) as process:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err[-3000:]
        mark = process.mark  # type: ignore[attr-defined]
        deadline = time.monotonic() + PATIENCE
        while loopback.family(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not loopback.family(mark), "processes were left"
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def test_a_node_is_killed_in_the_middle(tmp_path: Path) -> None:
    found = outcome("lost_node", tmp_path / "scratch")
    assert found["listening"] and set(found["listening"]) <= HERE  # loopback and nothing else
    assert len(found["killed"]) == 1  # it had a batch in hand
    # Five batches, of which that one was given again.
    assert len(found["given"]) == 6 and len(set(found["given"])) == 5
    by_index = sorted(found["records"], key=lambda record: record["index"])
    assert [record["index"] for record in by_index] == list(range(10))  # every sample once
    assert by_index == sorted(found["expected"], key=lambda record: record["index"])
    assert found["points"] == found["expected_points"] and found["points"]
    assert found["complete"] and found["shown"][-1] == 0


def test_the_driver_is_killed_in_the_middle(tmp_path: Path) -> None:
    found = outcome("lost_driver", tmp_path / "scratch")
    assert found["waiting"] == 2 and not found["left"]  # workers end with their driver
    before, after = found["before"], found["after"]
    assert 4 <= len(before) < 10 and after[: len(before)] == before  # nothing again, nothing lost
    assert len(found["given"]) == 5 - len(before) // 2
    by_index = sorted(found["records"], key=lambda record: record["index"])
    assert [record["index"] for record in by_index] == list(range(10))
    assert by_index == sorted(found["expected"], key=lambda record: record["index"])
    assert found["points"] == found["expected_points"] and found["complete"]


@pytest.mark.slow
def test_items_that_workers_die_of(tmp_path: Path) -> None:
    found = outcome("tasks", tmp_path / "scratch")
    assert found["results"] == {"1": 1, "2": 4, "3": 9}
    assert found["given"] == [1, 2, 2, 3, 4, 4, 4, 6]
    assert set(found["errors"]) == {"4", "6"}
    kind, text = found["errors"]["4"]
    assert kind == "UserError" and "\n" not in text
    for fragment in ("3 times a worker on the cluster was lost", "on number 4", "again"):
        assert fragment in text
    assert found["errors"]["6"] == ["UserError", "user"]
    assert found["unable"] == "weights"


@pytest.mark.slow
def test_cards_are_shared_as_asked(tmp_path: Path) -> None:
    found = outcome("cards", tmp_path / "scratch")
    assert sorted(card for _, card in found["halves"]) == ["0", "0", "1", "1"]
    assert [card for _, card in found["none"]] == [""] * 6  # nobody uses what was not asked for
    assert found["refused"] == "--gpus-per-task is given, but the cluster has no GPU"


def test_a_search_in_parts(tmp_path: Path) -> None:
    found = outcome("parts", tmp_path / "scratch")
    assert "Part" in found["parts"] and found["verified"] == 1


@pytest.mark.slow
def test_comparing_and_reproducing(tmp_path: Path) -> None:
    found = outcome("studies", tmp_path / "scratch")
    assert found["same"] and found["files"][0] == found["files"][1]
    assert list(found["failures"]) == ["bad"] and found["journal"] == 5
    assert set(found["listening"]) <= HERE


def test_a_list_of_instances(tmp_path: Path) -> None:
    here, there = outcome("instances", tmp_path / "scratch")["results"]
    assert [result for result, _ in here] == ["unsat", "sat", "error"]
    assert there == here
