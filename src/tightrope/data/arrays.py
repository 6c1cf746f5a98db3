"""Reading `.npz` files that may be damaged, not ours, or made to fill the memory."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tightrope.errors import UserError
from tightrope.limits import DATA_BYTES
from tightrope.reading import check_regular, open_regular

_SINGLE = b"\x93NUMPY"


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays called `keys`; nothing in the file is ever unpickled."""
    check_regular(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    try:
        with open_regular(path) as file:
            if file.read(len(_SINGLE)) == _SINGLE:
                raise UserError(
                    f"{path} is a single array; save {', '.join(keys)} with numpy.savez"
                )
            with zipfile.ZipFile(file) as archive:
                return _read_members(archive, path, keys)
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in any way at all
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is damaged or not an .npz file ({reason})") from None


def _read_members(
    archive: zipfile.ZipFile, path: Path, keys: Sequence[str]
) -> dict[str, np.ndarray]:
    members = {name.removesuffix(".npy"): name for name in archive.namelist()}
    missing = [key for key in keys if key not in members]
    if missing:
        held = ", ".join(list(members)[:10]) or "nothing"
        raise UserError(f"{path} lacks {', '.join(missing)} (it holds: {held})")
    sizes = [archive.getinfo(members[key]).file_size for key in keys]
    DATA_BYTES.check(sum(sizes), f"{path}, decompressed,")
    return {
        key: _read_array(archive, members[key], size) for key, size in zip(keys, sizes, strict=True)
    }


def _read_array(archive: zipfile.ZipFile, name: str, size: int) -> np.ndarray:
    """Return one array, after a look at whether its content is as large as its header says."""
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, kind = np.lib.format.read_array_header_2_0(file)
    if math.prod(shape) * kind.itemsize > size:
        raise ValueError(f"{name} is shorter than its header says")
    with archive.open(name) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
