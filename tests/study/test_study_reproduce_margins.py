"""Margins of real, small networks: estimates, exact values and the mixed-integer program."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tightrope as tr
from tightrope.runs import Run
from tightrope.runs.found import read_objects
from tightrope.study import margins, work
from tightrope.study.experiments.precision import contradicts
from tightrope.study.measured import EXACT, Damaged, Measured
from tightrope.study.plans import Plan
from tightrope.study.remaining import unfinished
from tightrope.study.work import carry_out

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = ("natural", "ibp", "pgd", "sabr", "taps", "staps")
PLAN = Plan(
    "small",
    "demo",
    {
        **{"net": "mlp", "width": 8, "depth": 2, "batch_norm": False, "method": "ibp"},
        **{"epochs": 2, "annealing_epochs": 1, "decay_epochs": (1,), "train_samples": 2000},
        **{"validation": 100, "batch_size": 100, "learning_rate": 0.01, "eps": 0.02},
        "train_eps": 0.02,
    },
    certify={"eps": "0.02", "samples": 8, "timeout": 10.0, "steps": 10, "restarts": 1},
    estimate={"estimators": EVERY, "samples": 60},
    exact={"samples": 6, "milp": 4},
    splits={"relus": (0, 1, 2), "samples": 60},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("margins") / "small"
    parts: list[str] = []
    carry_out(PLAN, folder, watch=lambda part, done, total: parts.append(part))
    assert list(dict.fromkeys(parts)) == ["train", "certify", "estimate", "exact", "splits"]
    return folder


def test_everything_is_there(finished: Path) -> None:
    assert unfinished(PLAN, finished) == []
    run = Measured(finished)
    assert run.samples == 8 and len(run.margins("taps")) == 60 and len(run.exact) == 6
    assert [("milp" in record) for record in run.exact] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(("device", "workers"), [("cpu", 8), ("cuda", 1), ("mps", 8)])
def test_a_gpu_is_for_one_process(
    device: str, workers: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proofs are computed on the CPU where the GPU has no float64."""
    copy, found = tmp_path / "run", []
    shutil.copytree(finished, copy)
    (copy / "certification.json").unlink()
    monkeypatch.setattr(work, "pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(work, "certify", lambda run, jobs, **options: found.append(jobs))
    carry_out(PLAN, copy, threads=8, watch=lambda *_: None)
    assert found == [workers]


def test_estimates_are_those_of_the_command(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    found = tr.estimate(copy, samples=60)
    run = Measured(finished)
    for name in ("natural", "pgd", "sabr", "taps", "ibp"):
        assert run.accuracy(name) == pytest.approx(100 * getattr(found, name)), name


def test_estimates_enclose_the_exact_margin(finished: Path) -> None:
    run = Measured(finished)
    for record in run.exact:
        i = record["index"]
        assert record["by"] == "search" and record["upper"] - record["lower"] < 1.1e-4
        assert run.margins("pgd")[i] <= record["upper"] + 1e-5
        assert run.margins("ibp")[i] >= record["lower"] - 1e-5
        assert run.margins("natural")[i] <= run.margins("ibp")[i] + 1e-5


def test_the_program_agrees(finished: Path) -> None:
    compared = [record for record in Measured(finished).exact if record.get("milp")]
    assert len(compared) == 4
    for record in compared:
        assert not contradicts(record)
        assert record["lower"] == pytest.approx(record["milp"]["lower"], abs=1e-3)
        moved = {**record, "lower": record["lower"] + 0.01, "upper": record["upper"] + 0.01}
        assert contradicts(moved)


def test_certification_agrees_with_exact_margins(finished: Path) -> None:
    verdicts = [json.loads(line) for line in (finished / "certification.jsonl").open()]
    robust = {record["index"]: record["verdict"] == "verified" for record in verdicts}
    for record in Measured(finished).exact:
        assert robust[record["index"]] == (record["upper"] < 0)


def test_splits_end_in_ibp_and_the_trained_one(finished: Path) -> None:
    run = Measured(finished)
    assert run.splits[0] == pytest.approx(run.accuracy("ibp"))
    assert run.splits[1] == pytest.approx(run.accuracy("taps"))
    assert run.splits[0] <= run.splits[1]


def test_exact_margins_go_on_where_they_stopped(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    path = copy / EXACT
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:20])  # a kill in the middle of a line
    assert unfinished(PLAN, copy) == ["exact"]
    solved: list[bool] = []
    before = margins._solve

    def counted(*arguments: Any, compare: bool) -> dict[str, Any]:
        solved.append(compare)
        return before(*arguments, compare=compare)

    monkeypatch.setattr(margins, "_solve", counted)
    carry_out(PLAN, copy, watch=lambda *_: None)
    assert solved == [True, False, False]
    fresh, old = (read_objects(file).whole() for file in (path, finished / EXACT))
    strip = [{k: v for k, v in r.items() if k not in ("seconds", "milp")} for r in fresh]
    assert strip == [{k: v for k, v in r.items() if k not in ("seconds", "milp")} for r in old]


def test_other_weights_make_measurements_stale(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    weights = Run(copy).weights
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert unfinished(PLAN, copy) == ["certify", "estimate", "exact", "splits"]


def change_normalization(folder: Path) -> None:
    path = folder / "model.json"
    description = json.loads(path.read_text())
    assert description["normalize"] == {"mean": [0.1307], "std": [0.3081]}
    description["normalize"]["mean"] = [0.25]
    path.write_text(json.dumps(description))


@pytest.fixture(scope="module")
def normalized(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """The same with a normalisation in the network, certified only."""
    folder = tmp_path_factory.mktemp("normalized") / "run"
    settings = {**PLAN.settings, "normalize": True}
    plan = replace(PLAN, settings=settings, estimate={}, exact={}, splits={})
    carry_out(plan, folder, watch=lambda *_: None)
    assert unfinished(plan, folder) == []
    return plan, folder


def test_another_normalisation_makes_measurements_stale(
    normalized: tuple[Plan, Path], tmp_path: Path
) -> None:
    plan, copy = normalized[0], tmp_path / "run"
    shutil.copytree(normalized[1], copy)
    assert Measured(copy).certified >= 0
    change_normalization(copy)
    assert unfinished(plan, copy) == ["certify"]
    with pytest.raises(Damaged, match="of another network: other normalization"):
        _ = Measured(copy).certified
    with pytest.raises(tr.UserError, match=r"another network .*normalization"):
        carry_out(plan, copy, watch=lambda *_: None)


def test_measurements_by_an_earlier_version_are_used(finished: Path, tmp_path: Path) -> None:
    """They note the weights only."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    for path in copy.glob("*.json*"):
        text = path.read_text()
        for name in ("architecture", "normalization"):
            text = re.sub(rf'"{name}": "[0-9a-f]{{16}}",?', "", text)
        text = re.sub(r',\s*"fingerprint": "[0-9a-f]{16}"', "", text)
        path.write_text(re.sub(r",(\s*)}", r"\1}", text))
    assert "normalization" not in (copy / "certification.json").read_text()
    assert unfinished(PLAN, copy) == []
    assert Measured(copy).certified == Measured(finished).certified


def test_a_run_in_use_is_left_alone_or_waited_for(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / "splits.json").unlink()
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with Run(copy).lock("certify"):
            held.set()
            ended.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    with pytest.raises(tr.UserError, match="in use by tightrope certify"):
        carry_out(PLAN, copy, watch=lambda *_: None)
    parts: list[str] = []

    def watch(part: str, done: int, total: int) -> None:
        parts.append(part)
        ended.set()

    carry_out(PLAN, copy, wait=True, watch=watch)
    thread.join(60)
    assert parts[0] == "waiting" and parts[-1] == "splits"
    assert unfinished(PLAN, copy) == []


def test_data_of_ones_own_that_has_changed(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {name: generator.random((40, 6), dtype=np.float32) for name in ("x_train", "x_test")}
    arrays |= {name: np.arange(40) % 2 for name in ("y_train", "y_test")}
    data = tmp_path / "data.npz"
    np.savez(data, **arrays)
    settings = {**PLAN.settings, "data": str(data), "train_samples": None, "validation": 10}
    settings |= {"batch_size": 10}
    plan = replace(PLAN, settings=settings, estimate={}, exact={}, splits={})
    carry_out(plan, tmp_path / "run", watch=lambda *_: None)
    assert unfinished(plan, tmp_path / "run") == []
    arrays["x_test"][3, 0] /= 2
    np.savez(data, **arrays)
    assert unfinished(plan, tmp_path / "run") == ["certify"]
    with pytest.raises(tr.UserError, match="test sample 3 has another image"):
        carry_out(plan, tmp_path / "run", watch=lambda *_: None)


def test_other_wishes_are_noticed(finished: Path) -> None:
    for part, plan in {
        "certify": replace(PLAN, certify={**PLAN.certify, "timeout": 11.0}),
        "estimate": replace(PLAN, estimate={**PLAN.estimate, "samples": 61}),
        "exact": replace(PLAN, exact={"samples": 7, "milp": 4}),
        "splits": replace(PLAN, splits={**PLAN.splits, "relus": (0, 1)}),
    }.items():
        assert unfinished(plan, finished) == [part]
    assert unfinished(replace(PLAN, seed=1), finished)[0] == "train"
    assert unfinished(replace(PLAN, settings={**PLAN.settings, "width": 9}), finished)[0] == "train"


def test_a_search_that_runs_out_of_time_leaves_it_to_the_program(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / EXACT).unlink()
    search = margins.optimum.enclose

    def too_slow(*arguments: Any, **options: Any) -> Any:
        return replace(search(*arguments, **options), lower=-math.inf, finished=False)

    monkeypatch.setattr(margins.optimum, "enclose", too_slow)
    margins.exact_margins(Run(copy), {"eps": "0.02"}, 2, 1, lambda *_: None)
    fresh, old = Measured(copy).exact, Measured(finished).exact[:2]
    for record, known in zip(fresh, old, strict=True):
        assert record["by"] == "milp" and record.get("milp") is None
        assert record["lower"] == pytest.approx(known["lower"], abs=1e-3)
        assert record["upper"] - record["lower"] < 1e-3
    assert unfinished(replace(PLAN, exact={"samples": 2, "milp": 1}), copy) == []


def test_a_point_that_refutes_the_program_is_a_contradiction() -> None:
    record = {"by": "search", "lower": 0.5, "upper": 1e30}
    program = {"lower": 0.3, "upper": 0.31, "finished": True}
    for compare in (True, False):
        found = {**record, **margins._combined(record, program, False, compare)}
        assert found["by"] == "nobody" and found["lower"] == 0.5 and contradicts(found)
    program["upper"] = 0.6
    found = {**record, **margins._combined(record, program, False, True)}
    assert found == {"by": "milp", "lower": 0.5, "upper": 0.6, "milp": None}
