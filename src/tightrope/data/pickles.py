"""Reading CIFAR-10's pickled batches without executing anything they contain.

A pickle may name any function and have it called. Here the only names that resolve are the
three NumPy needs for an array, and they resolve to classes that do nothing but remember what
they were given; the array is then made from the remembered bytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from tightrope.errors import UserError
from tightrope.limits import BATCH_STEPS


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

    def __init__(self, content: bytes, path: Path) -> None:
        # The official files are from Python 2, where text is bytes.
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> type[_Remembered]:
        """Return the stand-in for an allowed name."""
        if (module, name) not in ALLOWED:
            raise UserError(
                f"{self.path} is refused: it asks for {module}.{name}, which has no business "
                "in a data file"
            )
        return ALLOWED[module, name]


def read_batch(content: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [N, 3072] uint8 and labels [N] of one batch; `path` is for errors."""
    try:
        _check_steps(content, path)
        unpickled = _RestrictedUnpickler(content, path).load()
        fields = {_text(key): value for key, value in unpickled.items()}
        return _array(fields["data"]), _labels(fields["labels"])
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way at all
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} is damaged: not a CIFAR-10 batch ({reason})") from None


def _check_steps(content: bytes, path: Path) -> None:
    """Refuse a pickle that makes more objects, or more room for them, than a batch needs.

    A byte can make an object that is sixty times as large.
    """
    most = BATCH_STEPS.value
    for step, (code, argument, _) in enumerate(pickletools.genops(content)):
        place = argument if isinstance(argument, int) and code.name.endswith("PUT") else 0
        if max(step, place) >= most:
            raise BATCH_STEPS.exceeded(f"{path}, unpickled,")


def _labels(labels: Any) -> np.ndarray:
    """Make an array of labels; lists inside each other could multiply to any size."""
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise TypeError("'labels' is not a list of whole numbers")
    return np.array(labels)


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
