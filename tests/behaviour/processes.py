"""Processes as the system sees them: who started whom, who is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def process_stat(pid: int) -> tuple[str, int, str] | None:
    """Return state, parent and starting time, or None if there is no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


def children(parent: int) -> dict[int, str]:
    """Return the processes that `parent` has started, with their starting times."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        stat = process_stat(int(path.name))
        if stat is not None and stat[1] == parent:
            found[int(path.name)] = stat[2]
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead but not buried does not."""
    stat = process_stat(pid)
    return stat is not None and stat[0] != "Z"


def wait_for(condition: Callable[[], bool], patience: float, pid: int | None = None) -> None:
    """Wait for something that is to happen while a process lives."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        assert pid is None or is_alive(pid), "it ended too early"
        time.sleep(0.005)


def wait_until_gone(processes: dict[int, str], patience: float) -> None:
    """Wait until none of these runs; whoever adopts them may take its time to bury them."""

    def gone() -> bool:
        stats = [(process_stat(pid), start) for pid, start in processes.items()]
        return all(s is None or s[0] == "Z" or s[2] != start for s, start in stats)

    wait_for(gone, patience)
