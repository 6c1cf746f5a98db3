"""Decoding many image files into one array."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from tightrope.errors import UserError
from tightrope.limits import DATA_BYTES, IMAGE_BYTES, IMAGE_PIXELS, IMAGE_SCANS
from tightrope.reading import open_regular, read_bytes

CHANNELS = {"L": 1, "RGB": 3}
# Whatever the file is called; no format that another program would have to be started for.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_GRAY = {"1", "L", "LA"}
_TOO_DEEP = ("I", "F")  # 16 and 32 bits per pixel, which conversion to 8 would clip


def common_format(paths: Sequence[Path]) -> tuple[str, tuple[int, int]]:
    """Return the mode ("L" if all images are grey, else "RGB") and the size (H, W) of images.

    Reads the headers only. Images of different sizes or with more than 8 bits are errors.
    """
    with _workers() as pool:
        headers = list(pool.map(_header, paths))
    sizes = [size for _, size in headers]
    for path, (mode, size) in zip(paths, headers, strict=True):
        if mode.startswith(_TOO_DEEP):
            raise UserError(f"{path} has more than 8 bits per pixel; convert it first")
        if size != sizes[0]:
            raise UserError(
                f"{path} has {_spell(size)} pixels but {paths[0]} has {_spell(sizes[0])}; "
                "all images must have the same size"
            )
    return ("L" if all(mode in _GRAY for mode, _ in headers) else "RGB"), sizes[0]


def decode(paths: Sequence[Path], mode: str, size: tuple[int, int]) -> np.ndarray:
    """Return the images as uint8 [N, C, H, W], converted to `mode` ("L" or "RGB")."""
    shape = (len(paths), CHANNELS[mode], *size)
    DATA_BYTES.check(math.prod(shape), f"a data set of {len(paths)} images")
    out = np.empty(shape, np.uint8)

    def fill(index: int) -> None:
        image = _read(paths[index], mode)
        if image.shape[:2] != size:
            raise UserError(
                f"{paths[index]} has {_spell(image.shape[:2])} pixels, expected {_spell(size)}"
            )
        out[index] = image.reshape(*size, -1).transpose(2, 0, 1)

    with _workers() as pool:  # Pillow releases the interpreter lock while it decodes
        for _ in pool.map(fill, range(len(paths))):
            pass
    return out


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # We refuse large images ourselves, and earlier.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield pool


def _header(path: Path) -> tuple[str, tuple[int, int]]:
    """Return the mode and the size (H, W) of one image."""
    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            IMAGE_PIXELS.check(image.height * image.width, f"the image {path}")
            return image.mode, (image.height, image.width)
    except UserError:
        raise
    except Exception as error:  # a damaged image can fail in any way at all
        raise _unreadable(path, error) from None


def _read(path: Path, mode: str) -> np.ndarray:
    """Decode one image completely."""
    try:
        content = read_bytes(path, IMAGE_BYTES)
        if content.startswith(_JPEG):  # every scan is as much work as the whole image
            IMAGE_SCANS.check(content.count(_SCAN), f"the image {path}")
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            IMAGE_PIXELS.check(image.height * image.width, f"the image {path}")
            return np.asarray(image.convert(mode))
    except UserError:
        raise
    except Exception as error:  # a damaged image can fail in any way at all
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(f"cannot read the image {path} ({reason})")


def _spell(size: tuple[int, ...]) -> str:
    return f"{size[0]}×{size[1]}"
