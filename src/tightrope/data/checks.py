"""Checks that arrays really hold images and labels, and their conversion into tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tightrope.data.dataset import Dataset
from tightrope.errors import UserError


def pixels(array: np.ndarray, what: str) -> Tensor:
    """Return samples as uint8 (from integers 0..255) or float32 (from floats in [0, 1]).

    `array` is [N, C, H, W], [N, H, W] (one channel) or [N, D]; `what` names it in errors.
    """
    if array.ndim not in (2, 3, 4):
        raise UserError(
            f"{what} must be images [N, C, H, W] or [N, H, W] or vectors [N, D], "
            f"found shape {array.shape}"
        )
    if array.size == 0:
        raise UserError(f"{what} is empty (shape {array.shape})")
    if array.ndim == 4 and array.shape[1] > 4 and array.shape[3] in (1, 3):
        raise UserError(
            f"{what} has shape {array.shape}, which looks like channels last; "
            "transpose it to [N, C, H, W]"
        )
    if array.dtype.kind in "iu":
        values = _integer_pixels(array, what)
    elif array.dtype.kind == "f":
        values = _float_pixels(array, what)
    else:
        raise UserError(f"{what} must hold numbers, found {array.dtype}")
    return values.unsqueeze(1) if array.ndim == 3 else values


def _integer_pixels(array: np.ndarray, what: str) -> Tensor:
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 255:
        raise UserError(f"{what} has integer pixels outside 0..255 (from {low} to {high})")
    if high == 1:
        raise UserError(
            f"{what} has only the integer pixels 0 and 1, but integers are read as 0..255; "
            "use 0 and 255, or floats"
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.uint8))


def _float_pixels(array: np.ndarray, what: str) -> Tensor:
    # A NaN anywhere makes the minimum NaN: no temporary array of the size of the data is needed.
    low, high = float(array.min()), float(array.max())
    if np.isnan(low):
        raise UserError(f"{what} has pixels that are not a number (NaN)")
    if np.isinf(low) or np.isinf(high):
        raise UserError(f"{what} has infinite pixels")
    if low < 0 or high > 1:
        hint = "; divide by 255 or store as uint8" if low >= 0 and 1 < high <= 255 else ""
        raise UserError(f"{what} has float pixels outside [0, 1] (from {low:g} to {high:g}){hint}")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def labels(array: np.ndarray, what: str) -> Tensor:
    """Return labels as int64, checked to be a vector of integers that are not negative."""
    if array.ndim != 1:
        raise UserError(f"{what} must be one integer per sample, found shape {array.shape}")
    if array.size == 0:
        raise UserError(f"{what} is empty")
    if array.dtype.kind not in "iu":
        raise UserError(f"{what} must be integers, found {array.dtype}")
    if int(array.min()) < 0:
        raise UserError(f"{what} has the negative label {int(array.min())}")
    if int(array.max()) > np.iinfo(np.int64).max:
        raise UserError(f"{what} has the label {int(array.max())}, far too large for a class")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def same_length(x: Tensor, y: Tensor, what: str) -> None:
    """Check that there is one label per sample."""
    if len(x) != len(y):
        raise UserError(f"{what} has {len(x)} samples but {len(y)} labels")


def labels_below(y: Tensor, classes: int, what: str) -> None:
    """Check that every label names one of the classes."""
    if int(y.max()) >= classes:
        raise UserError(f"{what} has the label {int(y.max())}, but there are {classes} classes")


def class_count(y_train: Tensor, y_test: Tensor, what: str) -> int:
    """Return the number of classes of a training set whose labels are all there is to know.

    The classes are 0..K-1, each with at least one training sample, and the test set has no
    others.
    """
    seen = torch.unique(y_train)
    if len(seen) < 2:
        raise UserError(f"{what} has only the class {int(seen[0])}; at least two are needed")
    gaps = (seen != torch.arange(len(seen))).nonzero()
    if len(gaps):
        raise UserError(
            f"{what} has no training sample with label {int(gaps[0])}, but labels up to "
            f"{int(seen[-1])}; number the classes 0, 1, 2, ..."
        )
    unseen = y_test[y_test >= len(seen)]
    if len(unseen):
        raise UserError(
            f"{what} has the test label {int(unseen[0])}, which is not among the "
            f"{len(seen)} classes of the training set"
        )
    return len(seen)


def statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, in units of [0, 1] pixels.

    Flat data has one mean and one deviation for all its features. A constant channel gets
    deviation 1, so that dividing by it is harmless.
    """
    axes = (0, 2, 3) if x.ndim == 4 else (0, 1)
    total = squares = torch.zeros((), dtype=torch.float64)
    for chunk in x.split(1024):  # float64 copies of the whole set would be eight times its size
        values = chunk.to(torch.float64)
        if x.dtype == torch.uint8:
            values = values / 255
        total = total + values.sum(axes)
        squares = squares + values.square().sum(axes)
    count = x.numel() / max(total.numel(), 1)
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    # Rounding leaves a deviation near 1e-8 on a constant channel; a real one is far above.
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    return tuple(mean.reshape(-1).tolist()), tuple(std.reshape(-1).tolist())


def dataset_from_arrays(
    name: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    classes: tuple[str, ...] | None = None,
) -> Dataset:
    """Check arrays of the user's and make them a data set; see `pixels` for what they may hold.

    Classes are called by their numbers unless names are given.
    """
    train = pixels(x_train, f"{name}: x_train"), labels(y_train, f"{name}: y_train")
    test = pixels(x_test, f"{name}: x_test"), labels(y_test, f"{name}: y_test")
    same_length(*train, f"{name}: the training set")
    same_length(*test, f"{name}: the test set")
    if classes is None:
        classes = tuple(str(k) for k in range(class_count(train[1], test[1], name)))
    labels_below(train[1], len(classes), f"{name}: y_train")
    labels_below(test[1], len(classes), f"{name}: y_test")
    mean, std = statistics(train[0])
    return Dataset(name, *train, *test, classes, mean, std)
