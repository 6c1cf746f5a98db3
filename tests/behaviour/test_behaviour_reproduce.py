"""`tightrope reproduce`: one command per table, nothing lost, nothing hidden."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from commands import Commands, assert_refused, temporary_files

import tightrope as tr
from tightrope.study.experiments import EXPERIMENTS

# Makes every run of the equal budget one that takes a second.
TINY = (
    *("net=mlp", "width=8", "depth=1", "batch_norm=false", "train_samples=400"),
    *("batch_size=100", "epochs=3", "annealing_epochs=1", "decay_epochs=2", "precise_bn=false"),
    *("taps.steps=2", "eps=0.01"),
)
FEW = (*(part for pair in TINY for part in ("--set", pair)), "--samples", "5", "--jobs", "2")


@pytest.fixture(scope="module")
def out(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`estimators`, half of whose runs fail: the small network has one ReLU only."""
    folder = tmp_path_factory.mktemp("reproduce") / "out"
    outcome = commands.run("reproduce", "estimators", "--out", folder, *FEW)
    assert outcome.code == 1, outcome.err
    assert "failed: run equal-taps-relus2:" in outcome.out.replace("\n", " ")
    assert "no split with 2 ReLUs" in outcome.out.replace("\n", " ")
    assert "written to" in outcome.out
    return folder


def test_a_failed_run_does_not_stop_the_others(out: Path) -> None:
    record = json.loads((out / "estimators" / "table.json").read_text())
    assert set(record["failures"]) == {"equal-taps-relus2", "equal-taps-relus2-single"}
    rows = [row for row in record["tables"][0]["rows"] if row["network"] == "CNN3"]
    by_kind = {(row["relus"], row["kind"]): row for row in rows}
    assert by_kind[1, "multi"]["certified"] is not None
    assert by_kind[1, "multi"]["paper_certified"] == 93.62
    assert by_kind[2, "multi"]["certified"] is None
    claims = json.loads((out / "estimators" / "claims.json").read_text())
    for claim in claims:
        tested = "3, 1 ReLU" in claim["text"]
        assert (claim["verdict"] != "not tested at this scale") == tested
        assert tested or "failed: " in claim["evidence"]
    assert not temporary_files(out)


def test_runs_are_shared_and_used_again(commands: Commands, out: Path) -> None:
    weights = out / "runs" / "equal-taps" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    outcome = commands.run(
        *("reproduce", "connector", "--only", "equal-taps", "--out", out, "--json"), *FEW
    )
    assert outcome.code == 0, outcome.err
    assert outcome.json["ok"] and outcome.json["runs"]["equal-taps"]["reused"]
    assert weights.stat().st_mtime_ns == before
    row = next(
        row
        for row in outcome.json["tables"][0]["rows"]
        if (row["network"], row["c"]) == ("CNN3", 0.5)
    )
    assert row["taps"] is not None
    assert {claim["verdict"] for claim in outcome.json["claims"]} == {"not tested at this scale"}
    assert outcome.json["figures"] == ["connector.svg", "connector.png"]


def test_runs_of_earlier_calls_are_recorded(commands: Commands, out: Path) -> None:
    """The table shows them, so it says how they were made."""
    arguments = ("reproduce", "estimators", "--only", "equal-taps", "--out", out, "--json")
    runs = commands.run(*arguments, *FEW).json["runs"]
    assert {"equal-taps", "equal-taps-single", "short-taps-seed1"} <= set(runs)
    assert "equal-taps-relus2" not in runs  # it failed
    single = runs["equal-taps-single"]
    assert single["reused"] and single["commands"] and single["training_seconds"] > 0


def test_all_runs_are_looked_at(commands: Commands, out: Path, tmp_path: Path) -> None:
    cost = commands.run("reproduce", "cost", "--out", out, "--json").json
    seeds = ("", "-seed1", "-seed2")
    tiny = [f"short-taps{kind}{seed}" for kind in ("", "-single") for seed in seeds]
    made = ["equal-taps", "equal-taps-single", *tiny]
    assert [r["run"] for r in cost["tables"][0]["rows"]] == made
    proxy = commands.run("reproduce", "proxy", "--out", out)
    assert proxy.code == 0 and f"({len(made)} runs)" in proxy.out.replace("\n", " ")
    nothing = commands.run("reproduce", "proxy", "--out", tmp_path / "nothing")
    assert nothing.code == 0 and "not tested at this scale" in nothing.out
    assert "make others first" in nothing.out.replace("\n", " ")


