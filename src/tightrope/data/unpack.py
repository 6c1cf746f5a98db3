"""Unpacking archives of which nothing is trusted: no file lands outside the target folder."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from tightrope.errors import UserError

DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError)


def md5_of(path: Path) -> str:
    """Return the MD5 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the top-level folder of a .tar.gz or .zip, called like `folder`, to `folder`.

    Unpacking goes to a temporary sibling that is renamed at the end, so a kill leaves no
    half-filled folder that looks complete.
    """
    staging = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(staging, ignore_errors=True)  # of an earlier, killed attempt
    staging.mkdir(parents=True)
    try:
        if archive.suffix == ".zip":
            _unzip(archive, staging)
        else:
            with tarfile.open(archive, "r:*") as tar:
                tar.extractall(staging, filter="data")
        if not (staging / folder.name).is_dir():
            raise UserError(f"{archive} does not hold the folder {folder.name}")
        (staging / folder.name).replace(folder)
    except tarfile.FilterError as error:
        raise UserError(f"{archive} is refused: {error}") from None
    except DAMAGED as error:
        raise UserError(f"{archive} is damaged ({error})") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unzip(archive: Path, target: Path) -> None:
    """Unpack a zip file after checking all of its names."""
    with zipfile.ZipFile(archive) as content:
        for name in content.namelist():
            path = PurePosixPath(name.replace("\\", "/"))  # as Windows would read it
            if path.is_absolute() or ".." in path.parts or ":" in str(path).split("/")[0]:
                raise UserError(f"{archive} is refused: {name!r} would land outside {target}")
        content.extractall(target)
