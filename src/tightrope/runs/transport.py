"""Run folders on their way between machines: the files of one, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath

from tightrope.errors import UserError
from tightrope.files import write_bytes
from tightrope.limits import CHECKPOINT_BYTES
from tightrope.reading import read_bytes
from tightrope.runs.folder import Run

Files = dict[str, bytes]


def pack(run: Run) -> Files:
    """Return the files of a run folder; without links, locks and what a kill left half-written."""
    if not run.folder.is_dir():
        return {}
    found: Files = {}
    for path in sorted(run.folder.rglob("*")):
        inside = path.relative_to(run.folder)
        linked = any((run.folder / part).is_symlink() for part in (inside, *inside.parents[:-1]))
        if not linked and path.is_file() and not inside.name.startswith("."):
            found[inside.as_posix()] = read_bytes(path, CHECKPOINT_BYTES)
    return found


def unpack(run: Run, files: Mapping[str, bytes]) -> None:
    """Write the files of a run, in an order in which a kill leaves what a command can go on from.

    A certification counts from the moment that its journal is there: that comes last.
    """
    first = [run.config.name, run.checkpoint.name, run.history_file.name]
    last = [run.certification.name, run.journal.name]

    def order(name: str) -> tuple[int, str]:
        place = first.index(name) - len(first) if name in first else 0
        return (1 + last.index(name), name) if name in last else (place, name)

    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or len(path.parts) > 3:
            raise UserError(f"a machine sent a file with the name {name!r}, which is none of a run")
    for name in sorted(files, key=order):
        target = run.folder / name
        write_bytes(target, files[name], own_folder=target.parent != run.folder)


def digest(files: Mapping[str, bytes]) -> str:
    """Return a hash of files and their names."""
    content = hashlib.sha256()
    for name in sorted(files):
        content.update(f"{name}\n{len(files[name])}\n".encode())
        content.update(files[name])
    return content.hexdigest()
