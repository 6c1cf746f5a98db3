"""`compare` with several processes: the same runs, the same table, the same displays."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tightrope as tr
from tightrope.parallel import engine

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {
    **{"net": "mlp", "width": 4, "depth": 1, "batch_norm": False, "eps": 0.01, "epochs": 3},
    **{"annealing_epochs": 1, "decay_epochs": (), "train_samples": 200, "validation": 0},
    **{"select": "last", "batch_size": 100, "taps": {"steps": 2}, "samples": 20},
}


class Heard:
    """A display for each run; notes what it is told."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], list[tuple[Any, ...]]] = {}

    def __call__(self, method: str, seed: int) -> Any:
        assert (method, seed) not in self.calls  # also if the run is begun again
        calls = self.calls[method, seed] = []

        class Display:
            def step(self, epoch: int, iteration: int, result: Any, radius: float) -> None:
                calls.append((epoch, iteration, asdict(result), radius))

            def epoch(self, record: dict[str, Any]) -> None:
                calls.append((record["epoch"], record["loss"]))

        return Display()


def results(folder: Path) -> dict[str, Any]:
    """Return what a comparison leaves behind, apart from times and the place."""
    found = json.loads((folder / "comparison.json").read_text().replace(str(folder), "here"))
    for entry in found["entries"]:
        del entry["values"]["seconds"]
    return {
        "comparison": found,
        **{path.parent.name: path.read_bytes() for path in folder.glob("*/model.safetensors")},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Heard]:
    """A comparison in one process."""
    folder, heard = tmp_path_factory.mktemp("alone") / "out", Heard()
    tr.compare(["ibp", "taps"], out=folder, watch=heard, **SETTINGS)
    return folder, heard


def test_two_jobs_give_the_table_of_one(alone: tuple[Path, Heard], tmp_path: Path) -> None:
    heard = Heard()
    made = tr.compare(["ibp", "taps"], out=tmp_path / "out", jobs=2, watch=heard, **SETTINGS)
    assert [entry.method for entry in made.entries] == ["ibp", "taps"]
    assert results(tmp_path / "out") == results(alone[0]) and len(results(alone[0])) == 3
    assert heard.calls == alone[1].calls
    assert [len(calls) for calls in heard.calls.values()] == [3 * (2 + 1)] * 2
    assert not multiprocessing.active_children()


def test_a_run_whose_worker_died_is_resumed(
    alone: tuple[Path, Heard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(Exception):
        pass

    def instead(prepare: Any, items: Any, watcher: Any, **_: Any) -> None:
        def die_in_the_second_epoch(message: Any) -> None:
            if message[0] == "step" and message[1][0] == 1:
                raise Died

        for item in items:
            with pytest.raises(Died):
                prepare()(watcher.give(item), die_in_the_second_epoch)
            again = watcher.give(item)
            assert again.arguments["resume"] and not item.arguments["resume"]
            watcher.finished(item, prepare()(again, lambda message: None))

    monkeypatch.setattr(engine, "run_in_processes", instead)
    tr.compare(["ibp", "taps"], out=tmp_path / "out", jobs=2, watch=Heard(), **SETTINGS)
    assert results(tmp_path / "out") == results(alone[0])


def test_a_run_that_fails_is_reported(alone: tuple[Path, Heard], tmp_path: Path) -> None:
    tr.compare(["ibp", "taps"], out=tmp_path / "out", **SETTINGS)
    (tmp_path / "out" / "taps-0" / "checkpoint.pt").write_bytes(b"no checkpoint")
    made = tr.compare(["taps", "ibp"], out=tmp_path / "out", jobs=2, **SETTINGS)
    taps, ibp = made.entries
    assert "checkpoint.pt" in taps.errors[0] and not taps.runs
    assert ibp.runs == [str(tmp_path / "out" / "ibp-0")] and not ibp.errors
