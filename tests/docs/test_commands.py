"""Commands and snippets on the pages are ones that exist."""

from __future__ import annotations

import ast
import os
import shlex
from unittest import mock

import click
import pytest
from pages import PAGES, ROOT, blocks

from tightrope.cli.main import cli


def commands(page: str) -> list[list[str]]:
    """Return the words of each command in the shell blocks of a page."""
    found = []
    for text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:
                del words[0]  # an environment variable for the command
            if words:
                found.append(words)
    return found


ALL = [(page, words) for page in PAGES for words in commands(page)]
SHARED = [words[words.index("tightrope") :] for _, words in ALL if words[0] == "torchrun"]
OWN = [words for _, words in ALL if words[0] == "tightrope"] + SHARED
SCRIPTS = [words for _, words in ALL if words[0] in ("python", "sh")]


def test_there_are_commands() -> None:
    assert len(OWN) > 20 and len(SCRIPTS) > 5
    assert all(words[1] == "train" for words in SHARED) and len(SHARED) == 3
    known = {"tightrope", "python", "sh", "pip", "make", "cp", "mkdir", "sbatch", "torchrun"}
    assert {words[0] for _, words in ALL} <= known


@pytest.mark.parametrize("words", OWN, ids=" ".join)
def test_a_command_is_understood(words: list[str]) -> None:
    command, rest = cli, words[1:]
    if rest == ["--version"]:
        return
    context = click.Context(cli, info_name="tightrope")
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None and name is not None
        command, context = found, click.Context(found, parent=context, info_name=name)
    # Parses options and arguments, and does not run anything.
    assert command.make_context(words[1], rest).params


@pytest.mark.parametrize("words", SCRIPTS, ids=" ".join)
def test_a_script_is_there(words: list[str]) -> None:
    assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_python_snippets_run(page: str) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
        with mock.patch.dict(os.environ):  # what a snippet sets is for that page alone
            exec(compile(text, page, "exec"), {"__name__": "snippet"})
