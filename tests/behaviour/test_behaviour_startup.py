"""Help comes at once: commands are imported when they are called, and not before."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import click
import pytest

from tightrope.cli.main import COMMANDS, cli


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from tightrope.cli.main import _run\n"
        "assert _run(['--help']) == 0 and _run([]) == 0 and _run(['--version']) == 0\n"
        "assert _run(['trian']) == 2\n"
        "heavy = {'torch', 'numpy', 'rich', 'onnx', 'tightrope.runs'}\n"
        "sys.exit(3 if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "tightrope: unknown command 'trian'; did you mean 'train'?\n"
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


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
