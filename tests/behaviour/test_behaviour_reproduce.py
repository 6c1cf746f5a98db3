"""`tightrope reproduce`: one command per table, nothing lost, nothing hidden."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Commands, Outcome, assert_refused, temporary_files
from hangs import PATIENCE
from moments import Moment
from processes import wait_until_gone

import tightrope as tr
from tightrope.study.experiments import EXPERIMENTS

WORKER = "spawn_main"  # part of the command line of a run's process
# Makes every run of the equal budget one that takes a second.
TINY = (
    *("net=mlp", "width=8", "depth=1", "batch_norm=false", "train_samples=400"),
    *("batch_size=100", "epochs=3", "annealing_epochs=1", "decay_epochs=2", "precise_bn=false"),
    *("taps.steps=2", "eps=0.01"),
)
FEW = (*(part for pair in TINY for part in ("--set", pair)), "--samples", "5", "--jobs", "2")


# Runs of `estimators`, without further seeds; the small network has one ReLU only.
SOME = "*-tap*[!0-9]"
GOOD = ("equal-taps", "equal-taps-single", "short-taps", "short-taps-single")
BAD = "equal-taps-relus2-single"


@pytest.fixture(scope="module")
def out(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`estimators`, one of whose runs fails."""
    folder = tmp_path_factory.mktemp("reproduce") / "out"
    outcome = commands.run("reproduce", "estimators", "--only", SOME, "--out", folder, *FEW)
    assert outcome.code == 1, outcome.err
    assert f"failed: run {BAD}:" in outcome.out.replace("\n", " ")
    assert "no split with 2 ReLUs" in outcome.out.replace("\n", " ")
    assert "written to" in outcome.out
    return folder


def test_a_failed_run_does_not_stop_the_others(out: Path) -> None:
    record = json.loads((out / "estimators" / "table.json").read_text())
    assert set(record["failures"]) == {BAD}
    rows = [row for row in record["tables"][0]["rows"] if row["network"] == "CNN3"]
    by_kind = {(row["relus"], row["kind"]): row for row in rows}
    assert by_kind[1, "multi"]["certified"] is not None
    assert by_kind[1, "multi"]["paper_certified"] == 93.62
    assert by_kind[2, "single"]["certified"] is None
    claims = json.loads((out / "estimators" / "claims.json").read_text())
    for claim in claims:
        tested = claim["text"].startswith("CNN3, 1 ReLU")
        assert (claim["verdict"] != "not tested at this scale") == tested
        assert (BAD in claim["evidence"]) == ("2 ReLUs" in claim["text"])
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
    assert set(GOOD) <= set(runs)
    assert BAD not in runs  # it failed
    single = runs["equal-taps-single"]
    assert single["reused"] and single["commands"] and single["training_seconds"] > 0


def test_all_runs_are_looked_at(commands: Commands, out: Path, tmp_path: Path) -> None:
    cost = commands.run("reproduce", "cost", "--out", out, "--json").json
    assert [r["run"] for r in cost["tables"][0]["rows"]] == list(GOOD)
    proxy = commands.run("reproduce", "proxy", "--out", out)
    assert proxy.code == 0 and f"({len(GOOD)} runs)" in proxy.out.replace("\n", " ")
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
    history = tmp_path / "out" / "runs" / "equal-taps" / "history.jsonl"
    # The run itself interrupts the command in one of its epochs, and then trains no further.
    moment = Moment("change", 30, signal.SIGINT, to="parent", where=WORKER, wait=True)
    moment = replace(moment, noted=str(tmp_path / "family"))
    outcome = commands.run(*arguments, cwd=tmp_path, moment=moment)
    assert outcome.code == 130, outcome
    assert outcome.err.strip() == "tightrope: interrupted; what is finished is saved"
    wait_until_gone(moment.family(), PATIENCE)
    done = history.read_text().splitlines()
    assert 3 <= len(done) < 15
    again = commands.run(*arguments)
    assert again.code == 0, again.err
    epochs = history.read_text().splitlines()
    assert len(epochs) == 15 and epochs[: len(done) - 1] == done[:-1]
    assert not temporary_files(tmp_path / "out")


def test_workers_end_with_their_parent(commands: Commands, tmp_path: Path) -> None:
    """While they train, and would for hours."""
    endless = ("--set", "epochs=1000000", "--set", "decay_epochs=999999")
    moment = Moment("change", 5, to="parent", where=WORKER, noted=str(tmp_path / "family"))
    outcome = commands.run(
        *("reproduce", "connector", "--only", "equal-taps", "--out", tmp_path / "out", *FEW),
        *endless,
        cwd=tmp_path,
        moment=moment,
    )
    assert outcome.code == -signal.SIGKILL
    assert moment.family()
    wait_until_gone(moment.family(), PATIENCE)


def at_the_papers_size(commands: Commands, name: str, out: Path) -> Outcome:
    """A preset of the paper, shrunk to a few iterations."""
    few = ("train_samples=40", "validation=20", "batch_size=10", "epochs=2", "annealing_epochs=1")
    small = ("width=2", "hidden=8", "taps.steps=2")
    outcome = commands.run(
        *("reproduce", name, "--scale", "paper", "--only", "mnist-0.1-taps", "--out", out),
        *("--samples", "2", "--timeout", "1", "--json"),
        *(part for pair in (*few, *small) for part in ("--set", pair)),
    )
    assert outcome.code == 0, outcome.err
    return outcome


def test_the_papers_size_takes_the_same_way(commands: Commands, tmp_path: Path) -> None:
    result = at_the_papers_size(commands, "main", tmp_path / "out").json
    assert result["scale"] == "paper" and list(result["runs"]) == ["mnist-0.1-taps"]
    made = [row for row in result["tables"][0]["rows"] if row["certified"] is not None]
    assert [(row["group"], row["key"]) for row in made] == [("mnist-0.1", "taps")]


@pytest.mark.slow
def test_every_split_is_tested_at_the_papers_size(commands: Commands, tmp_path: Path) -> None:
    """Classifiers of up to six ReLUs, each of which is compiled for itself."""
    result = at_the_papers_size(commands, "trainability", tmp_path / "out").json
    row = result["tables"][0]["rows"][3]
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
