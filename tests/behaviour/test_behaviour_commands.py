"""Every command from end to end: for people, with `--json`, with `--help`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from commands import (
    SMALL,
    Commands,
    Outcome,
    environment,
    json_lines,
    run_script,
    temporary_files,
)
from hangs import PATIENCE

from tightrope import nets
from tightrope.data.mnist import load_mnist
from tightrope.radius import parse_radius

CERTIFY = ("--samples", "300", "--eps", "0.03", "--steps", "10", "--restarts", "1")
COMMANDS = (
    *("train", "compare", "attack", "estimate", "certify", "export"),
    *("nets", "methods", "presets", "data"),
)


def assert_fine(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert "Traceback" not in outcome.out


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+\.\d+)%", text)]


# --- the installed script -------------------------------------------------------------------------


def test_the_first_three_commands_of_a_user(tmp_path: Path) -> None:
    """Help, train and certify with the real script in real processes, on real MNIST."""
    module = [sys.executable, "-m", "tightrope"]
    done = subprocess.run(
        module, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: tightrope") and "train" in done.stdout
    outcome = run_script("train", "--out", "runs/a", *SMALL, cwd=tmp_path)
    assert_fine(outcome)
    run = tmp_path / "runs" / "a"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint.pt",
        "config.toml",
        "history.jsonl",
        "model.json",
        "model.safetensors",
    ]
    history = json_lines(run / "history.jsonl")
    assert [record["epoch"] for record in history] == [0, 1, 2, 3]
    assert history[-1]["natural"] > 0.7  # it did learn something
    outcome = run_script("certify", "runs/a", *CERTIFY, cwd=tmp_path)
    assert_fine(outcome)
    summary = json.loads((run / "certification.json").read_text())
    shown = percentages(outcome.out)
    expected = [100 * summary[name] for name in ("natural", "adversarial", "certified")]
    assert shown == pytest.approx(expected, abs=0.01)
    assert f"({summary['unknown']} unknown)" in outcome.out
    assert summary["verified"] + summary["falsified"] + summary["unknown"] == 300
    assert min(summary["verified"], summary["falsified"]) > 10
    # Eight neurons are nothing to branch and bound.
    assert summary["unknown"] == 0
    decided = {name: sum(counts.values()) for name, counts in summary["stages"].items()}
    assert min(decided["natural"], decided["ibp"], decided["attack"], decided["bab"]) > 0
    assert not temporary_files(tmp_path)


def test_a_radius_of_many_digits_through_all_commands(commands: Commands, tmp_path: Path) -> None:
    """What is written is read: it was taken by `train` and then refused by all others."""
    eps = "1.2345678901234567890123456789e-12"
    wide = "0.09876543210987654321098765432109876543210987654321"
    assert_fine(commands.run("train", "--out", "run", *SMALL, "--eps", eps, cwd=tmp_path))
    assert_fine(commands.run("train", "--out", "run", "--resume", cwd=tmp_path))
    few = ("--samples", "20", "--steps", "3", "--restarts", "1")
    for options in ((), ("--eps", wide, "--force"), ("--eps", wide)):
        assert_fine(commands.run("certify", "run", *few, *options, cwd=tmp_path))
    for command in ("attack", "estimate"):
        assert_fine(commands.run(command, "run", *few, cwd=tmp_path))
    assert_fine(commands.run("report", "run", cwd=tmp_path))
    settings = json.loads((tmp_path / "run" / "certification.json").read_text())["settings"]
    assert parse_radius(settings["eps"]) == Fraction(wide)


# --- train ------------------------------------------------------------------------------------


def test_train_writes_what_the_design_says(finished_run: Path) -> None:
    names = {"epoch", "radius", "learning_rate", "loss", "natural", "robust", "seconds"}
    names |= {"validation_natural", "validation_robust", "validation_seconds"}
    for number, record in enumerate(json_lines(finished_run / "history.jsonl")):
        assert names <= set(record)
        assert record["epoch"] == number
    module, architecture = nets.load(finished_run)
    assert (architecture.name, architecture.input_shape) == ("mlp", (1, 28, 28))
    checkpoint = torch.load(finished_run / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == 4
    with torch.no_grad():
        x = load_mnist().x_test[:1000].float() / 255
        right = (module(x).argmax(1) == load_mnist().y_test[:1000]).double().mean()
    assert right > 0.7


def test_train_json(commands: Commands, tmp_path: Path, finished_run: Path) -> None:
    outcome = commands.run("train", "--out", tmp_path / "run", *SMALL, "--json")
    assert_fine(outcome)
    last = json_lines(tmp_path / "run" / "history.jsonl")[-1]
    assert outcome.json == {"run": str(tmp_path / "run"), **last}


def test_config_is_enough_to_repeat_the_run(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    """A folder with nothing but the config, resumed without any setting, is the same run."""
    run = tmp_path / "again"
    run.mkdir()
    (run / "config.toml").write_bytes((finished_run / "config.toml").read_bytes())
    assert_fine(commands.run("train", "--out", run, "--resume"))
    for name in ("config.toml", "model.safetensors", "model.json"):
        assert (run / name).read_bytes() == (finished_run / name).read_bytes()


def test_resume_starts_a_run_that_is_not_there(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    assert_fine(commands.run("train", "--out", tmp_path / "new", "--resume", *SMALL))
    for name in ("config.toml", "model.safetensors", "model.json"):
        assert (tmp_path / "new" / name).read_bytes() == (finished_run / name).read_bytes()


def test_resume_of_a_finished_run_changes_nothing(commands: Commands, run: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    assert_fine(commands.run("train", "--out", run, "--resume"))
    assert_fine(commands.run("train", "--out", run, "--resume", *SMALL))
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    assert after == before


def test_force_replaces_the_run_and_keeps_other_files(commands: Commands, run: Path) -> None:
    assert commands.run("certify", run, *CERTIFY).code == 0
    assert commands.run("attack", run, "--samples", "20", "--steps", "5").code == 0
    (run / "notes.txt").write_text("mine")
    before = (run / "model.safetensors").read_bytes()
    outcome = commands.run("train", "--out", run, *SMALL, "--seed", "1", "--force")
    assert_fine(outcome)
    assert (run / "model.safetensors").read_bytes() != before
    assert (run / "notes.txt").read_text() == "mine"
    names = {path.name for path in run.iterdir()}
    assert not names & {"attack.json", "certification.json", "certification.jsonl"}
    assert not (run / "counterexamples").exists()


def test_presets_can_be_changed_by_options(commands: Commands, tmp_path: Path) -> None:
    options = ["--epochs", "2", "--set", "train_samples=256", "--set", "annealing_epochs=1"]
    options += ["--set", "decay_epochs=1", "--eps", "8/255"]
    outcome = commands.run(
        "train", "--preset", "paper/tiny-ibp", "--out", tmp_path / "run", *options
    )
    assert_fine(outcome)
    config = (tmp_path / "run" / "config.toml").read_text()
    for line in ('net = "cnn3"', "width = 1", "epochs = 2", 'eps = "8/255"', "train_eps = 0.1"):
        assert line in config


# --- attack, certify, export ----------------------------------------------------------------------


def test_attack(commands: Commands, run: Path) -> None:
    options = ("--samples", "200", "--eps", "0.05", "--steps", "10", "--restarts", "2")
    outcome = commands.run("attack", run, *options, "--json")
    assert_fine(outcome)
    result = outcome.json
    assert result == json.loads((run / "attack.json").read_text())
    assert result["samples"] == 200
    assert 0 < result["adversarial"] < result["natural"] < 1
    human = commands.run("attack", run, *options)
    assert_fine(human)
    expected = [100 * result["natural"], 100 * result["adversarial"]]
    assert percentages(human.out) == pytest.approx(expected, abs=0.01)


def test_attack_by_a_suite(commands: Commands, run: Path) -> None:
    options = ("--samples", "20", "--eps", "0.05", "--suite", "autoattack")
    outcome = commands.run("attack", run, *options, "--json")
    assert_fine(outcome)
    result = outcome.json
    assert result == json.loads((run / "attack.json").read_text())
    assert list(result["after"]) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    falling = [result["natural"], *result["after"].values()]
    assert falling == sorted(falling, reverse=True)
    assert result["adversarial"] == falling[-1] < result["natural"]
    assert result["settings"]["suite"] == "autoattack" and "steps" not in result["settings"]
    human = commands.run("attack", run, *options)
    assert_fine(human)
    assert percentages(human.out)[: len(falling)] == pytest.approx([100 * f for f in falling])
    refused = commands.run("attack", run, "--suite", "autoatack")
    assert refused.code == 2 and "autoattack" in refused.err


def test_a_stronger_attack_and_a_larger_radius_break_more(commands: Commands, run: Path) -> None:
    def adversarial(*options: str) -> float:
        outcome = commands.run("attack", run, "--samples", "200", *options, "--json")
        assert_fine(outcome)
        return float(outcome.json["adversarial"])

    weak = adversarial("--eps", "0.05", "--steps", "1", "--restarts", "1")
    strong = adversarial("--eps", "0.05", "--steps", "20", "--restarts", "2")
    wide = adversarial("--eps", "0.2", "--steps", "20", "--restarts", "2")
    assert wide < strong < weak


def test_certify_json(commands: Commands, run: Path) -> None:
    outcome = commands.run("certify", run, *CERTIFY, "--json")
    assert_fine(outcome)
    assert outcome.json == json.loads((run / "certification.json").read_text())
    assert len(json_lines(run / "certification.jsonl")) == 300


def test_certify_start_and_stages(commands: Commands, run: Path) -> None:
    options = ("--samples", "20", "--start", "9980", "--stages", "ibp", "--json")
    outcome = commands.run("certify", run, *options)
    assert_fine(outcome)
    assert outcome.json["adversarial"] is None
    indices = sorted(r["index"] for r in json_lines(run / "certification.jsonl"))
    assert indices == list(range(9980, 10000))
    labels = load_mnist().y_test
    for record in json_lines(run / "certification.jsonl"):
        assert record["label"] == int(labels[record["index"]])
    human = commands.run("certify", run, *options[:-1])
    assert_fine(human)
    assert "adversarial -" in human.out


def test_certified_is_below_adversarial_is_below_natural(commands: Commands, run: Path) -> None:
    summary = commands.run("certify", run, *CERTIFY, "--json").json
    attacked = commands.run(
        "attack", run, "--samples", "300", "--eps", "0.03", "--steps", "10", "--json"
    ).json
    assert summary["certified"] <= attacked["adversarial"] <= attacked["natural"]
    assert summary["natural"] == attacked["natural"]


# --- lists and help -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("nets",), {"mlp", "cnn3", "cnn7", "resnet"}),
        (("methods",), {"standard", "pgd", "ibp", "sabr", "taps", "staps", "mtl-ibp", "ibp-r"}),
        (("presets",), {"demo", "paper/tiny-ibp", "paper/tiny-pgd"}),
        (("data", "list"), {"mnist", "cifar10", "tinyimagenet"}),
    ],
)
def test_lists(commands: Commands, arguments: tuple[str, ...], names: set[str]) -> None:
    outcome = commands.run(*arguments, "--json")
    assert_fine(outcome)
    listed = [entry["name"] for entry in outcome.json]
    assert names <= set(listed) and len(set(listed)) == len(listed)
    human = commands.run(*arguments)
    assert_fine(human)
    for name in listed:
        assert name in human.out


def test_data_list_knows_what_is_here(commands: Commands, tmp_path: Path) -> None:
    entries = commands.run("data", "list", "--data-dir", tmp_path, "--json").json
    here = {entry["name"]: entry["location"] is not None for entry in entries}
    assert here["mnist"] and not here["cifar10"]


@pytest.mark.parametrize(
    "arguments", [(), *((name,) for name in COMMANDS), ("data", "list"), ("data", "fetch")]
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(commands: Commands, arguments: tuple[str, ...], flag: str) -> None:
    outcome = commands.run(*arguments, flag)
    assert_fine(outcome)
    assert outcome.out.startswith(f"Usage: tightrope {' '.join(arguments)}".rstrip())
    assert "--help" in outcome.out


def test_help_lists_every_command_and_setting(commands: Commands) -> None:
    overview = commands.run("--help").out
    section = overview.partition("Commands:")[2]
    listed = re.findall(r"^  (\S+) +\S", section, flags=re.MULTILINE)
    assert set(COMMANDS) <= set(listed)
    for name in listed:
        assert_fine(commands.run(name, "--help"))
    settings = commands.run("train", "--help").out
    for name in ("batch_size", "annealing_epochs", "train_eps", "select", "weight_decay"):
        assert name in settings


@pytest.mark.parametrize("arguments", [(), ("data",)])
def test_without_arguments_there_is_help(commands: Commands, arguments: tuple[str, ...]) -> None:
    bare, asked = commands.run(*arguments), commands.run(*arguments, "--help")
    assert_fine(bare)
    assert bare.out == asked.out


def test_version(commands: Commands) -> None:
    import tightrope

    outcome = commands.run("--version")
    assert_fine(outcome)
    assert tightrope.__version__ in outcome.out
