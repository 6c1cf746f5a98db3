"""Compiled loops are kept, but only those of the present sources."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tightrope.attacks.kernels import compiling
from tightrope.attacks.kernels.compiling import discard_stale


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources with something compiled."""
    for name in ("a_kernel.py", "windows.py", "other.py"):
        (tmp_path / name).touch()
    discard_stale(tmp_path)
    for name in ("a.nbi", "a.1.nbc", "a.pyc"):
        (tmp_path / "__pycache__" / name).touch()
    return tmp_path


def kept(folder: Path) -> set[str]:
    return {p.name for p in (folder / "__pycache__").iterdir()} - {"compiled.txt"}


def test_compiled_code_of_the_same_sources_stays(folder: Path) -> None:
    discard_stale(folder)
    os.utime(folder / "other.py", (1, 1))
    discard_stale(folder)
    assert kept(folder) == {"a.nbi", "a.1.nbc", "a.pyc"}


@pytest.mark.parametrize("name", ["a_kernel.py", "windows.py", "new_kernel.py"])
def test_it_goes_when_any_source_is_new(folder: Path, name: str) -> None:
    (folder / name).touch()
    os.utime(folder / name, (1, 1))
    discard_stale(folder)
    assert kept(folder) == {"a.pyc"}


def test_code_of_an_unknown_version_goes(folder: Path) -> None:
    (folder / "__pycache__" / "compiled.txt").unlink()
    discard_stale(folder)
    assert kept(folder) == {"a.pyc"}


def test_folders_that_cannot_be_written_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(folder / "a_kernel.py", (1, 1))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(compiling, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    discard_stale(folder)
    assert kept(folder) == {"a.nbi", "a.1.nbc", "a.pyc"}


def test_every_kernel_is_a_source() -> None:
    home = Path(compiling.__file__).parent
    found = {p.name for p in home.glob("*.py") if "\n@compiled\n" in p.read_text("utf-8")}
    assert len(found) > 3 and all(name.endswith("_kernel.py") for name in found)
