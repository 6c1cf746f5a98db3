"""Checkpoints: everything that resuming needs, in one file, replaced atomically.

All randomness of an epoch is drawn from a seed made of the run's seed and the epoch's number,
so the number of finished epochs is all of the random state there is to keep.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tightrope.errors import UserError
from tightrope.files import write_atomically

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
    write_atomically(path, lambda temporary: temporary.write_bytes(buffer.getvalue()))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without executing anything in it."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums
            if archive.testzip() is not None:
                raise UserError(f"{path} is damaged; train again with --force")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file that is refused anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} was written by another version of Tightrope")
        return _checked(Checkpoint(**content))
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # torch raises many kinds for damaged or hostile files
        raise UserError(
            f"{path} is damaged ({type(error).__name__}); train again with --force"
        ) from error


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
