"""Running the `tightrope` command from tests, and looking at what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hangs import PATIENCE
from moments import Moment

SCRIPT = Path(sys.executable).with_name("tightrope")
SERVER = Path(__file__).with_name("command_server.py")
STARTUP = Path(__file__).with_name("startup")

# A network that trains in half a second and has samples of every verdict.
SMALL = (
    *("--net", "mlp", "--method", "ibp", "--eps", "0.01", "--epochs", "4"),
    *("--set", "width=8", "--set", "depth=1", "--set", "batch_norm=false"),
    *("--set", "train_samples=1024", "--set", "validation=64", "--set", "batch_size=64"),
    *("--set", "learning_rate=0.01", "--set", "annealing_epochs=1"),
)


def environment(moment: Moment | None = None) -> dict[str, str]:
    """Return the environment of every command: one thread, no terminal.

    At the moment, if there is one, the script itself or a process of its own sends a signal.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("COLUMNS", "TIGHTROPE"))}
    paths = [str(STARTUP), *filter(None, [kept.get("PYTHONPATH")])]
    told = moment.in_environment() if moment else {}
    ours = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, **ours, **told}


@dataclass(frozen=True)
class Outcome:
    """How a command ended; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The standard output, which must be JSON and nothing else."""
        return json.loads(self.out)


def run_script(*arguments: str | Path, cwd: Path | None = None) -> Outcome:
    """Run the installed command in a fresh process, as a person would."""
    done = subprocess.run(
        [SCRIPT, *arguments],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


class Running:
    """A command that the server started."""

    def __init__(self, commands: Commands, pid: int) -> None:
        self.commands, self.pid = commands, pid
        self._outcome: Outcome | None = None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; the command may be gone already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, how)

    def wait(self, timeout: float = PATIENCE) -> Outcome | None:
        """Return the outcome, or None if the command still runs after `timeout` seconds."""
        if self._outcome is None:
            line = self.commands.read_line(timeout)
            if line is None:
                return None
            self._outcome = Outcome(**json.loads(line))
        return self._outcome


class Commands:
    """Runs commands, one at a time, in forked children of `command_server.py`."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.server = subprocess.Popen(
            [sys.executable, SERVER, *SMALL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            bufsize=0,
        )
        self._pending = b""
        assert self.read_line(PATIENCE) == "ready"

    def start(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        file_limit: int | None = None,
        memory: int | None = None,
        variables: dict[str, str] | None = None,
        kill_at: int | None = None,
        moment: Moment | None = None,
        events: Path | None = None,
    ) -> Running:
        """Start a command; file changes are counted in `cwd` and below.

        It is killed before the change `kill_at`, or sends a signal at some other moment.
        """
        where = os.path.realpath(cwd or self.scratch)
        if kill_at is not None:
            moment = Moment("change", kill_at)
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": where,
            "file_limit": file_limit,
            "moment": None if moment is None else asdict(replace(moment, folder=where)),
            "memory": memory,
            "variables": variables or {},
            "events": None if events is None else str(events),
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        line = self.read_line(PATIENCE)
        assert line is not None
        return Running(self, int(line))

    def run(self, *arguments: str | Path, timeout: float = PATIENCE, **options: Any) -> Outcome:
        """Run a command to its end; one that takes longer than `timeout` fails the test."""
        running = self.start(*arguments, **options)
        outcome = running.wait(timeout)
        if outcome is None:
            running.kill()
            outcome = running.wait()
            # It may have ended at the last moment, or while this process was stopped.
            if outcome is None or outcome.code == -signal.SIGKILL:
                raise AssertionError(f"still running after {timeout} s: {arguments}")
        return outcome

    def read_line(self, timeout: float) -> str | None:
        """Return the server's next line, or None if there is none in time."""
        assert self.server.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.server.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = self.server.stdout.read(4096)
                assert chunk, "the command server died"
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """End the server."""
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(PATIENCE)
        self.server.stdout.close()


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return every file below `folder` with its content, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Check that nothing below `folder` is made, removed or written meanwhile."""
    before = snapshot(folder)
    yield
    after = snapshot(folder)
    assert sorted(after) == sorted(before)
    assert after == before


def assert_refused(outcome: Outcome, *fragments: str) -> None:
    """Check for bad input's one line, exit code 2 and nothing else."""
    assert "Traceback" not in outcome.err, outcome.err[-2000:]
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("tightrope: "), outcome.err
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), outcome.err
    for fragment in fragments:
        assert fragment in outcome.err, outcome.err
    assert not outcome.out.strip(), outcome.out


def temporary_files(folder: Path) -> list[str]:
    """Return what looks like a left-over of an interrupted write."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return [name for name in names if ".tmp" in name or Path(name).name.startswith(".")]


def json_lines(path: Path, *, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the lines of a `.jsonl` file without the fields that hold times."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in without} for record in records]
