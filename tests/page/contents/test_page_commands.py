"""The commands on the page repeat exactly the run they are shown for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tightrope.cli.evaluate import certify
from tightrope.cli.train import parse_pairs, train
from tightrope.page.contents.commands import certify_command, repeat_commands, train_command
from tightrope.training.objectives import METHODS
from tightrope.training.presets import load_preset
from tightrope.training.settings import Settings


def understood(command: str) -> tuple[Path, Settings]:
    """Read a command as the command line does."""
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["tightrope", "train"]
    options: dict[str, Any] = dict(train.make_context("train", words[2:]).params)
    out, pairs = options.pop("out"), options.pop("pairs")
    for name in ("preset", "resume", "force", "wait", "as_json"):
        assert not options.pop(name)
    given = {k: v for k, v in options.items() if v is not None} | parse_pairs(pairs)
    return out, Settings.parse(given)


def resolved(**given: Any) -> Settings:
    return Settings.parse(given).resolve(
        normalize=True, network={"width": 4, "batch_norm": True, "hidden": 16}
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method(method: str) -> None:
    settings = resolved(method=method, eps="8/255", epochs=7)
    out, again = understood(train_command(settings, Path("runs/a b'c")))
    assert out == Path("runs/a b'c")
    assert again.resolve(normalize=True, network={}) == settings


@pytest.mark.parametrize(
    "given",
    [
        {"clip": "none", "select": "last", "validation": 0, "decay_epochs": ""},
        {"data": "my data/it's.npz", "data_dir": "/a b", "train_eps": "1/3"},
        {"method": "taps", "taps.weight": 2, "taps.connector": 0.3, "accumulate": 2},
        {"batch_norm": False, "normalize": False, "seed": 7, "device": "cpu", "l1": 1e-7},
        {"average_from": 3, "select": "last", "validation": 500, "learning_rate": 0.001},
    ],
)
def test_settings_of_every_kind(given: dict[str, Any]) -> None:
    settings = resolved(**given)
    _, again = understood(train_command(settings, Path("runs/a")))
    assert again.resolve(normalize=True, network={}) == settings


@pytest.mark.parametrize("name", ["demo", "paper/tiny-ibp"])
def test_presets(name: str) -> None:
    settings = resolved(**load_preset(name))
    _, again = understood(train_command(settings, Path("x")))
    assert again.resolve(normalize=True, network={}) == settings


def test_certify() -> None:
    settings = {
        "eps": "8/255",
        "start": 5,
        "samples": 100,
        "stages": ["ibp", "attack"],
        "timeout": 2.5,
        "steps": 20,
        "restarts": 2,
        "seed": 3,
        "weights": "abc",
    }
    command = certify_command(settings, Path("runs/a b"))
    words = shlex.split(command.replace("\\\n", ""))
    options = certify.make_context("certify", words[2:]).params
    assert words[:2] == ["tightrope", "certify"] and options["run"] == Path("runs/a b")
    assert options["stages"] == "ibp,attack"
    for name in ("eps", "start", "samples", "timeout", "steps", "restarts", "seed"):
        assert options[name] == settings[name]


def test_what_is_not_known_is_not_shown() -> None:
    assert repeat_commands(None, Path("a"), {}) == ()
    assert repeat_commands(None, Path("a"), {"eps": "0.1", "samples": 3, "stages": []})[0] == (
        "tightrope certify a --eps 0.1 --samples 3 --stages '[]'"
    )
