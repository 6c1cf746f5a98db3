"""Making files that are damaged, hostile or simply not what they should be."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def write_npz(path: Path, **changes: Any) -> Path:
    """Write a small data set of two classes with some arrays replaced (None: left out)."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": random.random((64, 4), dtype=np.float32),
        "y_train": np.arange(64) % 2,
        "x_test": random.random((16, 4), dtype=np.float32),
        "y_test": np.arange(16) % 2,
    }
    arrays |= changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def with_value(shape: tuple[int, ...], value: float) -> np.ndarray:
    """Return pixels of one half, but for one."""
    array = np.full(shape, 0.5, np.float32)
    array.flat[7] = value
    return array


def truncate(path: Path, share: float) -> None:
    """Keep only the first part of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def write_bomb(path: Path, marker: Path, *, zipped: bool) -> None:
    """Write a pickle (as torch.save does, or plain) that creates `marker` when it is read."""
    payload = pickle.dumps(Bomb(marker))
    if not zipped:
        path.write_bytes(payload)
        return
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
