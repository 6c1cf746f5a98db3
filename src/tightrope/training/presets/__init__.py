"""Settings by name: TOML files in this folder."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from tightrope.errors import unknown_name
from tightrope.training.settings import flatten


def preset_names() -> list[str]:
    """Return the names of all presets, such as `paper/tiny-ibp`."""
    return sorted(_files())


def load_preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset."""
    files = _files()
    if name not in files:
        raise unknown_name("preset", name, files)
    return flatten(tomllib.loads(files[name].read_text(encoding="utf-8")))


def describe_presets() -> list[tuple[str, str]]:
    """Return name and first comment line of each preset."""
    described = []
    for name, file in sorted(_files().items()):
        first = file.read_text(encoding="utf-8").splitlines()[0]
        described.append((name, first.lstrip("# ")))
    return described


def _files() -> dict[str, Any]:
    root = resources.files(__name__)
    found = {}
    for entry in root.iterdir():
        if entry.name.endswith(".toml"):
            found[entry.name.removesuffix(".toml")] = entry
        elif entry.is_dir():
            for file in entry.iterdir():
                if file.name.endswith(".toml"):
                    found[f"{entry.name}/{file.name.removesuffix('.toml')}"] = file
    return found
