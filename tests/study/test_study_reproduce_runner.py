"""Running experiments: reuse, failures, what is written. Real processes, seconds of training."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hangs import PATIENCE

import tightrope as tr
from tightrope.study import output, reproducing, runner
from tightrope.study.columns import NATURAL
from tightrope.study.experiment import Column, Experiment, Picture, Row, Sheet, Verdict
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.plans import Plan
from tightrope.study.runner import carry_out_all

SMALL = Plan(
    "small",
    "demo",
    {
        **{"net": "mlp", "width": 4, "depth": 1, "batch_norm": False, "method": "ibp"},
        **{"epochs": 1, "annealing_epochs": 0, "decay_epochs": (), "train_samples": 200},
        **{"validation": 0, "select": "last", "batch_size": 100},
    },
    certify={"eps": "0.01", "samples": 5, "timeout": 5.0, "steps": 5, "restarts": 1},
    estimate={"estimators": ("natural", "taps"), "samples": 5},
)
BAD = replace(SMALL, name="bad", settings={**SMALL.settings, "method": "taps"})
BAD = replace(BAD, settings={**BAD.settings, "taps.classifier_relus": 7})


ROWS = [Row({"run": plan.name}, (plan,)) for plan in (SMALL, BAD)]
FAKE = Experiment(
    name="fake",
    claim="Small runs run.",
    where="Table 0",
    paper_minutes=1,
    plans=lambda scale: [SMALL, BAD],
    tables=(Sheet("fake", "A | title", (Column("run", "run"), NATURAL), lambda runs: ROWS),),
    claims=lambda runs, tables: [
        runs.judge(f"{n} is a run.", "Table 0", [n], lambda run: (True, "yes"))
        for n in ("small", "bad")
    ],
    draw=lambda runs, tables: [Picture("empty", lambda plt: plt.figure())],
)


class Recorder:
    def __init__(self) -> None:
        self.ends: dict[str, str] = {}
        self.parts: set[str] = set()

    def start(self, name: str) -> None:
        pass

    def update(self, name: str, part: str, done: int, total: int) -> None:
        assert 0 < done <= total
        self.parts.add(part)

    def end(self, name: str, outcome: str) -> None:
        self.ends[name] = outcome


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake experiment, carried out once."""
    folder = tmp_path_factory.mktemp("fake") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXPERIMENTS, "fake", FAKE)
        recorder = Recorder()
        result = tr.reproduce("fake", out=folder, jobs=2, display=recorder)
    assert not result.ok and list(result.failures) == ["bad"]
    assert recorder.ends["small"] == "finished"
    assert recorder.parts == {"train", "certify", "estimate"}
    return folder


def test_a_failed_run_is_reported_everywhere(out: Path) -> None:
    reason = "no split with 7 ReLUs"
    page = (out / "fake" / "table.md").read_text()
    assert "**Failed:** run bad:" in page and reason in page
    record = json.loads((out / "fake" / "table.json").read_text())
    assert reason in record["failures"]["bad"]
    small, bad = json.loads((out / "fake" / "claims.json").read_text())
    assert small["verdict"] == Verdict.HOLDS
    assert bad["verdict"] == Verdict.UNTESTED and "run bad failed" in bad["evidence"]
    assert "**holds**" in (out / "fake" / "claims.md").read_text()


def test_results_say_how_to_repeat_them(out: Path) -> None:
    record = json.loads((out / "fake" / "table.json").read_text())
    small = record["runs"]["small"]
    assert small["seed"] == 0 and small["commands"][0].startswith("tightrope train --preset demo")
    assert small["training_seconds"] > 0 and small["certification_seconds"] > 0
    assert set(record["versions"]) == {"tightrope", "torch", "numpy", "python"}
    assert list(record["machine"]) == ["cpus"] and record["seconds"] > 0
    rows = list(csv.DictReader((out / "fake" / "table.csv").open()))
    assert [row["run"] for row in rows] == ["small", "bad"]
    assert rows[0]["natural"] and not rows[1]["natural"]
    assert not [path for path in out.rglob("*") if ".tmp" in path.name]


def test_figures_are_written(out: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (out / "fake" / "empty.svg").exists() and (out / "fake" / "empty.png").exists()


def test_finished_runs_are_used_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = replace(FAKE, plans=lambda scale: [SMALL])
    monkeypatch.setitem(EXPERIMENTS, "fake", only)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", None)  # none may be started
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()}
    recorder = Recorder()
    result = tr.reproduce("fake", out=out, display=recorder)
    assert result.ok and recorder.ends == {"small": "reused"}
    assert before == {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()}
    assert result.record["runs"]["small"]["reused"]


