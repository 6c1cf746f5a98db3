"""The data sets by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tightrope.data import cifar10, mnist, tinyimagenet
from tightrope.data.dataset import Dataset
from tightrope.data.fetch import SOURCES
from tightrope.data.user import load_folder, load_npz
from tightrope.errors import UserError, unknown_name

DATA_DIR_VARIABLE = "TIGHTROPE_DATA"


@dataclass(frozen=True)
class Description:
    """What `tightrope data list` says about a data set; `location` is None if it is not here."""

    name: str
    shape: tuple[int, ...]
    classes: int
    origin: str
    location: Path | None

    @property
    def available(self) -> bool:
        """Whether the data set can be loaded here."""
        return self.location is not None


def default_data_dir() -> Path:
    """Return the folder for data sets: $TIGHTROPE_DATA, or else ~/.cache/tightrope."""
    chosen = os.environ.get(DATA_DIR_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "tightrope"


def dataset_names() -> tuple[str, ...]:
    """Return the names that `load_dataset` knows; it also takes paths of users' data."""
    return ("mnist", "cifar10", "tinyimagenet", "tinyimagenet-64")


def load_dataset(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """Return a data set by name, or from an `.npz` file or image folder of the user's.

    A `Path` is never taken for a name. `data_dir` defaults to `default_data_dir()`.
    """
    where = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
    match name_or_path:
        case "mnist":
            return mnist.load_mnist()
        case "cifar10":
            return cifar10.load_cifar10(where)
        case "tinyimagenet" | "tinyimagenet-64":
            return tinyimagenet.load_tinyimagenet(where, str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return load_folder(path)
    if path.suffix == ".npz":
        return load_npz(path)
    if isinstance(name_or_path, Path):
        raise UserError(f"{path} is neither an .npz file nor a folder of images")
    raise unknown_name("data set", name_or_path, dataset_names())


def describe(data_dir: Path | None = None) -> list[Description]:
    """Describe every named data set, where it comes from and where it is."""
    where = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
    cifar, tiny = cifar10.find_cifar10(where), tinyimagenet.find_tinyimagenet(where)
    described = [
        Description("mnist", (1, 28, 28), len(mnist.CLASSES), "part of Tightrope", mnist.EMBEDDED),
        Description("cifar10", cifar10.SHAPE, len(cifar10.CLASSES), SOURCES["cifar10"].url, cifar),
    ]
    for name, augment in tinyimagenet.AUGMENTATIONS.items():
        shape = augment.output_shape((3, tinyimagenet.SIZE, tinyimagenet.SIZE))
        url = SOURCES[name].url
        described.append(Description(name, shape, tinyimagenet.CLASSES, url, tiny))
    return described
