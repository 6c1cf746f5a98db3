"""Reading files of which nothing is known: no waiting, no more memory than the limits allow.

What is not an ordinary file (a pipe, a device, a socket) is refused without being opened for
long enough to wait for anybody; compressed files are decompressed piece by piece up to a limit;
JSON and TOML are read as values that the rest of the program can work with: nested a few levels
deep, with whole numbers that fit into 64 bits.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import stat
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tightrope.deadline import Deadline
from tightrope.errors import UserError, check_path
from tightrope.limits import JOURNAL_BYTES, TEXT_DEPTH, Limit

BLOCK = 1 << 20
LARGEST_INTEGER = 2**64
# The table of `config.toml` that is no setting: versions, device, threads, command.
MADE_WITH = "made_with"

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: Path) -> None:
    """Raise an error if there is something at `path` that is not an ordinary file."""
    try:
        mode = check_path(path).stat().st_mode
    except FileNotFoundError:
        return
    _check_mode(path, mode)


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise UserError(f"cannot read {path}: it is {kind}, not a file")


def open_regular(path: Path) -> io.BufferedReader:
    """Open an ordinary file for reading; anything else is refused instead of waited for."""
    check_regular(path)
    # Between the check and now a pipe may have taken its place: so never wait, and look again.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: Limit, deadline: Deadline | None = None) -> bytes:
    """Return the content of a file, decompressed if its name ends in `.gz`, up to a limit.

    Files that are missing or may not be read raise the usual `OSError`.
    """
    most = limit.value
    with open_regular(path) as file:
        if path.suffix != ".gz":
            size = limit.check(os.fstat(file.fileno()).st_size, str(path))
            return file.read(size)  # Python sets aside as much memory as it is asked to read
        return _decompress(file, path, limit, most, deadline or Deadline())


def _decompress(file: BinaryIO, path: Path, limit: Limit, most: int, deadline: Deadline) -> bytes:
    content = io.BytesIO()
    try:
        with gzip.GzipFile(fileobj=file) as source:
            while block := source.read(BLOCK):
                deadline.check()
                if content.tell() + len(block) > most:
                    raise limit.exceeded(f"{path}, decompressed,")
                content.write(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return content.getvalue()


def read_text(path: Path, limit: Limit) -> str:
    """Return the text of a UTF-8 file, up to a limit."""
    return read_bytes(path, limit).decode("utf-8")


def file_hash(path: Path, limit: Limit) -> str:
    """Return the SHA-256 of a file, without holding it in memory."""
    with open_regular(path) as file:
        limit.check(os.fstat(file.fileno()).st_size, str(path))
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Return the value that a JSON text describes; `ValueError` if it is damaged or absurd."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    check_values(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table that a TOML text describes; `ValueError` if it is damaged or absurd."""
    # Python's reader takes time that grows with the square of a key's parts.
    if any(line.count(".") > TEXT_DEPTH.value for line in text.splitlines()):
        raise _too_deep()
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    check_values(value)
    return value


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"ibp": {"weight": 1}}` into `{"ibp.weight": 1}`, without `made_with`."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if not isinstance(value, Mapping):
            flat[name] = value
        elif name != MADE_WITH:
            flat |= {f"{name}.{option}": v for option, v in value.items()}
    return flat


def check_values(value: Any) -> None:
    """Raise `ValueError` if lists and tables are nested too deep or whole numbers too long."""
    level = [value]
    for depth in itertools.count():
        containers = [item for item in level if isinstance(item, Mapping | list)]
        if any(type(item) is int and abs(item) >= LARGEST_INTEGER for item in level):
            raise ValueError("a whole number of more than 64 bits")
        if not containers:
            return
        if depth == TEXT_DEPTH.value:
            raise _too_deep()
        level = [
            inner
            for item in containers
            for inner in (item.values() if isinstance(item, Mapping) else item)
        ]


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {TEXT_DEPTH.value} levels deep")


def read_records(path: Path) -> bytes:
    """Return the content of a file that has one record a line."""
    return read_bytes(path, JOURNAL_BYTES)
