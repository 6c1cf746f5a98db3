"""CIFAR-10 from the official python batches, as a folder or still in their archive."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tightrope.data import checks
from tightrope.data.augmentation import Augmentation
from tightrope.data.dataset import Dataset
from tightrope.data.pickles import read_batch
from tightrope.errors import UserError
from tightrope.limits import ARCHIVE_BYTES, BATCH_BYTES
from tightrope.reading import open_regular, read_bytes

FOLDER, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
SHAPE = (3, 32, 32)
TRAIN_BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST_BATCH = "test_batch"

_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
_LONGEST_DESCRIPTION = 1 << 20

Batch = tuple[Tensor, Tensor]


class _Member(tarfile.TarInfo):
    """A member of an archive, of the few kinds that make tarfile read no further."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read the header of a member."""
        found = super().frombuf(buf, encoding, errors)
        # Descriptions of other members are read into memory, whatever their length.
        long = found.type not in _PLAIN and found.size > _LONGEST_DESCRIPTION
        if long or found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a member of a strange kind")
        return found


def find_cifar10(data_dir: Path) -> Path | None:
    """Return the folder of batches or the archive under `data_dir`, whichever is there."""
    for found in (data_dir / FOLDER, data_dir / ARCHIVE):
        if found.exists():
            return found
    return None


def load_cifar10(data_dir: Path) -> Dataset:
    """Return CIFAR-10 from `cifar-10-batches-py/` or `cifar-10-python.tar.gz` in `data_dir`."""
    found = find_cifar10(data_dir)
    if found is None:
        raise UserError(
            f"CIFAR-10 is neither at {data_dir / FOLDER} nor at {data_dir / ARCHIVE}; "
            "run `tightrope data fetch cifar10`"
        )
    batches = _read_folder(found) if found.is_dir() else _read_archive(found)
    images = [batches[name][0] for name in TRAIN_BATCHES]
    digits = [batches[name][1] for name in TRAIN_BATCHES]
    return Dataset(
        "cifar10",
        torch.cat(images),
        torch.cat(digits),
        *batches[TEST_BATCH],
        CLASSES,
        MEAN,
        STD,
        Augmentation(flip=True, crop=32, padding=2),
    )


def _read_folder(folder: Path) -> dict[str, Batch]:
    """Read the six batches from the extracted folder."""
    batches = {}
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        path = folder / name
        try:
            content = read_bytes(path, BATCH_BYTES)
            batches[name] = _checked(*read_batch(content, path), path)
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror})") from None
    return batches


def _read_archive(archive: Path) -> dict[str, Batch]:
    """Read the six batches from the archive, without extracting it."""
    batches = {}
    try:
        with (
            open_regular(archive) as compressed,
            gzip.GzipFile(fileobj=compressed) as plain,
            tarfile.open(fileobj=plain, mode="r:", tarinfo=_Member) as tar,
        ):
            for member in tar:
                ARCHIVE_BYTES.check(member.offset_data + member.size, f"{archive}, decompressed,")
                name = member.name.removeprefix(f"{FOLDER}/")
                if name not in (*TRAIN_BATCHES, TEST_BATCH) or not member.isfile():
                    continue
                file, path = tar.extractfile(member), archive / name
                assert file is not None, "regular members have content"
                BATCH_BYTES.check(member.size, str(path))
                batches[name] = _checked(*read_batch(file.read(), path), path)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"{archive} is damaged ({error}); fetch it again") from None
    missing = {*TRAIN_BATCHES, TEST_BATCH} - set(batches)
    if missing:
        raise UserError(f"{archive} lacks {', '.join(sorted(missing))}; fetch it again")
    return batches


def _checked(data: np.ndarray, digits: np.ndarray, path: Path) -> Batch:
    """Check one batch and give its images their shape."""
    if data.ndim != 2 or data.shape[1] != 3072 or not len(data):
        raise UserError(f"{path} is damaged: images of shape {data.shape}, expected [N, 3072]")
    y = checks.labels(digits, f"{path}: labels")
    x = checks.pixels(data.reshape(-1, *SHAPE), f"{path}: data")
    checks.same_length(x, y, str(path))
    checks.labels_below(y, len(CLASSES), f"{path}: labels")
    return x, y
