"""A command server for all behaviour tests, and one trained run to start from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SMALL, Commands


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs commands in processes that need not import torch again."""
    server = Commands(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def finished_run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained run; tests must not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    outcome = commands.run("train", "--out", folder, *SMALL)
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A trained run of the test's own."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    return folder