def test_runs_whose_weights_are_elsewhere_stay_in_the_record(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small files of a run are enough for tables made later, on another machine."""
    copy = tmp_path / "out"
    for name in ("config.toml", "history.jsonl", "certification.json"):
        (copy / "runs" / "small").mkdir(parents=True, exist_ok=True)
        shutil.copy(out / "runs" / "small" / name, copy / "runs" / "small")
    (copy / "fake").mkdir()
    shutil.copy(out / "fake" / "table.json", copy / "fake")
    before = json.loads((out / "fake" / "table.json").read_text())["runs"]
    monkeypatch.setitem(EXPERIMENTS, "fake", replace(FAKE, plans=lambda scale: []))
    result = tr.reproduce("fake", out=copy)
    assert {**before["small"], "reused": True} == result.record["runs"]["small"]
    assert "bad" not in result.record["runs"]  # it was never measured
    assert result.tables[0].rows[0]["natural"] is not None


def test_without_matplotlib_there_are_tables(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert output.draw((Picture("empty", lambda plt: plt.figure()),), tmp_path) is None
    assert not list(tmp_path.iterdir())


class Actor:
    """Does as the name of a plan says, instead of carrying it out."""

    def __init__(self, folder: Path, wait: bool) -> None:
        self.folder = folder

    def __call__(self, plan: Plan, send: Any) -> None:
        if plan.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.name == "ended":
            os._exit(3)
        if plan.name == "wrong":
            raise ValueError("no\nreally")
        if plan.name == "refused":
            raise tr.UserError("out of luck; start over with --force")
        if plan.name == "endless":
            time.sleep(PATIENCE)
        (self.folder / plan.name).touch()


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Worker", Actor)


def test_processes_that_die_are_told(tmp_path: Path, actor: None) -> None:
    """The others go on; those that died were tried again."""
    names = ("killed", "fine", "ended", "wrong", "refused", "fine2")
    plans = [replace(SMALL, name=name) for name in names]
    recorder = Recorder()
    session = carry_out_all(plans, tmp_path, jobs=2, threads=1, display=recorder)
    reasons = session.failures
    assert set(reasons) == {"killed", "ended", "wrong", "refused"}
    assert "3 times" in reasons["killed"] and "signal 9 (Killed) on run killed" in reasons["killed"]
    assert "exit code 3 on run ended" in reasons["ended"]
    assert reasons["wrong"].startswith(f"ValueError: no really (see {tmp_path / 'logs'}")
    assert reasons["refused"].endswith(f"--force; here: remove {tmp_path / 'runs' / 'refused'}")
    assert recorder.ends == {**reasons, "fine": "finished", "fine2": "finished"}
    assert set(session.seconds) == set(names)


def test_an_interrupt_ends_all_processes(tmp_path: Path, actor: None) -> None:
    class Impatient(Recorder):
        def end(self, name: str, outcome: str) -> None:
            raise KeyboardInterrupt

    plans = [replace(SMALL, name=name) for name in ("fine", "endless", "endless2")]
    with pytest.raises(KeyboardInterrupt):
        carry_out_all(plans, tmp_path, jobs=2, threads=1, display=Impatient())
    assert not (tmp_path / "endless").exists()
    assert not multiprocessing.active_children()


def test_what_a_run_prints_is_in_its_log(tmp_path: Path) -> None:
    """Not among the results of the command; with the story of an error that nobody foresaw."""
    broken = replace(SMALL, estimate={**SMALL.estimate, "estimators": ("unheard-of",)})
    session = carry_out_all([broken], tmp_path, jobs=1, threads=1)
    log = tmp_path / "logs" / "small.log"
    assert f"(see {log})" in session.failures["small"]
    assert "Traceback" in log.read_text() and "unheard-of" in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "presicion"}, "did you mean 'precision'"),
        ({"scale": "desk"}, "unknown scale"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"timeout": -1.0}, "timeout must be a positive"),
        ({"only": "x*"}, "no run matches 'x\\*'; the runs are: tiny-pgd"),
        ({"mtl.alpha": 1}, "none of the methods"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    name = str(options.pop("name", "precision"))
    with pytest.raises(tr.UserError, match=message):
        tr.reproduce(name, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_data_that_is_not_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = EXPERIMENTS["main"].plans("laptop")
    assert any(plan.optional == "cifar10" for plan in plans)
    monkeypatch.setattr("tightrope.data.describe", lambda: [])
    chosen = reproducing._choose(plans, None)
    assert {p.name.split("-")[0] for p in chosen} == {"mnist", "helped"}
    assert {p.wanted()["data"] for p in chosen} == {"mnist"}
