"""The commands that repeat a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tightrope.reading import MADE_WITH, flatten
from tightrope.runs.config import train_arguments, write

CERTIFY = (
    *("eps", "norm", "start", "samples", "stages", "timeout", "steps", "restarts", "seed"),
    *("domain", "split", "branching", "cuts"),
)


def repeat_commands(
    settings: Mapping[str, Any] | None, folder: Path, certification: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the commands that train and certify such a run; those that are known."""
    commands = []
    if settings is not None:
        commands.append(train_command(settings, folder))
    if all(name in certification for name in ("eps", "samples")):
        commands.append(certify_command(certification, folder))
    return tuple(commands)


def train_command(table: Mapping[str, Any], folder: Path) -> str:
    """Return the `tightrope train` that `config.toml` remembers, else one with all its settings."""
    made_with = table.get(MADE_WITH)
    try:
        words = shlex.split(str(made_with["command"])) if isinstance(made_with, Mapping) else []
    except (KeyError, ValueError):
        words = []
    # Each word is quoted anew: whatever the file says, it is one command, and ours.
    if words[:2] != ["tightrope", "train"]:
        words = train_arguments(flatten(table))
    return _wrap(["tightrope", "train", "--out", str(folder), *words[2:]])


def certify_command(settings: Mapping[str, Any], folder: Path) -> str:
    """Return `tightrope certify` with the settings of a certification."""
    given = {**settings}
    radii = settings.get("ranges")
    if isinstance(radii, Mapping):  # as one command: all radii, and all samples up to the last
        given["eps"] = [str(eps) for eps in radii]
    options = ((f"--{name}", write(given[name])) for name in CERTIFY if name in given)
    words = [word for pair in options for word in pair]
    if settings.get("network"):
        files = ["--data", str(settings.get("data")), "--out", str(folder)]
        return _wrap(["tightrope", "certify", str(settings["network"]), *files, *words])
    return _wrap(["tightrope", "certify", str(folder), *words])


def _wrap(words: Iterable[str], width: int = 88) -> str:
    """Break a command before options, into lines that a shell takes as one."""
    lines: list[str] = []
    parts: list[str] = []
    for word in words:
        if parts and not word.startswith("--"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    for part in parts:
        if lines and len(lines[-1]) + len(part) < width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return " \\\n".join(lines)
