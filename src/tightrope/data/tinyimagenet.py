"""TinyImageNet from the official `tiny-imagenet-200` folder; its validation set is the test set.

Decoding 110,000 JPEGs takes minutes, so the arrays are kept in one file next to the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from tightrope.data import checks
from tightrope.data.arrays import read_npz
from tightrope.data.augmentation import Augmentation
from tightrope.data.dataset import Dataset
from tightrope.data.images import decode
from tightrope.errors import UserError
from tightrope.files import write_atomically
from tightrope.limits import LIST_BYTES
from tightrope.reading import read_text

FOLDER, CACHE = "tiny-imagenet-200", "tiny-imagenet-200.npz"
MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2302, 0.2265, 0.2262)
CLASSES, SIZE = 200, 64
KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")

# The two conventions of the literature; their results are not strictly comparable.
AUGMENTATIONS = {
    "tinyimagenet": Augmentation(flip=True, crop=56),
    "tinyimagenet-64": Augmentation(flip=True, crop=64, padding=4),
}

Arrays = dict[str, np.ndarray]


def find_tinyimagenet(data_dir: Path) -> Path | None:
    """Return the folder or the file of decoded images under `data_dir`, whichever is there."""
    for found in (data_dir / FOLDER, data_dir / CACHE):
        if found.exists():
            return found
    return None


def load_tinyimagenet(data_dir: Path, name: str = "tinyimagenet") -> Dataset:
    """Return TinyImageNet: `name` chooses the crop, 56 or (`tinyimagenet-64`) 64."""
    folder, cache = data_dir / FOLDER, data_dir / CACHE
    arrays = _cached(cache, folder)
    if arrays is None:
        if not folder.is_dir():
            raise UserError(
                f"TinyImageNet is not at {folder}; run `tightrope data fetch tinyimagenet`"
            )
        arrays = _decoded(folder)
        _keep(arrays, cache)
    train = _checked(arrays["x_train"], arrays["y_train"], f"{name}: the training set")
    test = _checked(arrays["x_test"], arrays["y_test"], f"{name}: the test set")
    classes = tuple(str(label) for label in arrays["classes"])
    return Dataset(name, *train, *test, classes, MEAN, STD, AUGMENTATIONS[name])


def _checked(x: np.ndarray, y: np.ndarray, what: str) -> tuple[Tensor, Tensor]:
    """Turn one part into tensors."""
    images, labels = checks.pixels(x, what), checks.labels(y, what)
    checks.same_length(images, labels, what)
    checks.labels_below(labels, CLASSES, what)
    return images, labels


def _cached(cache: Path, folder: Path) -> Arrays | None:
    """Return the decoded arrays, unless they are missing, damaged or older than the folder."""
    sources = [folder / "wnids.txt", folder / "val" / "val_annotations.txt"]
    try:
        written = cache.stat().st_mtime
        if any(source.stat().st_mtime > written for source in sources if source.exists()):
            return None
        return read_npz(cache, KEYS)
    except (OSError, UserError):
        return None


def _keep(arrays: Arrays, cache: Path) -> None:
    """Write the cache; a folder that is read-only only costs time the next time."""

    def write(file: BinaryIO) -> None:
        # NumPy's stub takes any keyword for its flag `allow_pickle`.
        np.savez(file, **arrays)  # type: ignore[arg-type]

    try:
        write_atomically(cache, write)
    except (OSError, UserError):
        return


def _decoded(folder: Path) -> Arrays:
    """Decode the folder. Classes are in the order of their WordNet ids."""
    wnids = sorted(_lines(folder / "wnids.txt"))
    if len(wnids) != CLASSES or len(set(wnids)) != CLASSES:
        raise UserError(f"{folder / 'wnids.txt'} lists {len(set(wnids))} classes, not {CLASSES}")
    index = {wnid: k for k, wnid in enumerate(wnids)}
    train, y_train = _training_files(folder / "train", index)
    test, y_test = _validation_files(folder / "val", index)
    return {
        "x_train": decode(train, "RGB", (SIZE, SIZE)),
        "y_train": np.array(y_train),
        "x_test": decode(test, "RGB", (SIZE, SIZE)),
        "y_test": np.array(y_test),
        "classes": np.array(_names(folder, wnids)),
    }


def _training_files(folder: Path, index: dict[str, int]) -> tuple[list[Path], list[int]]:
    """List the training images and their classes."""
    files: list[Path] = []
    labels: list[int] = []
    for wnid, k in index.items():
        found = sorted((folder / wnid / "images").glob("*.JPEG"))
        if not found:
            raise UserError(f"{folder / wnid / 'images'} holds no *.JPEG image")
        files += found
        labels += [k] * len(found)
    return files, labels


def _validation_files(folder: Path, index: dict[str, int]) -> tuple[list[Path], list[int]]:
    """List the images named in `val_annotations.txt` and their classes."""
    annotations = folder / "val_annotations.txt"
    files: list[Path] = []
    labels: list[int] = []
    for line in _lines(annotations):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in index:
            raise UserError(f"{annotations}: {name!r} has the unknown class {wnid!r}")
        files.append(folder / "images" / name)
        labels.append(index[wnid])
    return files, labels


def _names(folder: Path, wnids: list[str]) -> list[str]:
    """Return the first English word for each class, or its id where there is none."""
    words: dict[str, str] = {}
    if (folder / "words.txt").is_file():
        for line in _lines(folder / "words.txt"):
            wnid, _, meaning = line.partition("\t")
            words[wnid] = meaning.partition(",")[0].strip()
    return [words.get(wnid) or wnid for wnid in wnids]


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file that must be there."""
    try:
        lines = read_text(path, LIST_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error})") from None
    kept = [line.strip("\r ") for line in lines if line.strip()]
    if not kept:
        raise UserError(f"{path} is empty")
    return kept
