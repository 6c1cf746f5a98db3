"""The lock of a folder: one holder, who is named, and nothing stale."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tightrope.errors import UserError
from tightrope.runs import lock
from tightrope.runs.lock import FILE, Lock, Owner, locked

PATIENCE = 120.0
HOLD = """
import sys, time
from pathlib import Path
from tightrope.runs.lock import locked
with locked(Path(sys.argv[1]), "certify"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught, locked(folder, "train"):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(params=["kernel", "file alone"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's locks, and on a file system that has none."""
    if request.param == "file alone":

        def unsupported(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", unsupported)
        monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.05)
    return str(request.param)


def write_owner(folder: Path, **changes: Any) -> Owner:
    """Leave the file of some owner, without its lock."""
    owner = Owner(**{**vars(Owner.this("certify")), **changes})
    (folder / FILE).write_text(owner.to_json())
    return owner


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# --- one at a time ------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path, way: str) -> None:
    with locked(tmp_path, "train"):
        assert [path.name for path in tmp_path.iterdir()] == [FILE]
        owner = json.loads((tmp_path / FILE).read_text())
        assert (owner["command"], owner["process"]) == ("train", os.getpid())
        assert owner["host"] == platform.node()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), locked(tmp_path, "train"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_the_holder_is_named(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        message = refusal(tmp_path)
        for part in ("tightrope certify", f"process {other.pid}", platform.node(), "--wait"):
            assert part in message
        assert time.strftime("since %Y-") in message
        assert (tmp_path / FILE).exists()
    assert not refusal_or_none(tmp_path)


def refusal_or_none(folder: Path) -> str | None:
    try:
        with locked(folder, "train"):
            return None
    except UserError as error:
        return str(error)


def test_not_twice_in_one_process_either(tmp_path: Path, way: str) -> None:
    with locked(tmp_path, "certify"):
        assert f"process {os.getpid()}" in refusal(tmp_path)
        assert (tmp_path / FILE).exists()
    with locked(tmp_path, "certify"):
        pass


def test_other_folders_are_free(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with locked(tmp_path / "a", "train"), locked(tmp_path / "b", "train"):
        pass


def test_a_link_to_the_folder_has_the_same_lock(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with locked(tmp_path / "link", "certify"):
        assert "in use" in refusal(tmp_path / "real")


def test_threads_in_turn(tmp_path: Path) -> None:
    """Nobody is inside while somebody else is, however often the file is removed."""
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with locked(tmp_path, "certify", wait=True):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    crew = [threading.Thread(target=work) for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "POLL_SECONDS", 0.001)
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(PATIENCE)
    assert len(most) == 8 * 20 and max(most) == 1
    assert not list(tmp_path.iterdir())


# --- waiting --------------------------------------------------------------------------------------


def test_waiting_tells_why_and_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    with other_process(tmp_path) as other:

        def end_it(reason: str) -> None:
            told.append(reason)
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()

        with locked(tmp_path, "train", wait=end_it):
            assert len(told) == 1 and f"process {other.pid}" in told[0]
            assert json.loads((tmp_path / FILE).read_text())["process"] == os.getpid()


def test_waiting_for_one_that_is_killed(tmp_path: Path) -> None:
    with (
        other_process(tmp_path) as other,
        locked(tmp_path, "train", wait=lambda reason: other.send_signal(signal.SIGKILL)),
    ):
        assert json.loads((tmp_path / FILE).read_text())["process"] == os.getpid()
    assert not list(tmp_path.iterdir())


# --- stale ----------------------------------------------------------------------------------------


def test_a_killed_holder_leaves_only_the_file(tmp_path: Path, way: str) -> None:
    with other_process(tmp_path) as other:
        other.kill()
        other.wait()
        assert (tmp_path / FILE).exists()
        with locked(tmp_path, "train"):
            pass
    assert not list(tmp_path.iterdir())


def test_a_holder_that_is_dead_but_not_buried(tmp_path: Path, way: str) -> None:
    with other_process(tmp_path) as other:
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        with locked(tmp_path, "train"):
            pass


@pytest.mark.parametrize(
    "changes",
    [
        lambda: {"process": dead_process()},
        lambda: {"birth": "an earlier process with the number of this one"},
        lambda: {"process": 10**30},
    ],
    ids=["dead", "number used again", "absurd"],
)
def test_stale_files(tmp_path: Path, way: str, changes: Callable[[], dict[str, Any]]) -> None:
    assert write_owner(tmp_path, **changes()).gone
    with locked(tmp_path, "train"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"process": 1}', b"9" * 5000])
def test_files_that_tell_nothing(tmp_path: Path, way: str, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with locked(tmp_path, "train"):
        pass
    assert not list(tmp_path.iterdir())


def test_without_locks_a_living_owner_counts(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel keeps the lock, the file alone means nothing."""
    write_owner(tmp_path)
    if way == "kernel":
        assert refusal_or_none(tmp_path) is None
        return
    assert f"remove {tmp_path / FILE}" in refusal(tmp_path)
    write_owner(tmp_path, host="another machine", process=dead_process())
    message = refusal(tmp_path)
    assert "another machine" in message and f"remove {tmp_path / FILE}" in message
    (tmp_path / FILE).unlink()
    assert refusal_or_none(tmp_path) is None


def test_what_the_file_says_is_printed_without_harm(tmp_path: Path) -> None:
    owner = write_owner(tmp_path, command="\x1b[31m\n" + 500 * "x", host="\x07")
    assert str(owner).isprintable() and "\n" not in str(owner) and len(str(owner)) < 200


def test_workers_of_a_killed_holder_are_waited_for(tmp_path: Path) -> None:
    """Its children have part in the lock, so that it ends with the last of them."""
    script = (
        "import sys, os, multiprocessing\n"
        "from pathlib import Path\n"
        "from tightrope.runs.lock import locked\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import test_runs_lock\n"
        "with locked(Path(sys.argv[1]), 'certify') as held:\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    here, there = context.Pipe()\n"
        "    child = context.Process(target=test_runs_lock.stay, args=(there, held))\n"
        "    child.start()\n"
        "    here.recv()\n"
        "    print(child.pid, flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()  # its pipes stay open: the worker has them, too
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "GRACE_SECONDS", 0.0)
        assert f"process {process.pid}" in refusal(tmp_path)
        patch.setattr(lock, "GRACE_SECONDS", PATIENCE)
        sleep = time.sleep

        def kill_worker(seconds: float) -> None:
            told.append("waiting")
            if len(told) == 1:
                os.kill(worker, signal.SIGKILL)
            sleep(seconds)

        patch.setattr(time, "sleep", kill_worker)
        with locked(tmp_path, "train"):
            assert told
    process.communicate()


def stay(pipe: Any, held: Lock) -> None:
    """Be a worker that does not notice the end of its parent."""
    assert held.descriptor is not None
    pipe.send("here")
    time.sleep(PATIENCE)


def test_a_lock_without_the_kernel_can_be_given_away_too() -> None:
    context = multiprocessing.get_context("spawn")
    assert context.reducer.ForkingPickler.dumps(Lock(None))


# --- lock files that are something else ---------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_the_lock(tmp_path: Path, way: str, exists: bool) -> None:
    target = tmp_path / "precious"
    if exists:
        target.write_text("the work of weeks")
    (tmp_path / FILE).symlink_to(target)
    assert f"{FILE} is a link" in refusal(tmp_path)
    assert target.exists() == exists
    assert not exists or target.read_text() == "the work of weeks"


def test_a_hard_link_in_place_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("the work of weeks")
    (tmp_path / FILE).hardlink_to(tmp_path / "precious")
    assert "hard links" in refusal(tmp_path)
    assert (tmp_path / "precious").read_text() == "the work of weeks"


def test_a_pipe_in_place_of_the_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    assert "pipe" in refusal(tmp_path)


def test_a_lock_that_is_removed_or_replaced_meanwhile(tmp_path: Path) -> None:
    """Whose file it is then is not ours to remove."""
    with locked(tmp_path, "train"):
        (tmp_path / FILE).unlink()
    with locked(tmp_path, "train"):
        (tmp_path / FILE).unlink()
        (tmp_path / FILE).write_text("of somebody else")
    assert (tmp_path / FILE).read_text() == "of somebody else"


def test_a_full_disk_locks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(lock, "GRACE_SECONDS", 0.0)
    with locked(tmp_path, "train"):
        assert "in use by another process" in refusal(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened = os.open

    def closed(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", closed)
    message = refusal(tmp_path)
    assert f"{tmp_path} cannot be written to" in message and os.strerror(number) in message


def test_the_lock_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be read only: enough to see whether it is held."""
    opened = os.open

    def readable(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_RDWR | os.O_CREAT) and str(path) == FILE:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *rest, **options)

    with other_process(tmp_path) as other:
        monkeypatch.setattr(os, "open", readable)
        assert f"process {other.pid}" in refusal(tmp_path)
        other.kill()
        other.wait()
        with locked(tmp_path, "train"):
            pass
