"""Runs `tightrope` commands in processes of their own without paying for the import each time.

Importing torch takes seconds. This script imports everything once and then, for every request
on its standard input, forks a child that becomes the command: its own process, descriptors,
working directory and exit code. `commands.py` is its other end.

A request is one line of JSON: `arguments`, `cwd`, and optionally `file_limit` (RLIMIT_FSIZE in
bytes), `kill_at` (SIGKILL before the n-th change of a file below `cwd`) and `events` (a file to
list those changes in). The answers are two lines: the child's process id, then `code` (negative
for a signal), `out` and `err` as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import tightrope
from tightrope.cli import main
from tightrope.data.mnist import load_mnist


def watch_files(folder: str, kill_at: int | None, events: str | None) -> None:
    """Count what the process is about to do to files in `folder`; die before one of them."""
    seen: list[str] = []
    log = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if events else None

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, _ = details
            changes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        else:
            path = details[0] if details else None
            changes = event in ("os.rename", "os.remove", "os.truncate", "os.mkdir")
        if not changes or not isinstance(path, str | os.PathLike):
            return
        if not os.path.realpath(path).startswith(folder):
            return
        exists = os.path.lexists(path)
        if (event == "os.remove" and not exists) or (event == "os.mkdir" and exists):
            return  # nothing will change
        seen.append(event)
        if log is not None:
            os.write(log, f"{event} {Path(os.fspath(path)).name}\n".encode())
        if len(seen) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


class Capture:
    """A pipe that is large enough to be read when the child is gone.

    Files would not do: a limit on the size of files would hold for them, too.
    """

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 2**20)

    def read(self) -> str:
        """Return everything, in the parent."""
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as file:
            return file.read().decode()


def become_command(request: dict[str, Any], out: Capture, err: Capture) -> None:
    """Turn the forked child into the command and never return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out.writer, 1)
    os.dup2(err.writer, 2)
    os.chdir(request["cwd"])
    sys.argv = ["tightrope", *request["arguments"]]
    code = 70
    # Whoever started the tests may ignore interrupts (a background shell does).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if request.get("kill_at") or request.get("events"):
            where = os.path.realpath(request["cwd"])
            watch_files(where, request.get("kill_at"), request.get("events"))
        limit = request.get("file_limit")
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        main(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def import_everything() -> None:
    """Do once what every command would do again, and leave the memory alone afterwards."""
    torch.set_num_threads(1)
    load_mnist()
    for name in tightrope.__all__:
        getattr(tightrope, name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(["train", "--help"])
    gc.collect()
    gc.freeze()  # or each child would copy what its garbage collector looks at


def serve() -> None:
    """Answer requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    import_everything()
    answers.write("ready\n")
    for line in sys.stdin:
        out, err = Capture(), Capture()
        child = os.fork()
        if child == 0:
            become_command(json.loads(line), out, err)
        answers.write(f"{child}\n")
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        answers.write(json.dumps({"code": code, "out": out.read(), "err": err.read()}) + "\n")


if __name__ == "__main__":
    serve()
