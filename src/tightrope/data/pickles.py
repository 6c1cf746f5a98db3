"""Reading CIFAR-10's pickled batches without executing anything they contain.

A pickle may name any function and have it called. Here the only names that resolve are the
three NumPy needs for an array, and they resolve to classes that do nothing but remember what
they were given; the array is then made from the remembered bytes.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import numpy as np

from tightrope.errors import UserError


class _Remembered:
    """Stands for a NumPy object in a pickle: keeps its arguments and state, and is inert.

    Each has `__setstate__`, because unpickling would otherwise set attributes of its choice.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Class(_Remembered):
    """Stands for `numpy.ndarray`, which only occurs as an argument."""


class _Type(_Remembered):
    """Stands for a `numpy.dtype`."""


class _Array(_Remembered):
    """Stands for an array under reconstruction."""


ALLOWED: dict[tuple[str, str], type[_Remembered]] = {
    ("numpy", "ndarray"): _Class,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # its name since NumPy 2
}


class _RestrictedUnpickler(pickle.Unpickler):
    """Resolves allow-listed names to inert classes and refuses all others."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        # The official files are from Python 2, where text is bytes.
        super().__init__(file, encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> type[_Remembered]:
        """Return the stand-in for an allowed name."""
        if (module, name) not in ALLOWED:
            raise UserError(
                f"{self.path} is refused: it asks for {module}.{name}, which has no business "
                "in a data file"
            )
        return ALLOWED[module, name]


def read_batch(file: IO[bytes], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [N, 3072] uint8 and labels [N] of one batch; `path` is for errors."""
    try:
        content = _RestrictedUnpickler(file, path).load()
        fields = {_text(key): value for key, value in content.items()}
        return _array(fields["data"]), np.array(fields["labels"])
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way at all
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} is damaged: not a CIFAR-10 batch ({reason})") from None


def _text(key: Any) -> str:
    return key.decode("ascii") if isinstance(key, bytes) else str(key)


def _array(remembered: Any) -> np.ndarray:
    """Make the array from what the stand-ins remember; bytes in row-major order only."""
    if not isinstance(remembered, _Array):
        raise TypeError("'data' is not an array")
    _, shape, kind, column_major, content = remembered.state
    if not isinstance(kind, _Type) or _text(kind.arguments[0]) != "u1" or column_major:
        raise TypeError("'data' is not a row-major array of bytes")
    return np.frombuffer(content, np.uint8).reshape(shape).copy()
