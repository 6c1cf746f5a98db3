"""Help comes at once: commands are imported when they are called, and not before."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import click
import pytest

from tightrope.certification.names import DEFAULT_STAGES, DISTANCE_STAGES
from tightrope.certification.stages import STAGES
from tightrope.cli.main import COMMANDS, cli

# What takes its time to import, and what only results need.
HEAVY = ("torch", "numpy", "scipy", "numba", "onnx", "tightrope.runs")
SCRIPT = """
import sys
from tightrope.cli.main import _run
code = _run(sys.argv[2:])
found = set(sys.argv[1].split(",")) & set(sys.modules)
sys.exit(f"imported: {found}" if found else code)
"""


def answer(
    *arguments: str, heavy: Sequence[str] = HEAVY, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which fails if it imports what is heavy."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(heavy), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert "imported" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done


def complete(words: str, **variables: str) -> list[str]:
    """Return what a shell would offer for the last word of a line."""
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), **variables}
    done = answer(_TIGHTROPE_COMPLETE="bash_complete", **variables)
    assert done.returncode == 0 and not done.stderr
    return [line.removeprefix("plain,") for line in done.stdout.splitlines()]


def test_the_check_would_notice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "click", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "imported: {'click'}" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",)])
def test_help_imports_no_torch(arguments: tuple[str, ...]) -> None:
    done = answer(*arguments, heavy=(*HEAVY, "rich"))
    assert done.returncode == 0
    assert arguments == ("--version",) or all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", [*sorted(COMMANDS), "data list", "data fetch"])
def test_help_of_commands_imports_no_torch(name: str) -> None:
    done = answer(*name.split(), "--help")
    assert done.returncode == 0 and f"Usage: tightrope {name}" in done.stdout


def test_help_of_train_names_the_settings() -> None:
    assert "learning_rate" in answer("train", "--help").stdout


def test_presets_are_listed_without_torch() -> None:
    done = answer("presets", "--json")
    names = {preset["name"] for preset in json.loads(done.stdout)}
    assert done.returncode == 0 and "demo" in names
    assert "demo" in answer("presets").stdout


def test_networks_are_listed_without_torch() -> None:
    done = answer("nets", "--json")
    assert done.returncode == 0 and {"cnn3", "cnn7"} <= {n["name"] for n in json.loads(done.stdout)}
    assert "cnn3" in answer("nets").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "unknown command 'trian'; did you mean 'train'?"),
        (("train", "--epoch", "1"), "No such option '--epoch'"),
        (("train", "--out", "x", "--set", "epoch=1"), "unknown setting 'epoch'"),
        (("train", "--preset", "dem", "--out", "x"), "unknown preset 'dem'"),
        (("certify",), "Missing argument 'RUN | ONNX'"),
    ],
)
def test_what_is_mistyped_is_refused_without_torch(
    arguments: tuple[str, ...], message: str
) -> None:
    done = answer(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"tightrope: {message}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tightrope tr", ["train"]),
        ("tightrope re", ["report", "reproduce"]),
        ("tightrope certify --sta", ["--start", "--stages"]),
        ("tightrope data ", ["fetch", "list"]),
    ],
)
def test_completion_imports_no_torch(words: str, offered: list[str]) -> None:
    assert complete(words) == offered


def test_completion_offers_every_command() -> None:
    assert complete("tightrope ") == sorted(COMMANDS)


def test_stages_are_named_as_they_are() -> None:
    others = ("lipschitz", "milp", "autoattack")
    assert tuple(name for name in STAGES if name not in others) == DEFAULT_STAGES
    assert tuple(name for name in STAGES if name in DISTANCE_STAGES) == DISTANCE_STAGES


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_line_of_each_command_is_its_own(name: str) -> None:
    home = COMMANDS[name]
    module = f"tightrope.cli.{home.module}"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    command = getattr(importlib.import_module(module), home.attribute)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert home.help == command.get_short_help_str(limit=1000)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_help_looks_as_click_makes_it(width: int) -> None:
    plain = click.Group("plain", help=cli.help)
    for name, home in COMMANDS.items():
        plain.add_command(click.Command(name, help=home.help))
    texts = []
    for group in (plain, cli):
        context = click.Context(group, info_name="x", terminal_width=width, max_content_width=width)
        formatter = context.make_formatter()
        group.format_commands(context, formatter)
        texts.append(formatter.getvalue())
    assert texts[0] == texts[1] and "train" in texts[0]


def test_a_module_that_is_missing_does_not_break_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "verify", COMMANDS["verify"]._replace(module="no_such_module"))
    context = click.Context(cli, info_name="tightrope")
    assert COMMANDS["verify"].help in cli.get_help(context)
