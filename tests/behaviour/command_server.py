"""Runs `tightrope` commands in processes of their own without paying for the import each time.

Importing torch takes seconds. This script imports everything once and then, for every request
on its standard input, forks a child that becomes the command: its own process, descriptors,
working directory and exit code. `commands.py` is its other end. The script's arguments are those
of a short training, to rehearse with.

A request is one line of JSON: `arguments`, `cwd`, and optionally `file_limit` (RLIMIT_FSIZE in
bytes), `memory` (in megabytes, beyond what the server has), `variables` of the environment,
`kill_at` (SIGKILL before the n-th change of a file below `cwd`) and `events` (a file to list those
changes in). The answers are two lines: the child's process id, then `code` (negative for a
signal), `out` and `err` as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from moments import Moment, install, log_changes

import tightrope
from tightrope.cli import main
from tightrope.data.mnist import load_mnist


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
            return file.read().decode("utf-8", "backslashreplace")


def expect(moment: Moment) -> None:
    """Send a signal at some moment of this process, or let one that it starts do so."""
    if moment.where:
        os.environ.update(replace(moment, parent=os.getpid()).in_environment())
    else:
        install(moment)


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
        if request.get("events"):
            log_changes(os.path.realpath(request["cwd"]), request["events"])
        if request.get("moment"):
            expect(Moment(**request["moment"]))
        limit = request.get("file_limit")
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        os.environ.update(request["variables"])
        if request.get("memory") is not None:
            limit_memory(request["memory"])
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


def limit_memory(megabytes: int) -> None:
    """Let this process take no more than that much memory beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def import_everything(settings: Sequence[str]) -> None:
    """Do once what every command would do again, and leave the memory alone afterwards."""
    torch.set_num_threads(1)
    load_mnist()
    for name in tightrope.__all__:
        getattr(tightrope, name)
    for name in ("matplotlib.pyplot", "onnx", "onnxruntime", "onnxscript"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        rehearse(Path(folder) / "run", settings)
    assert threading.active_count() == 1, "a thread would not survive the fork"
    gc.collect()
    gc.freeze()  # or each child would copy what its garbage collector looks at


def rehearse(run: Path, settings: Sequence[str]) -> None:
    """Run some commands here: what they compile or load in passing is then there for all."""
    train = ("train", "--out", run, *settings, "--set", "train_samples=128")
    certify = ("certify", run, "--samples", "8", "--eps", "0.05", "--steps", "4", "--restarts", "1")
    for command in (train, certify, ("estimate", run, "--samples", "4"), ("report", run)):
        # Whether they work is for the tests to say.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main([str(argument) for argument in command])


def serve(settings: Sequence[str]) -> None:
    """Answer requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    import_everything(settings)
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
    serve(sys.argv[1:])
