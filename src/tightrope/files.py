"""Writing files so that a kill at any moment leaves either the old content or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightrope.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary sibling of `path`, flush it to disk, then rename it.

    The sibling is removed when anything fails (a full disk, an interrupt), so nothing
    half-written is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of `write_atomically` whose process was killed."""
    for path in folder.glob(".*.tmp"):
        process = path.name.split(".")[-2]
        if process.isdigit() and not _alive(int(process)):
            path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists but is somebody else's
        return True
    return process != os.getpid()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Read JSON from `path`; `what` names the file's role in the error message."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing ({what})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: not valid JSON ({what}; {error})") from None
