"""Carrying out many plans, several at a time, in processes of their own.

Every file that a run writes survives a kill, so stopping means killing: at most the epoch or
sample in flight is done again the next time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from tightrope.errors import UserError
from tightrope.parallel import RayCluster, Watcher, run_in_processes, run_tasks
from tightrope.study.afar import Home, Traveller
from tightrope.study.plans import Plan
from tightrope.study.remaining import unfinished
from tightrope.study.work import Worker, carry_out_afar, log_file


class Display(Protocol):
    """What shows the progress of runs."""

    def start(self, name: str) -> None:
        """A run begins."""

    def update(self, name: str, part: str, done: int, total: int) -> None:
        """A part of a run has come this far."""

    def end(self, name: str, outcome: str) -> None:
        """A run has ended: `finished`, `reused` or the reason of its failure."""


class Silence:
    """A display that shows nothing."""

    def start(self, name: str) -> None:
        """Show nothing."""

    def update(self, name: str, part: str, done: int, total: int) -> None:
        """Show nothing."""

    def end(self, name: str, outcome: str) -> None:
        """Show nothing."""


@dataclass
class Session:
    """What came of the plans: reasons of failures, and the seconds of those that were made."""

    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def carry_out_all(
    plans: Sequence[Plan],
    folder: Path,
    *,
    jobs: int | None,
    threads: int,
    wait: bool = False,
    display: Display | None = None,
    cluster: RayCluster | None = None,
) -> Session:
    """Make all runs in `folder/runs`, `jobs` at a time, each with `threads` threads.

    Finished runs are used as they are; those that learn from others are made after these. One that
    somebody else is working on fails, or is waited for. A run that fails is noted and does not stop
    the others; logs are in `folder/logs`. However this ends, no process survives it. A cluster
    makes as many at a time as it has room for, unless `jobs` says how many.
    """
    display = display or Silence()
    todo = []
    for plan in sorted(plans, key=lambda plan: -plan.minutes):
        if unfinished(plan, folder / "runs" / plan.name):
            todo.append(plan)
        else:
            display.end(plan.name, "reused")
    watcher = _Runs(folder, display, logs=cluster is None)
    taught = [plan for plan in todo if plan.teacher is not None]
    for several in ([plan for plan in todo if plan.teacher is None], taught):
        if cluster is not None and several:
            home = Home(watcher, lambda plan: folder / "runs" / plan.name, wait)
            away = partial(Traveller, carry_out_afar)
            run_tasks(away, several, home, workers=jobs, cluster=cluster)
        elif several:
            task, workers = partial(Worker, folder, wait), min(jobs or 1, len(several))
            run_in_processes(task, several, watcher, workers=workers, threads=threads)
    return watcher.session


class _Runs(Watcher[Plan]):
    """Notes what becomes of the runs, and shows it."""

    def __init__(self, folder: Path, display: Display, *, logs: bool) -> None:
        self.folder, self.display, self.logs = folder, display, logs
        self.session = Session()
        self.began: dict[str, float] = {}

    def give(self, plan: Plan) -> Plan:
        """Note the beginning of a run; a worker that dies does not begin it anew."""
        if plan.name not in self.began:
            self.began[plan.name] = time.monotonic()
            self.display.start(plan.name)
        return plan

    def message(self, plan: Plan, message: tuple[str, int, int]) -> None:
        """Show how far a part has come."""
        self.display.update(plan.name, *message)

    def finished(self, plan: Plan, result: None) -> None:
        """Note a run that is made."""
        self._end(plan, "finished")

    def failed(self, plan: Plan, error: Exception) -> None:
        """Note the reason in one line; the other runs go on."""
        reason = " ".join(str(error).split())
        if not isinstance(error, UserError):
            # Machines of a cluster keep their logs.
            where = f" (see {log_file(self.folder, plan)})" if self.logs else ""
            reason = f"{type(error).__name__}: {reason}"[:300] + where
        elif "--force" in reason:  # `reproduce` itself overwrites nothing
            reason += f"; here: remove {self.folder / 'runs' / plan.name}"
        self.session.failures[plan.name] = reason
        self._end(plan, reason)

    def _end(self, plan: Plan, outcome: str) -> None:
        self.session.seconds[plan.name] = time.monotonic() - self.began[plan.name]
        self.display.end(plan.name, outcome)
