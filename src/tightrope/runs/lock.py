"""One command at a time in a folder.

The lock is the kernel's (`flock`) on a file that tells who holds it. It ends with the processes
that hold it, however they end: what a killed command leaves behind is only the file, and the next
one takes it over.

On file systems without locks the file alone has to do: a command stops if its owner is alive, or
on another machine, where nobody can tell. There, two commands that start within the same moment
may both go on.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from tightrope.errors import UserError
from tightrope.files import Folder, write_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = ".tightrope.lock"
POLL_SECONDS = 0.2
# How long the workers of a killed command may take to notice.
GRACE_SECONDS = 10.0
# Without locks: after this time a rival's claim has reached the disk.
SETTLE_SECONDS = 0.2
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

# Whether to queue; a function is told why.
Wait = bool | Callable[[str], object]


@dataclass(frozen=True)
class Owner:
    """Who holds a lock; `birth` tells a process from a later one with the same number."""

    command: str
    process: int
    host: str
    since: str
    birth: str | None
    token: str  # tells the threads of a process from each other

    @classmethod
    def this(cls, command: str) -> Owner:
        """Return this process as the owner."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        process, host = os.getpid(), platform.node()
        return cls(command, process, host, now, _birth(process), secrets.token_hex(8))

    @classmethod
    def parse(cls, content: bytes) -> Owner | None:
        """Return the owner that a lock file tells of, None if it tells nothing."""
        try:
            owner = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds = (owner.command, str), (owner.process, int), (owner.host, str), (owner.since, str)
        return owner if all(type(value) is kind for value, kind in kinds) else None

    def to_json(self) -> str:
        """Return the content of a lock file."""
        return json.dumps(asdict(self)) + "\n"

    @property
    def gone(self) -> bool:
        """Whether the process is known to have ended."""
        if self.host != platform.node():
            return False
        try:
            os.kill(self.process, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:  # it exists but is somebody else's
            pass
        return self.birth is not None and _birth(self.process) not in (None, self.birth)

    def __str__(self) -> str:
        # What the file says is not trusted to be printable.
        command, host = (ascii(text)[1:-1][:60] for text in (self.command, self.host))
        since = ascii(self.since)[1:-1][:30]
        return f"tightrope {command} (process {self.process} on {host}, since {since})"


def _birth(process: int) -> str | None:
    """Return when a process started, in ticks since the system did; None if nobody says."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    # One that has ended stays in the list until its parent has taken note.
    return "ended" if stat[0] in (b"Z", b"X") else f"{boot} {stat[19].decode()}"


class Lock:
    """A lock that is held. It can be given to processes that this one starts.

    They then belong to it: the lock ends when all of them have.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        if self.descriptor is None:
            return Lock, (None,)
        return _inherited, (reduction.DupFd(self.descriptor),)


def _inherited(duplicate: Any) -> Lock:
    return Lock(duplicate.detach())


@contextmanager
def locked(path: Path, command: str, wait: Wait = False) -> Iterator[Lock]:
    """Hold the lock of a folder; if somebody else does, wait for it or refuse."""
    with Folder(path) as folder:
        claim = _Claim(folder, Owner.this(command))
        try:
            claim.take(wait)
            yield Lock(claim.descriptor)
        finally:
            claim.release()


class _Claim:
    """The way to a lock and back."""

    def __init__(self, folder: Folder, owner: Owner) -> None:
        self.folder, self.owner = folder, owner
        self.descriptor: int | None = None
        self.kernel = fcntl is not None

    def take(self, wait: Wait) -> None:
        """Get the lock, or say who has it."""
        began, told = time.monotonic(), False
        while not self._try():
            if self.folder.status(FILE) is None:
                continue  # it has just been released
            holder = self._holder()
            # Otherwise it has not signed yet, or only its workers are left.
            alive = holder is not None and not holder.gone
            text = f"{self.folder.path} is in use by {holder or 'another process'}{self._hint()}"
            if not wait and (alive or time.monotonic() > began + GRACE_SECONDS):
                raise UserError(f"{text}; wait for it with --wait, or stop it")
            if callable(wait) and alive and not told:
                wait(text)
                told = True
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Remove the file, then let go."""
        # Where it must not be removed it stays, which hinders nobody.
        with suppress(OSError):
            if self.descriptor is None:
                mine = not self.kernel and self._holder() == self.owner
            else:
                mine = self._is_mine(self.descriptor)
            if mine:
                self.folder.remove(FILE)
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _try(self) -> bool:
        if not self.kernel:
            return self._claim_without_locks()
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _HELD:
                return False
            if error.errno not in _UNSUPPORTED:
                raise
            self.kernel = False
            return self._claim_without_locks()
        if not self._is_mine(descriptor):  # whoever had it before has just removed it
            os.close(descriptor)
            return self._try()
        self.descriptor = descriptor
        self._sign(descriptor)
        return True

    def _open(self) -> int:
        try:
            return self.folder.open(FILE, os.O_RDWR | os.O_CREAT)
        except PermissionError as error:
            if self.folder.status(FILE) is not None:  # that of another user: may not be written to
                return self.folder.open(FILE, os.O_RDONLY)
            raise self._unwritable(error) from None
        except OSError as error:
            if error.errno == errno.EROFS:
                raise self._unwritable(error) from None
            raise

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.folder.path} cannot be written to ({error.strerror}); use a copy of it"
        )

    def _is_mine(self, descriptor: int) -> bool:
        """Return whether the file that is open is still the one of that name."""
        found, held = self.folder.status(FILE), os.fstat(descriptor)
        return found is not None and os.path.samestat(found, held)

    def _sign(self, descriptor: int) -> None:
        # On a full disk it is locked all the same, but others cannot be told by whom.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self.owner.to_json().encode(), 0)

    def _holder(self) -> Owner | None:
        try:
            descriptor = self.folder.open(FILE, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return Owner.parse(os.read(descriptor, 4096))
        finally:
            os.close(descriptor)

    def _claim_without_locks(self) -> bool:
        holder = self._holder()
        if holder is not None and not holder.gone:
            return False
        write_text(self.folder.path / FILE, self.owner.to_json())
        time.sleep(SETTLE_SECONDS)
        return self._holder() == self.owner

    def _hint(self) -> str:
        path = self.folder.path / FILE
        return "" if self.kernel else f" (if that does not run any more, remove {path})"
