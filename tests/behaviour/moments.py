"""Signals at chosen moments, sent by the process under test itself.

A test that sends a signal when it sees something happen depends on how fast the machine is: the
process may be over before the test looks again. So the process counts what it does, and sends
the signal itself. `install` is for the process that calls it; by `in_environment` it comes about
in a process to be started, or in one that this process starts (`startup/sitecustomize.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from processes import children

VARIABLE = "SIGNAL_AT_A_MOMENT"
# Where events say relative to which folder their first path is.
RELATIVE_TO = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2}
Event = Callable[[str, tuple[Any, ...]], bool]


@dataclass(frozen=True)
class Moment:
    """When to send which signal to whom.

    `event` is "change" (of a file in `folder`), "record" (received from a worker) or "import" and
    the name of a module; the signal is sent just before the `count`-th of them, or `calls` calls
    of Python functions later. The process that counts is the one whose command line contains
    `where`. It signals to "self", to the `parent` ("parent"), to its process group ("group"), to
    one "worker" of its own or to a "sibling" (another child of whoever started it), and then waits
    for its end if `wait` is set. Just before, the children of the parent, or its own, are noted in
    a file.
    """

    event: str
    count: int = 1
    how: int = signal.SIGKILL
    to: str = "self"
    calls: int = 0
    folder: str = ""
    where: str = ""
    wait: bool = False
    noted: str = ""
    parent: int = 0

    def in_environment(self) -> dict[str, str]:
        """Return the variable that tells a process of it."""
        return {VARIABLE: json.dumps(asdict(self))}

    def family(self) -> dict[int, str]:
        """Return the processes that were noted, with their starting times."""
        noted = json.loads(Path(self.noted).read_text())
        return {int(pid): start for pid, start in noted.items()}


def install_from_environment() -> None:
    """Watch out for the moment if this is the process that was meant."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        moment = Moment(**json.loads(text))
        if moment.where in " ".join(sys.orig_argv):
            install(moment)


def install(moment: Moment) -> None:
    """Watch out for the moment in this process."""
    happens = _event(moment)
    seen = 0

    def hook(event: str, details: tuple[Any, ...]) -> None:
        nonlocal seen
        if seen < moment.count and happens(event, details):
            seen += 1
            if seen == moment.count:
                _after_calls(moment) if moment.calls else _act(moment)

    sys.addaudithook(hook)


def _after_calls(moment: Moment) -> None:
    left = moment.calls

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        left -= event == "call"
        if left == 0:
            sys.setprofile(None)
            _act(moment)

    sys.setprofile(count)


def _act(moment: Moment) -> None:
    if moment.to == "parent" and os.getppid() != moment.parent:
        return  # somebody else was quicker, and this process has been adopted
    if moment.noted:
        relatives = children(moment.parent if moment.to == "parent" else os.getpid())
        mine = Path(f"{moment.noted}.{os.getpid()}")
        mine.write_text(json.dumps(relatives))
        with contextlib.suppress(FileExistsError):  # the first to note saw all of them alive
            Path(moment.noted).hardlink_to(mine)
    if moment.to == "group":
        os.killpg(0, moment.how)
    else:
        os.kill(_receiver(moment), moment.how)
    while moment.wait:
        signal.pause()


def _receiver(moment: Moment) -> int:
    if moment.to == "worker":
        from multiprocessing import active_children

        return min(process.pid for process in active_children() if process.pid is not None)
    if moment.to == "sibling":
        return min(children(os.getppid()).keys() - {os.getpid()})
    return moment.parent if moment.to == "parent" else os.getpid()


def _event(moment: Moment) -> Event:
    if moment.event == "change":
        described = changes(moment.folder)
        return lambda event, details: described(event, details) is not None
    if moment.event == "record":
        record = ("tightrope.runs.journal", "Record")
        return lambda event, details: event == "pickle.find_class" and details == record
    kind, module = moment.event.split()
    assert kind == "import"
    return lambda event, details: event == "import" and details[0] == module


def changes(folder: str) -> Callable[[str, tuple[Any, ...]], str | None]:
    """Return what describes audit events that are about to change a file below `folder`."""

    def description(event: str, details: tuple[Any, ...]) -> str | None:
        path = details[0] if details else None
        if not isinstance(path, str | os.PathLike):
            return None
        if event == "open":
            _, mode, flags = details
            changing = any(letter in mode for letter in "wax+") if mode else flags & os.O_CREAT
        else:
            changing = event in ("os.rename", "os.remove", "os.truncate", "os.mkdir")
        # Names may be relative to an open folder; `open` alone does not tell to which one.
        place = details[RELATIVE_TO[event]] if event in RELATIVE_TO else -1
        if place >= 0:
            path = Path(f"/proc/self/fd/{place}").readlink() / path
        if not changing or not os.path.realpath(path).startswith(folder):
            return None
        exists = os.path.lexists(path)
        if (event == "os.remove" and not exists) or (event == "os.mkdir" and exists):
            return None  # nothing will change
        return f"{event} {Path(os.fspath(path)).name}"

    return description


def log_changes(folder: str, log: str) -> None:
    """List the changes of files below `folder` in a file."""
    described = changes(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, details: tuple[Any, ...]) -> None:
        text = described(event, details)
        if text is not None:
            os.write(file, f"{text}\n".encode())

    sys.addaudithook(hook)
