"""`torchrun -m tightrope train`: one run by several processes, whatever happens to them."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import Commands, Outcome, environment, json_lines, temporary_files, unchanged
from hangs import PATIENCE
from moments import Moment
from shared_steps import local_group

from tightrope.nets import load

EPOCHS = 6
# BatchNorm, annealing by IBP, then TAPS; a last validation batch; weights that rounding leaves
# alone: Adam would make steps of the rounding errors in biases before a BatchNorm.
TRAIN = (
    *("--net", "cnn3", "--method", "taps", "--eps", "0.05", "--epochs", str(EPOCHS)),
    *("--set", "width=1", "--set", "train_samples=150", "--set", "validation=53"),
    *("--set", "batch_size=23", "--set", "annealing_epochs=2", "--set", "taps.steps=2"),
    *("--set", "optimizer=sgd", "--set", "learning_rate=0.01"),
)


def torchrun(
    size: int, *arguments: str | Path, moment: Moment | None = None, **variables: str
) -> Outcome:
    """Run a command by several processes that talk over this machine's own network only."""
    place = local_group()
    meeting = ("--master-addr", place["MASTER_ADDR"], "--master-port", place["MASTER_PORT"])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", *meeting),
            *("--nproc-per-node", str(size), "-m", "tightrope", *arguments),
        ],
        env={**environment(moment), **place, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def told(outcome: Outcome) -> list[str]:
    """Return the lines that the command itself wrote about what went wrong."""
    return [line for line in outcome.err.splitlines() if line.startswith("tightrope:")]


def assert_refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code != 0
    assert len(told(outcome)) == 1, outcome.err
    (line,) = told(outcome)
    for word in words:
        assert word in line, line


@pytest.fixture(scope="module")
def alone(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    outcome = commands.run("train", "--out", folder, *TRAIN)
    assert outcome.code == 0, outcome.err
    return folder


def assert_same(run: Path, alone: Path) -> None:
    """Compare two runs up to rounding."""
    assert {p.name for p in run.iterdir()} == {p.name for p in alone.iterdir()}
    assert not temporary_files(run)
    times = ("seconds", "validation_seconds", "made_with")
    histories = [json_lines(f / "history.jsonl", without=times) for f in (run, alone)]
    assert len(histories[0]) == len(histories[1]) == EPOCHS
    for found, expected in zip(*histories, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
    checkpoints: list[Any] = [
        torch.load(f / "checkpoint.pt", weights_only=True) for f in (run, alone)
    ]
    assert checkpoints[0]["selected_epoch"] == checkpoints[1]["selected_epoch"]
    for states in ([c["model"] for c in checkpoints], [weights(f) for f in (run, alone)]):
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[1].items():
            torch.testing.assert_close(states[0][name], tensor, rtol=1e-3, atol=1e-3, msg=name)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the selected weights."""
    return dict(load(run)[0].state_dict())


def test_two_processes_make_the_run_of_one(alone: Path, tmp_path: Path) -> None:
    outcome = torchrun(2, "train", "--out", tmp_path / "run", *TRAIN)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("epoch") == EPOCHS + 1  # one process tells of all
    assert not told(outcome)
    assert "processes = 2" in (tmp_path / "run" / "config.toml").read_text()
    assert_same(tmp_path / "run", alone)


@pytest.mark.parametrize("victim", ["self", "sibling"])
def test_a_process_dies_and_any_number_resumes(victim: str, alone: Path, tmp_path: Path) -> None:
    """The first process writes; it kills itself, or the other one, at a random change of a file."""
    run = tmp_path / "run"
    change = random.Random(victim).randint(8, 12)
    moment = Moment("change", change, signal.SIGKILL, victim, folder=str(run))
    outcome = torchrun(2, "train", "--out", run, *TRAIN, moment=moment)
    assert_refused(outcome, "processes", "--resume")
    finished = len(json_lines(run / "history.jsonl"))
    assert 0 < finished < EPOCHS
    sizes = {"self": (1, 2), "sibling": (3,)}[victim]
    for size in sizes:
        copy = tmp_path / f"by-{size}"
        shutil.copytree(run, copy)
        outcome = torchrun(size, "train", "--out", copy, "--resume")
        assert outcome.code == 0, outcome.err
        assert f"epoch   {EPOCHS}/{EPOCHS}" in outcome.out and "epoch   1/" not in outcome.out
        assert_same(copy, alone)


@pytest.mark.parametrize(
    ("how", "code", "words"), [(signal.SIGTERM, 2, "--resume"), (signal.SIGINT, 130, "interrupted")]
)
def test_waiting_for_a_process_that_never_comes_can_be_ended(
    how: signal.Signals, code: int, words: str, tmp_path: Path
) -> None:
    """As `torchrun` ends it, which holds the store, if the other one has died on its way."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {**local_group(), "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "RANK": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tightrope", "train", "--out", tmp_path / "run", *TRAIN],
        env={**environment(), **place, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started the tests may ignore interrupts (a background shell does).
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + PATIENCE
    try:
        # It has counted itself, and left its address.
        while store.num_keys() < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(how)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert_refused(Outcome(code, "", err), words)
    assert not (tmp_path / "run").exists()


def test_batches_smaller_than_the_processes_are_refused(tmp_path: Path) -> None:
    small = ("--set", "batch_size=6", "--set", "accumulate=4")
    with unchanged(tmp_path):
        outcome = torchrun(2, "train", "--out", tmp_path / "run", *TRAIN, *small)
    assert_refused(outcome, "batches of 6 samples in 4 parts", "2 processes")


def test_other_commands_are_refused(alone: Path) -> None:
    with unchanged(alone):
        outcome = torchrun(2, "certify", alone)
    assert_refused(outcome, "torchrun", "`train`")


def by_hand(tmp_path: Path, *arguments: tuple[str, ...]) -> list[Outcome]:
    """Start one process per machine, each with arguments and a folder of its own."""
    shared = {**environment(), **local_group(), "WORLD_SIZE": str(len(arguments))}
    started = []
    for rank, given in enumerate(arguments):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "tightrope", "train", "--out", "run", *TRAIN, *given],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": "0"},
            cwd=tmp_path / str(rank),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    ends = [process.communicate(timeout=PATIENCE) for process in started]
    return [Outcome(p.returncode, *end) for p, end in zip(started, ends, strict=True)]


def assert_refused_once(outcomes: list[Outcome], *words: str) -> None:
    assert [outcome.code for outcome in outcomes] == [2] * len(outcomes), outcomes
    err = "".join(outcome.err for outcome in outcomes)
    assert_refused(Outcome(2, "", err), *words)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    outcomes = by_hand(tmp_path, ("--seed", "1"), ("--seed", "2", "--set", "clip=3"))
    assert_refused_once(outcomes, "process 1 of 2 differs from process 0 in seed, clip")
    assert not list(tmp_path.glob("*/run"))


def test_other_data_are_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    y = np.arange(150) % 10
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        x = generator.random((150, 1, 8, 8), dtype=np.float32)
        np.savez(tmp_path / str(rank) / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    outcomes = by_hand(tmp_path, *[("--data", "own.npz")] * 2)
    assert_refused_once(outcomes, "process 1 of 2 differs from process 0 in its data")
    assert not list(tmp_path.glob("*/run"))


def test_what_one_process_lacks_is_refused(tmp_path: Path) -> None:
    """The other one is told, and does not wait for it."""
    (tmp_path / "0").mkdir()
    x, y = np.zeros((150, 1, 8, 8), np.float32), np.arange(150) % 10
    np.savez(tmp_path / "0" / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    outcomes = by_hand(tmp_path, *[("--data", "own.npz")] * 2)
    assert_refused_once(outcomes, "process 1 of 2: ", "own.npz")
