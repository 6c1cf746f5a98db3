"""Writing files so that a kill at any moment leaves either the old content or the new one.

Nothing is written through a link, and nothing that is not a plain file is read or replaced: a
folder that came from elsewhere cannot make us touch, or wait for, anything outside of it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from tightrope.errors import UserError, check_path
from tightrope.limits import JSON_BYTES
from tightrope.reading import parse_json, read_bytes

# A temporary file: the name it is to get, a random part (earlier versions had none), the process.
_TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{16})?\.(?P<process>[0-9]{1,9})\.tmp")
_RELATIVE = os.open in os.supports_dir_fd  # not on Windows
# Refuses a link, and does not wait for the other end of a pipe.
_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
_LINK_ERRORS = (errno.ELOOP, errno.EMLINK)


class Folder:
    """A folder that is held open, so that nothing swapped in meanwhile diverts what is done in it.

    With `own`, a link in place of the folder itself is refused as well.
    """

    def __init__(self, path: Path, *, own: bool = False) -> None:
        self.path = path
        self._descriptor: int | None = None
        if own and path.is_symlink():
            raise _linked(path)
        if _RELATIVE:
            flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if own else 0)
            self._descriptor = os.open(path, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def open(self, name: str, flags: int) -> int:
        """Open a plain file that has no other name; return its descriptor."""
        with self._named(name):
            descriptor = os.open(self._at(name), flags | _PLAIN, 0o666, dir_fd=self._descriptor)
        try:
            self._check_plain(name, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def status(self, name: str) -> os.stat_result | None:
        """Return what is known of a file or link, None if it is not there."""
        try:
            with self._named(name):
                return os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, replacing the file of that name if there is one."""
        found = self.status(new)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise _irregular(self.path / new, found)
        with self._named(new):
            source, target = self._at(old), self._at(new)
            os.replace(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; it may be gone already."""
        try:
            with self._named(name):
                os.unlink(self._at(name), dir_fd=self._descriptor)
        except FileNotFoundError:
            pass

    def files(self) -> Iterator[str]:
        """Yield the names of all plain files, links not among them."""
        for name in self._list():
            found = self.status(name)
            if found is not None and stat.S_ISREG(found.st_mode):
                yield name

    def refuse_links(self, names: Collection[str] | None = None) -> None:
        """Refuse a link in place of any of these files and folders, by default of all."""
        for name in self._list() if names is None else names:
            found = self.status(name)
            if found is not None and stat.S_ISLNK(found.st_mode):
                raise _linked(self.path / name)

    def _list(self) -> list[str]:
        place = self.path if self._descriptor is None else self._descriptor
        with os.scandir(place) as entries:
            return sorted(entry.name for entry in entries)

    def _check_plain(self, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(self.path / name, found)
        if found.st_nlink > 1:
            raise UserError(
                f"{self.path / name} has other names (hard links), whose content would change, "
                "too; replace it by a copy"
            )

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._descriptor is None else name

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let errors tell the whole path."""
        try:
            yield
        except OSError as error:
            if error.errno in _LINK_ERRORS:
                raise _linked(self.path / name) from None
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None


def _linked(path: Path) -> UserError:
    return UserError(
        f"{path} is a link, and nothing is written through links: replace it by a copy, or name "
        "the file itself"
    )


def _irregular(path: Path, found: os.stat_result) -> UserError:
    if stat.S_ISLNK(found.st_mode):
        return _linked(path)
    what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
    return UserError(f"cannot write {path}: it is {what}, not a file; name another one")


def refuse_links(path: Path, names: Collection[str] | None = None) -> None:
    """Refuse links in a folder, in place of some names or of any; it need not be there."""
    if path.is_dir():
        with Folder(path) as folder:
            folder.refuse_links(names)


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], *, own_folder: bool = False
) -> None:
    """Let `write` fill a temporary sibling of `path`, flush it to disk, then rename it.

    The sibling is removed when anything fails (a full disk, an interrupt), so nothing
    half-written is left behind. With `own_folder`, a link in place of the folder is refused.
    """
    check_path(path)
    if own_folder and path.parent.is_symlink():
        raise _linked(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with Folder(path.parent, own=own_folder) as folder:
        # Unpredictable, and it must not be there: nobody can have put anything in its place.
        # File systems limit names to 255 bytes.
        temporary = f".{path.name[:50]}.{secrets.token_hex(8)}.{os.getpid()}.tmp"
        try:
            descriptor = folder.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:  # tell of the file that people know
            raise OSError(error.errno, error.strerror, str(path)) from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            folder.rename(temporary, path.name)
        finally:
            folder.remove(temporary)


def write_bytes(path: Path, content: bytes, *, own_folder: bool = False) -> None:
    """Write `content` to `path` atomically."""
    write_atomically(path, lambda file: file.write(content), own_folder=own_folder)


def write_text(path: Path, text: str, *, own_folder: bool = False) -> None:
    """Write `text` to `path` atomically."""
    write_bytes(path, text.encode("utf-8"), own_folder=own_folder)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def open_to_append(path: Path, *, own_folder: bool = False) -> BinaryIO:
    """Open a plain file to read it and to add to its end; it is made if need be."""
    with Folder(path.parent, own=own_folder) as folder:
        return os.fdopen(folder.open(path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")


def read_json(path: Path, what: str) -> Any:
    """Read JSON from `path`; `what` names the file's role in the error message."""
    try:
        return parse_json(read_bytes(path, JSON_BYTES))
    except FileNotFoundError:
        raise UserError(f"{path} is missing ({what})") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged: not valid JSON ({what}; {error})") from None


def is_leftover(name: str, of: re.Pattern[str]) -> bool:
    """Return whether a name is that of a temporary file for a file whose name matches `of`."""
    found = _TEMPORARY.fullmatch(name)
    return found is not None and of.fullmatch(found["name"]) is not None


def remove_leftovers(path: Path, of: re.Pattern[str], *, own_folder: bool = False) -> None:
    """Remove temporary files whose process was killed, of files whose names match `of`."""
    with Folder(path, own=own_folder) as folder:
        for name in folder.files():
            found = _TEMPORARY.fullmatch(name)
            if found and of.fullmatch(found["name"]) and not _alive(int(found["process"])):
                folder.remove(name)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists but is somebody else's
        return True
    return process != os.getpid()
