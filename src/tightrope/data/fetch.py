"""Downloading data sets: resumable, checked, and unpacked without trusting the archive."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tightrope.data.unpack import md5_of, unpack
from tightrope.errors import UserError
from tightrope.files import open_to_append

Progress = Callable[[int, int | None], object]
"""Called with the bytes there so far and in total (None if the server does not say)."""

BLOCK = 1 << 18
TIMEOUT = 30  # seconds without a byte
NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ssl.SSLError,
    ConnectionError,
    TimeoutError,
)


@dataclass(frozen=True)
class Source:
    """Where an archive is, its MD5, and the folder that it holds."""

    url: str
    md5: str
    folder: str

    @property
    def archive(self) -> str:
        """The file name of the archive."""
        return self.url.rsplit("/", 1)[-1]


def download(source: Source, data_dir: Path, progress: Progress | None = None) -> Path:
    """Download and unpack an archive into `data_dir`; return the folder that it holds.

    A download that broke off continues where it stopped. Nothing is done if the folder is
    there already.
    """
    folder = data_dir / source.folder
    if folder.is_dir():
        return folder
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        archive = _archive(source, data_dir, progress or (lambda done, total: None))
        unpack(archive, folder)
        archive.unlink()
    except OSError as error:  # those of the network are handled where they occur
        raise UserError(f"cannot write to {data_dir} ({error.strerror or error})") from None
    return folder


def _archive(source: Source, data_dir: Path, progress: Progress) -> Path:
    """Return the complete, checked archive, downloaded unless it is there."""
    archive = data_dir / source.archive
    if archive.is_file() and md5_of(archive) == source.md5:
        return archive
    part = archive.with_name(f"{archive.name}.part")
    _download(source.url, part, progress)
    found = md5_of(part)
    if found != source.md5:
        part.unlink()
        raise UserError(
            f"{source.url} has the wrong checksum (MD5 {found}, expected {source.md5}); "
            "the download was removed, try again"
        )
    return part.replace(archive)


def _download(url: str, part: Path, progress: Progress) -> None:
    """Bring `part` to its full length, continuing after the bytes that it has."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            resumed = response.status == http.client.PARTIAL_CONTENT
            done = have if resumed else 0  # a server that ignores Range starts from the beginning
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else None
            done = _copy(response, part, done, total, progress)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing after what is there: the checksum decides whether that is all of it
        raise UserError(f"cannot download {url}: the server says {error}") from None
    except NETWORK_ERRORS as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"cannot download {url} ({reason}); check the network, then run the command again "
            f"(it continues), or put {part.stem} into {part.parent}"
        ) from None
    if total is not None and done < total:
        raise UserError(
            f"the download of {url} broke off after {done} of {total} bytes; "
            "run the command again to continue"
        )


def _copy(
    response: BinaryIO,
    part: Path,
    done: int,
    total: int | None,
    progress: Progress,
) -> int:
    """Write what the server sends after `done` bytes; return the length of the file afterwards."""
    with open_to_append(part) as file:
        file.truncate(done)
        progress(done, total)
        while block := response.read(BLOCK):
            file.write(block)
            done += len(block)
            progress(done, total)
    return done
