"""Data sets that users bring: an `.npz` file, or a folder of images by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tightrope.data.arrays import read_npz
from tightrope.data.checks import dataset_from_arrays
from tightrope.data.dataset import Dataset
from tightrope.data.images import common_format, decode
from tightrope.errors import UserError
from tightrope.limits import DATA_FILES

KEYS = ("x_train", "y_train", "x_test", "y_test")
SUFFIXES = {".png", ".jpg", ".jpeg"}


def load_npz(path: Path) -> Dataset:
    """Return the data set in an `.npz` file with `x_train, y_train, x_test, y_test`."""
    arrays = read_npz(path, KEYS)
    x_train, y_train, x_test, y_test = (arrays[key] for key in KEYS)
    return dataset_from_arrays(path.name, x_train, y_train, x_test, y_test)


def load_folder(folder: Path) -> Dataset:
    """Return the data set of `train/<class>/*.png|jpg` and `test/<class>/*.png|jpg`.

    Images become grey if all of them are, else RGB; transparency is dropped. The classes are
    the names of the training folders in alphabetical order.
    """
    classes = _class_folders(folder / "train")
    if len(classes) < 2:
        raise UserError(f"{folder / 'train'} has only the class {classes[0]!r}; two are needed")
    for name in _class_folders(folder / "test"):
        if name not in classes:
            raise UserError(f"{folder / 'test' / name} is a class that is not in train/")
    train, y_train = _files(folder / "train", classes)
    test, y_test = _files(folder / "test", classes)
    mode, size = common_format(train + test)
    return dataset_from_arrays(
        folder.resolve().name,
        decode(train, mode, size),
        np.array(y_train),
        decode(test, mode, size),
        np.array(y_test),
        tuple(classes),
    )


def _class_folders(part: Path) -> list[str]:
    """Return the class folders of `train` or `test`, of which there must be some."""
    if not part.is_dir():
        raise UserError(
            f"{part} is missing; an image folder holds train/<class>/ and test/<class>/"
        )
    names = sorted(
        entry.name for entry in part.iterdir() if entry.is_dir() and entry.name[0] != "."
    )
    if not names:
        raise UserError(f"{part} holds no class folders")
    return names


def _files(part: Path, classes: list[str]) -> tuple[list[Path], list[int]]:
    """List the images of one part and their labels; the test set may lack a class."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (part / name).is_dir():
            continue
        found = sorted(
            file
            for file in (part / name).iterdir()
            if file.suffix.lower() in SUFFIXES and file.name[0] != "."
        )
        if not found:
            raise UserError(f"the class folder {part / name} holds no .png or .jpg image")
        files += found
        DATA_FILES.check(len(files), f"the folder {part}")
        labels += [label] * len(found)
    return files, labels
