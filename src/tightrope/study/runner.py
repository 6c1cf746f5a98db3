"""Carrying out many plans, several at a time, each in a process of its own.

Every file that a run writes survives a kill, so stopping means killing: at most the epoch or
sample in flight is done again the next time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tightrope.files import open_to_append
from tightrope.study.plans import Plan
from tightrope.study.remaining import unfinished
from tightrope.waiting import sleeping_threads


class Display(Protocol):
    """What shows the progress of runs; called from several threads."""

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
    jobs: int,
    threads: int,
    wait: bool = False,
    display: Display | None = None,
    command: Callable[[], list[str]] = lambda: [sys.executable, "-m", "tightrope.study.work"],
) -> Session:
    """Make all runs in `folder/runs`, `jobs` at a time, each with `threads` threads.

    Finished runs are used as they are. One that somebody else is working on fails, or is waited
    for. A run that fails is noted and does not stop the others;
    logs are in `folder/logs`. However this ends, no process survives it.
    """
    display = display or Silence()
    session, crew = Session(), _Crew(folder, threads, wait, display, command)
    todo = []
    for plan in sorted(plans, key=lambda plan: -plan.minutes):
        if unfinished(plan, folder / "runs" / plan.name):
            todo.append(plan)
        else:
            display.end(plan.name, "reused")
    if not todo:
        return session
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(crew.run, plan): plan for plan in todo}
        try:
            _collect(futures, session, display)
        except BaseException:
            crew.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return session


def _collect(
    futures: dict[Future[tuple[str, float]], Plan], session: Session, display: Display
) -> None:
    waiting = set(futures)
    while waiting:
        # With a limit, since a wait without one cannot be interrupted everywhere.
        done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            name = futures[future].name
            reason, session.seconds[name] = future.result()
            if reason:
                session.failures[name] = reason
            display.end(name, reason or "finished")


class _Crew:
    """The processes that are at work."""

    def __init__(
        self,
        folder: Path,
        threads: int,
        wait: bool,
        display: Display,
        command: Callable[[], list[str]],
    ) -> None:
        self.folder, self.threads, self.wait, self.display = folder, threads, wait, display
        self.command = command
        self.lock = threading.Lock()
        self.alive: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def run(self, plan: Plan) -> tuple[str, float]:
        """Carry out one plan; return the reason of its failure, if any, and the seconds."""
        began = time.monotonic()
        log = self.folder / "logs" / f"{plan.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        request = {
            "plan": plan.to_json(),
            "folder": str(self.folder / "runs" / plan.name),
            "threads": self.threads,
            "wait": self.wait,
        }
        with open_to_append(log, own_folder=True) as errors:
            process = self._start(errors)
            if process is None:
                return "stopped", 0.0
            try:
                reason = self._follow(process, plan.name, request)
            finally:
                self._end(process)
        if reason and "Error:" in reason:
            reason += f" (see {log})"
        return reason, time.monotonic() - began

    def stop(self) -> None:
        """Kill all processes and start no more."""
        with self.lock:
            self.stopped = True
            for process in self.alive:
                process.kill()

    def _start(self, errors: Any) -> subprocess.Popen[str] | None:
        environment = {**sleeping_threads(os.environ), "OMP_NUM_THREADS": str(self.threads)}
        with self.lock:
            if self.stopped:
                return None
            process = subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                # A terminal sends Ctrl-C to the whole group; only this process shall react.
                start_new_session=True,
            )
            self.alive.add(process)
            return process

    def _follow(self, process: subprocess.Popen[str], name: str, request: dict[str, Any]) -> str:
        assert process.stdin is not None and process.stdout is not None
        self.display.start(name)
        reason = ""
        with suppress(OSError):  # if it died at once, its exit code tells
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            message = _message(line)
            if "error" in message:
                reason = str(message["error"])
            elif "part" in message:
                self.display.update(name, message["part"], message["done"], message["total"])
        code = process.wait()
        if code < 0:
            return f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
        return reason or (f"its process ended with exit code {code}" if code else "")

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was still to be written to a dead process
                    pipe.close()
        with self.lock:
            self.alive.discard(process)


def _message(line: str) -> dict[str, Any]:
    """Read a line of a worker; libraries may print others."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
