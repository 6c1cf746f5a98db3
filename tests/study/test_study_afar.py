"""Runs that other machines make: `compare` and `reproduce`, with pretended machines."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_study_compare_jobs import SETTINGS as TWO
from test_study_compare_jobs import Heard, results
from test_study_reproduce_runner import BAD, SMALL

import tightrope as tr
from tightrope.parallel import RayCluster, engine, on_ray
from tightrope.study.runner import carry_out_all

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {name: value for name, value in TWO.items() if name != "taps"}
Between = Callable[[], None]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[Between]:
    """A cluster in this process: everything is pickled. What is in the list happens on the way."""
    between: list[Between] = []

    def instead(prepare: Any, items: Any, watcher: Any, **_: Any) -> None:
        work = pickle.loads(pickle.dumps(prepare))()
        for item in items:
            sent = pickle.dumps(watcher.give(item))
            for happens in between:
                happens()
            try:
                result = work(pickle.loads(sent), lambda m, item=item: watcher.message(item, m))
            except Exception as error:
                watcher.failed(item, error)
            else:
                watcher.finished(item, pickle.loads(pickle.dumps(result)))

    monkeypatch.setattr(engine, "run_on_ray", instead)
    monkeypatch.setattr(on_ray, "load_ray", lambda: None)
    return between


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison in one process."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    tr.compare(["ibp"], out=folder, **SETTINGS)
    return folder


@pytest.mark.usefixtures("machines")
def test_a_comparison_elsewhere_is_that_of_one_process(alone: Path, tmp_path: Path) -> None:
    out, heard = tmp_path / "out", Heard()
    tr.compare(["ibp"], out=out, engine="ray", watch=heard, **SETTINGS)
    assert results(out) == results(alone)
    assert len(heard.calls["ibp", 0]) == 3 * (2 + 1)  # displays hear of it
    here, there = ({p.name for p in (f / "ibp-0").iterdir()} for f in (out, alone))
    assert here == there  # run folders have come back
    journal = (out / "ibp-0" / "certification.jsonl").read_bytes()
    tr.compare(["ibp"], out=out, engine="ray", **SETTINGS)  # all is there already
    assert (out / "ibp-0" / "certification.jsonl").read_bytes() == journal


def test_a_run_that_somebody_changed_meanwhile_is_left_alone(
    machines: list[Between], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def change() -> None:
        (out / "ibp-0").mkdir(parents=True)
        (out / "ibp-0" / "notes.txt").write_text("mine")

    machines.append(change)
    made = tr.compare(["ibp"], out=out, engine="ray", **SETTINGS)
    assert "was changed while its run was made elsewhere" in made.entries[0].errors[0]
    assert [p.name for p in (out / "ibp-0").iterdir() if p.name[0] != "."] == ["notes.txt"]


@pytest.mark.usefixtures("machines")
def test_plans_of_an_experiment_are_carried_out_elsewhere(tmp_path: Path) -> None:
    where: dict[str, Any] = {"jobs": None, "threads": 1, "cluster": RayCluster()}
    session = carry_out_all([SMALL, BAD], tmp_path, **where)
    assert list(session.failures) == ["bad"] and "classifier" in session.failures["bad"]
    run = tr.Run(tmp_path / "runs" / "small")
    assert len(run.journal.read_text().splitlines()) == 5 and run.weights.exists()
    assert not (tmp_path / "logs").exists()
    assert "small" not in carry_out_all([SMALL], tmp_path, **where).seconds  # it is finished
