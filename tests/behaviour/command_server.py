"""Runs `tightrope` commands in processes of their own without paying for the import each time.

Importing torch takes seconds. This script imports everything once and then, for every request
on its standard input, forks a child that becomes the command: its own process, descriptors,
working directory and exit code. `commands.py` is its other end.

A request is one line of JSON: `arguments`, `stdout`, `stderr` (files), `cwd`, and optionally
`file_limit` (RLIMIT_FSIZE in bytes), `kill_at` (SIGKILL before the n-th change of a file) and
`events` (a file to list those changes in). The answers are two lines: the child's process id,
then its exit code, negative for a signal.
"""

from __future__ import annotations

import contextlib
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


def become_command(request: dict[str, Any]) -> None:
    """Turn the forked child into the command and never return."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.update(request.get("environment") or {})
    sys.argv = ["tightrope", *request["arguments"]]
    code = 70
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


def serve() -> None:
    """Answer requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    torch.set_num_threads(1)
    load_mnist()
    answers.write("ready\n")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become_command(json.loads(line))
        answers.write(f"{child}\n")
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    serve()
