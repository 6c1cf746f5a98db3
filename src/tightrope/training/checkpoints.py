"""Checkpoints: everything that resuming needs, in one file, replaced atomically.

All randomness of an epoch is drawn from a seed made of the run's seed and the epoch's number,
so the number of finished epochs is all of the random state there is to keep.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tightrope.errors import UserError
from tightrope.files import write_bytes
from tightrope.limits import CHECKPOINT_BYTES
from tightrope.reading import open_regular

FORMAT = 1


@dataclass
class Checkpoint:
    """The state after `epoch` finished epochs."""

    epoch: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    best: float
    selected_epoch: int
    average: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint atomically."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **asdict(checkpoint)}, buffer)
    write_bytes(path, buffer.getvalue())


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without executing anything in it."""
    try:
        with open_regular(path) as stored, warnings.catch_warnings():
            _check_archive(stored, CHECKPOINT_BYTES.check(stored.seek(0, os.SEEK_END), str(path)))
            stored.seek(0)
            warnings.simplefilter("ignore")  # of a file that is refused anyway
            content = torch.load(stored, map_location="cpu", weights_only=True)
        _check_tensors(content)
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} was written by another version of Tightrope")
        return _checked(Checkpoint(**content))
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # torch raises many kinds for damaged or hostile files
        raise UserError(
            f"{path} is damaged ({type(error).__name__}); train again with --force"
        ) from error


def _check_archive(stored: BinaryIO, size: int) -> None:
    """Refuse an archive that is damaged or would unpack to more than its size.

    torch itself writes nothing compressed and does not look at the checksums.
    """
    with zipfile.ZipFile(stored) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("compressed")
        if sum(member.file_size for member in members) > size:
            raise ValueError("larger than its file")
        if archive.testzip() is not None:
            raise ValueError("a wrong checksum")


def _check_tensors(content: Any) -> None:
    """Refuse tensors that claim more elements than they bring, which a copy would have to hold."""
    left, seen = [content], set()
    while left:
        value = left.pop()
        if id(value) in seen:  # lists may hold each other, or themselves
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            held = value.untyped_storage().nbytes() if value.layout == torch.strided else -1
            if value.numel() * value.element_size() > held:
                raise ValueError("a tensor without its content")
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list | tuple | set):
            left.extend(value)


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """Refuse content of the wrong kind; the caller turns the error into a message."""
    kinds = {"epoch": int, "selected_epoch": int, "best": float, "model": dict, "optimizer": dict}
    kinds["average"] = dict
    for name, kind in kinds.items():
        if not isinstance(getattr(checkpoint, name), kind):
            raise TypeError(name)
    if not all(bool(torch.isfinite(t).all()) for t in checkpoint.model.values()):
        raise ValueError("weights that are not finite")
    return checkpoint


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch: distinct for all epochs and for nearby run seeds."""
    return (seed * 1_000_003 + epoch * 7_919 + 12_345) % 2**63
