"""MNIST, which comes with the package as four xz-compressed IDX files."""

from __future__ import annotations

import functools
import hashlib
import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tightrope.data.dataset import Dataset
from tightrope.errors import UserError

EMBEDDED = Path(__file__).parent / "mnist"
CLASSES = tuple("0123456789")
MEAN, STD = (0.1307,), (0.3081,)

# MD5 of the uncompressed official files.
CHECKSUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@functools.lru_cache(maxsize=1)
def load_mnist(folder: Path = EMBEDDED) -> Dataset:
    """Return MNIST; decoded and checked once per process."""
    parts = {name: read_idx(folder / f"{name}.xz", md5) for name, md5 in CHECKSUMS.items()}
    images = {name: part.unsqueeze(1) for name, part in parts.items() if part.ndim == 3}
    digits = {name: part.to(torch.int64) for name, part in parts.items() if part.ndim == 1}
    return Dataset(
        "mnist",
        images["train-images-idx3-ubyte"],
        digits["train-labels-idx1-ubyte"],
        images["t10k-images-idx3-ubyte"],
        digits["t10k-labels-idx1-ubyte"],
        CLASSES,
        MEAN,
        STD,
    )


def read_idx(path: Path, md5: str) -> Tensor:
    """Decode one xz-compressed IDX file of bytes whose uncompressed MD5 is known."""
    try:
        content = lzma.decompress(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; install Tightrope again") from None
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}); install Tightrope again") from None
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise UserError(f"{path} is damaged (wrong checksum); install Tightrope again")
    # Header: two zero bytes, the type (8 = unsigned byte), the number of dimensions, the sizes.
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    return torch.from_numpy(values.reshape(shape).copy())
