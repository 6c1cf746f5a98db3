"""A network of its own with nothing but loopback, for tests that start servers.

As a script, it brings up `lo` in the namespace that it was started in and becomes the command of
its arguments.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "TEST_FAMILY_MARK"
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def why_not() -> str | None:
    """Return why there cannot be such a network, None if there can."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return "needs Linux and `unshare` for a network of its own"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return None if done.returncode == 0 else "needs to be root: `unshare --net` is not permitted"


@contextmanager
def started(*command: str | Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a network of its own; whatever it left running ends afterwards."""
    mark = uuid.uuid4().hex
    # Ray looks there for clusters that it knows; a short path, for sockets have names in it.
    rooms = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    variables = {"RAY_TMPDIR": rooms.name, **variables}
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", MARK: mark, **variables}
    process = subprocess.Popen(
        ["unshare", "--net", sys.executable, __file__, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.mark = mark  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in family(mark):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        rooms.cleanup()


def family(mark: str) -> list[int]:
    """Return all processes that descend from a marked one and run."""
    found, text = [], f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if text in (path / "environ").read_bytes() and state != "Z":
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _up() -> None:
    with socket.socket() as one:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack("16sh", fcntl.ioctl(one, _GET_FLAGS, struct.pack("16sh", name, 0)))[1]
        fcntl.ioctl(one, _SET_FLAGS, struct.pack("16sh", name, flags | _UP))


if __name__ == "__main__":
    _up()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
