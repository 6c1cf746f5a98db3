"""The commands that repeat a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightrope.training.objectives import method_options, section
from tightrope.training.settings import Settings, describe_settings, flatten

# Settings that have an option of their own.
OPTIONS = ("data", "data_dir", "net", "method", "eps", "epochs", "seed", "device")
ALWAYS = ("data", "net", "method", "eps", "epochs", "seed")
CERTIFY = ("eps", "start", "samples", "stages", "timeout", "steps", "restarts", "seed")


def repeat_commands(
    settings: Settings | None, folder: Path, certification: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the commands that train and certify such a run; those that are known."""
    commands = []
    if settings is not None:
        commands.append(train_command(settings, folder))
    if all(name in certification for name in ("eps", "samples")):
        commands.append(certify_command(certification, folder))
    return tuple(commands)


def train_command(settings: Settings, folder: Path) -> str:
    """Return `tightrope train` with every setting that is not the default."""
    table = flatten(settings.to_table())
    defaults = {name: default for name, default, _ in describe_settings()}
    own = section(settings.method)
    for name, option in method_options(settings.method).items():
        defaults[f"{own}.{name}"] = option.default
    parts = ["tightrope train", f"--out {shlex.quote(str(folder))}"]
    for name in OPTIONS:
        if name in table and (name in ALWAYS or _differs(table[name], defaults[name])):
            parts.append(f"--{name.replace('_', '-')} {shlex.quote(_write(table[name]))}")
    for name, value in table.items():
        if name not in OPTIONS and _differs(value, defaults[name]):
            parts.append(f"--set {shlex.quote(f'{name}={_write(value)}')}")
    return _wrap(parts)


def certify_command(settings: Mapping[str, Any], folder: Path) -> str:
    """Return `tightrope certify` with the settings of a certification."""
    parts = [f"tightrope certify {shlex.quote(str(folder))}"]
    for name in CERTIFY:
        if name in settings:
            parts.append(f"--{name} {shlex.quote(_write(settings[name]))}")
    return _wrap(parts)


def _differs(value: Any, default: Any) -> bool:
    return bool(_write(value) != _write(default))


def _write(value: Any) -> str:
    """Return a value as the command line takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(_write, value)) or "[]"
    return str(value)


def _wrap(parts: list[str], width: int = 88) -> str:
    """Break a command into lines that a shell takes as one."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return " \\\n".join(lines)
