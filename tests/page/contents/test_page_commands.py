"""The commands on the page repeat exactly the run they are shown for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tightrope.cli.evaluate import certify
from tightrope.cli.train import parse_pairs, train
from tightrope.page.contents.commands import certify_command, repeat_commands, train_command
from tightrope.reading import flatten
from tightrope.runs.config import train_arguments
from tightrope.training.objectives import METHODS
from tightrope.training.presets import load_preset
from tightrope.training.settings import Settings
from tightrope.training.training import chosen


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


def commands_of(settings: Settings, folder: str = "runs/a") -> list[str]:
    """Return the command that a folder remembers, and the one of a folder that does not."""
    table = settings.to_table()
    made_with = {"command": shlex.join(train_arguments(chosen(settings))), "threads": 2}
    return [
        train_command({**table, "made_with": made_with}, Path(folder)),
        train_command(table, Path(folder)),
    ]


def assert_repeated(settings: Settings) -> None:
    short, complete = commands_of(settings)
    assert understood(short)[1].resolve(normalize=True, network={}) == settings
    assert understood(complete)[1].resolve(normalize=True, network={}) == settings
    assert len(short) < len(complete)
    for name in flatten(settings.to_table()):
        assert f"--{name.replace('_', '-')} " in complete or f"{name}=" in complete


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method(method: str) -> None:
    settings = resolved(method=method, eps="8/255", epochs=7)
    assert_repeated(settings)
    for command in commands_of(settings, "runs/a b'c"):
        assert understood(command)[0] == Path("runs/a b'c")


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
    assert_repeated(resolved(**given))


@pytest.mark.parametrize("name", ["demo", "paper/tiny-ibp"])
def test_presets(name: str) -> None:
    assert_repeated(resolved(**load_preset(name)))


@pytest.mark.parametrize(
    "command",
    ["tightrope train; rm -rf x", "rm -rf x", "tightrope train 'x", 3, ["tightrope", "train"], {}],
)
def test_what_is_no_command_of_ours_is_not_shown(command: Any) -> None:
    table = resolved().to_table()
    shown = train_command({**table, "made_with": {"command": command}}, Path("a"))
    assert shown == train_command(table, Path("a"))


def test_a_folder_cannot_slip_in_another_command() -> None:
    """Whatever it remembers, what is shown is one `tightrope train` with plain words behind it."""
    hostile = "tightrope train --seed 3 ; rm -rf x && $(y) `z` > w | v\nu"
    shown = train_command({"made_with": {"command": hostile}}, Path("a"))
    assert shown == (
        "tightrope train --out a --seed 3 ';' rm -rf x '&&' '$(y)' '`z`' '>' w '|' v u"
    )


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


def test_the_function_stays_a_function() -> None:
    import tightrope.page.scatter

    assert callable(tightrope.report) and tightrope.report.__name__ == "report"
    assert tightrope.page is not tightrope.report
