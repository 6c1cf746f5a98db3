"""Test samples alone, for networks that were trained elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.data.arrays import read_npz
from tightrope.data.checks import labels, pixels, same_length
from tightrope.data.dataset import Dataset
from tightrope.errors import UserError, shorten

KEYS = ("x_test", "y_test")


def read_test_samples(path: Path, shape: tuple[int, ...] | None, *, in_pixels: bool) -> Dataset:
    """Return the samples in an `.npz` file, of which `x_test` and `y_test` are read.

    They get the shape of one input, if that is known. Pixels are integers 0 to 255 or floats in
    [0, 1]; anything else is taken as it is.
    """
    if path.suffix != ".npz":
        raise UserError(f"{path} must be an .npz file with x_test and y_test")
    arrays = read_npz(path, KEYS)
    return _samples(path.name, arrays["x_test"], arrays["y_test"], shape, in_pixels=in_pixels)


def samples_of_pair(given: Any, shape: tuple[int, ...] | None, *, in_pixels: bool) -> Dataset:
    """Return the samples of a pair (x, y) of tensors or arrays."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UserError(f"data must be a pair (x, y) or an .npz file, got {shorten(given)}")
    try:
        x, y = (
            part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
            for part in given
        )
    except (TypeError, ValueError, RuntimeError):
        raise UserError("data must be a pair (x, y) of tensors: samples and labels") from None
    return _samples("data", x, y, shape or x.shape[1:], in_pixels=in_pixels)


def _samples(
    name: str, x: np.ndarray, y: np.ndarray, shape: tuple[int, ...] | None, *, in_pixels: bool
) -> Dataset:
    what = f"{name}: x" if name == "data" else f"{name}: x_test"
    if not x.ndim:
        raise UserError(f"{what} must be samples, the batch first, found a single number")
    if not x.size:
        raise UserError(f"{what} is empty (shape {x.shape})")
    if shape is None:
        found = pixels(x, what) if in_pixels else _numbers(x, what)
    else:
        flat = x.reshape(len(x), -1)
        found = pixels(flat, what) if in_pixels else _numbers(flat, what)
        found = _shaped(found, x.shape[1:], tuple(shape), what)
    marks = labels(y, what.replace("x", "y"))
    same_length(found, marks, name)
    return Dataset(name, found[:0], marks[:0], found, marks, (), (), ())


def _shaped(x: Tensor, found: tuple[int, ...], shape: tuple[int, ...], what: str) -> Tensor:
    """Return samples in the shape of an input, if they have it but for dimensions of one."""
    if [n for n in found if n != 1] != [n for n in shape if n != 1] and found != (
        math.prod(shape),
    ):
        raise UserError(f"{what} has samples of shape {found}, the network takes {shape}")
    return x.reshape(len(x), *shape)


def _numbers(array: np.ndarray, what: str) -> Tensor:
    if array.dtype.kind not in "fiu" or not array.size:
        raise UserError(f"{what} must hold numbers, found {array.dtype} of shape {array.shape}")
    if not bool(np.isfinite(array).all()):
        raise UserError(f"{what} has infinite numbers or NaN")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