def test_a_run_with_other_settings_is_not_taken_for_this_one(commands: Commands, out: Path) -> None:
    outcome = commands.run(
        *("reproduce", "connector", "--only", "equal-taps", "--out", out, *FEW),
        *("--set", "learning_rate=0.1", "--json"),
    )
    assert outcome.code == 1
    assert "trained with other settings (learning_rate)" in outcome.json["failures"]["equal-taps"]


def test_ctrl_c_and_again(commands: Commands, tmp_path: Path) -> None:
    arguments = (
        *("reproduce", "connector", "--only", "equal-taps", "--out", tmp_path / "out", *FEW),
        *("--set", "epochs=15", "--set", "decay_epochs=14", "--json"),
    )
    running = commands.start(*arguments)
    history = tmp_path / "out" / "runs" / "equal-taps" / "history.jsonl"
    deadline = time.monotonic() + 60
    while not (history.exists() and len(history.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.kill(signal.SIGINT)
    outcome = running.wait()
    assert outcome is not None and outcome.code == 130, outcome
    assert outcome.err.strip() == "tightrope: interrupted; what is finished is saved"
    done = history.read_text().splitlines()
    time.sleep(0.5)
    assert history.read_text().splitlines() == done, "a process survived"
    assert 3 <= len(done) < 15
    again = commands.run(*arguments)
    assert again.code == 0, again.err
    epochs = history.read_text().splitlines()
    assert len(epochs) == 15 and epochs[: len(done) - 1] == done[:-1]
    assert not temporary_files(tmp_path / "out")


def test_workers_end_with_their_parent(commands: Commands, tmp_path: Path) -> None:
    running = commands.start(
        *("reproduce", "connector", "--only", "equal-taps", "--out", tmp_path / "out", *FEW),
        *("--set", "epochs=2000", "--set", "decay_epochs=1999"),
    )
    history = tmp_path / "out" / "runs" / "equal-taps" / "history.jsonl"
    deadline = time.monotonic() + 60
    while not history.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.kill(signal.SIGKILL)
    running.wait()
    for _ in range(100):
        before = history.stat().st_mtime_ns
        time.sleep(0.5)
        if history.stat().st_mtime_ns == before:
            return
    raise AssertionError("the worker goes on training")


def test_the_papers_size_takes_the_same_way(commands: Commands, tmp_path: Path) -> None:
    """A preset of the paper, shrunk to a few iterations."""
    few = ("train_samples=40", "validation=20", "batch_size=10", "epochs=2", "annealing_epochs=1")
    small = ("width=2", "hidden=8", "taps.steps=2")
    outcome = commands.run(
        *("reproduce", "trainability", "--scale", "paper", "--only", "mnist-0.1-taps"),
        *("--out", tmp_path / "out", "--samples", "2", "--timeout", "1", "--json"),
        *(part for pair in (*few, *small) for part in ("--set", pair)),
    )
    assert outcome.code == 0, outcome.err
    row = outcome.json["tables"][0]["rows"][3]
    assert row["trained"] == 3 and all(row[f"tested_{k}"] is not None for k in range(7))


def test_the_list(commands: Commands) -> None:
    human = commands.run("reproduce", "--list")
    assert human.code == 0 and all(name in human.out for name in EXPERIMENTS)
    machine = commands.run("reproduce", "--list", "--json").json
    assert [entry["name"] for entry in machine] == list(EXPERIMENTS)
    assert all(set(entry["minutes"]) == {"laptop", "paper"} for entry in machine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name an experiment, or use --list"),
        (("presicion",), "did you mean 'precision'?"),
        (("precision", "--scale", "desk"), "unknown scale"),
        (("precision", "--jobs", "0"), "jobs must be at least 1"),
        (("precision", "--only", "nothing"), "no run matches"),
        (("precision", "--set", "epoch=2"), "did you mean 'epochs'?"),
        (("precision", "--set", "seed=2"), "sets seed itself"),
    ],
)
def test_bad_input_is_refused(
    commands: Commands, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert_refused(commands.run("reproduce", *arguments, cwd=tmp_path), message)
    assert not list(tmp_path.iterdir())


def test_the_python_twin_has_the_same_name() -> None:
    assert tr.reproduce.__name__ == "reproduce" and "reproduce" in tr.__all__
