"""The functions of `import tightrope as tr` give the same numbers as the commands."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from commands import Commands, json_lines, temporary_files

import tightrope as tr
from tightrope import nets
from tightrope.data.mnist import load_mnist
from tightrope.training.settings import flatten

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the commands

# What SMALL says, in Python.
SETTINGS: dict[str, Any] = {
    "net": "mlp",
    "eps": 0.01,
    "epochs": 4,
    "width": 8,
    "depth": 1,
    "batch_norm": False,
    "train_samples": 1024,
    "validation": 64,
    "batch_size": 64,
    "learning_rate": 0.01,
    "annealing_epochs": 1,
}
TIMES = ("seconds", "validation_seconds", "times")


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("method", ["ibp", tr.IBP()], ids=["by name", "as an object"])
def test_train(finished_run: Path, tmp_path: Path, method: Any) -> None:
    before = torch.random.get_rng_state()
    run = tr.train(out=tmp_path / "run", method=method, **SETTINGS)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert run.folder == tmp_path / "run"
    for name in ("config.toml", "model.json", "model.safetensors"):
        assert (run.folder / name).read_bytes() == (finished_run / name).read_bytes()
    mine, theirs = (
        json_lines(folder / "history.jsonl", without=TIMES) for folder in (run.folder, finished_run)
    )
    assert mine == theirs


def test_attack(commands: Commands, run: Path) -> None:
    options = ("--samples", "100", "--start", "50", "--eps", "0.05", "--steps", "5")
    outcome = commands.run("attack", run, *options, "--restarts", "2", "--seed", "3", "--json")
    result = tr.attack(run, samples=100, start=50, eps=0.05, steps=5, restarts=2, seed=3)
    assert without_times(vars(result)) == without_times(outcome.json)
    assert without_times(json.loads((run / "attack.json").read_text())) == without_times(
        vars(result)
    )


def test_certify(commands: Commands, run: Path, finished_run: Path, tmp_path: Path) -> None:
    options = ("--samples", "260", "--start", "5", "--eps", "8/255", "--steps", "5")
    outcome = commands.run("certify", run, *options, "--restarts", "1", "--json")
    journal = json_lines(run / "certification.jsonl", without=TIMES)
    points = {path.name: path.read_bytes() for path in (run / "counterexamples").iterdir()}
    again = tr.Run(run)
    again.clear_certification()
    summary = tr.certify(again, samples=260, start=5, eps="8/255", steps=5, restarts=1)
    assert without_times(summary.to_json()) == without_times(outcome.json)
    assert json_lines(again.journal, without=TIMES) == journal
    assert {p.name: p.read_bytes() for p in again.counterexamples.iterdir()} == points
    assert points


def test_estimate(commands: Commands, run: Path) -> None:
    options = ("--samples", "100", "--start", "50", "--eps", "0.05", "--steps", "5")
    outcome = commands.run("estimate", run, *options, "--classifier-relus", "1", "--json")
    result = tr.estimate(run, samples=100, start=50, eps=0.05, steps=5, classifier_relus=1)
    assert without_times(vars(result)) == without_times(outcome.json)
    stored = json.loads((run / "estimate.json").read_text())
    assert without_times(stored) == without_times(vars(result))


def test_export(commands: Commands, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "net.onnx"
    outcome = commands.run("export", run, "--onnx", path, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["onnx"] == str(path)
    assert 0 <= outcome.json["largest_difference"] < 1e-4
    module, _ = nets.load(run)
    x = load_mnist().x_test[:7].float() / 255
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = module(x).numpy()
    result = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert np.allclose(result, expected, atol=1e-4)
    assert tr.export(run, tmp_path / "twin.onnx") == outcome.json["largest_difference"]
    assert (tmp_path / "twin.onnx").read_bytes() == path.read_bytes()
    assert not temporary_files(tmp_path)


# Every setting with a value that is not its default.
UNUSUAL: dict[str, Any] = {
    "data_dir": "elsewhere",
    "train_samples": 128,
    "validation": 0.25,
    "net": "cnn3",
    "width": 1,
    "batch_norm": True,
    "normalize": True,
    "initialization": "default",
    "method": "pgd",
    "eps": "8/255",
    "train_eps": "10/255",
    "epochs": 4,
    "warmup_epochs": 1,
    "annealing_epochs": 1,
    "annealing": "linear",
    "batch_size": 32,
    "accumulate": 2,
    "optimizer": "sgd",
    "learning_rate": 0.02,
    "momentum": 0.8,
    "weight_decay": 1e-4,
    "decay_epochs": [2, 3],
    "decay_factor": 0.5,
    "clip": 1.0,
    "l1": 1e-5,
    "regularizer_weight": 0.25,
    "natural_weight": 0.1,
    "precise_bn": True,
    "average_from": 2,
    "select": "last",
    "seed": 7,
    "device": "cpu",
    "pgd.steps": 2,
    "pgd.restarts": 2,
    "pgd.step_size": 0.5,
}


def test_every_setting_can_be_given_either_way(commands: Commands, tmp_path: Path) -> None:
    """`--set name=value` is `name=value` in Python, and both are what `config.toml` says."""
    ours, theirs = tmp_path / "python", tmp_path / "command"
    tr.train(out=ours, **UNUSUAL)
    pairs = [f"{name}={str(value).lower().strip('[]')}" for name, value in UNUSUAL.items()]
    outcome = commands.run("train", "--out", theirs, *(a for p in pairs for a in ("--set", p)))
    assert outcome.code == 0, outcome.err
    for name in ("config.toml", "model.json", "model.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    table = flatten(tomllib.loads((ours / "config.toml").read_text()))
    assert {name: table.get(name) for name in UNUSUAL} == UNUSUAL
    # The stored settings are complete: resuming without any is resuming this very run.
    assert commands.run("train", "--out", theirs, "--resume").code == 0


def test_user_errors_are_value_errors_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'cnn7'") as caught:
        tr.train(out=tmp_path / "run", net="cnn8")
    assert isinstance(caught.value, tr.UserError)
    assert "\n" not in str(caught.value)
