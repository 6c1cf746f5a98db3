"""The data sets by name: one row each in `DATASETS`, at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tightrope.data import cifar10, mnist, tinyimagenet
from tightrope.data.dataset import Dataset
from tightrope.data.fetch import Progress, Source, download
from tightrope.data.user import load_folder, load_npz
from tightrope.errors import UserError, unknown_name

DATA_DIR_VARIABLE = "TIGHTROPE_DATA"


@dataclass(frozen=True)
class Row:
    """All that is said of a data set.

    `load` and `find` get the folder for data sets; `find` returns None if it is not there. Without
    a `source` it is part of the package. `normalize`: networks normalise their inputs unless told
    otherwise.
    """

    shape: tuple[int, ...]
    classes: int
    load: Callable[[Path], Dataset]
    find: Callable[[Path], Path | None]
    source: Source | None
    normalize: bool


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
    return tuple(DATASETS)


def is_normalized(name_or_path: str) -> bool:
    """Return whether networks for that data normalise their inputs unless told otherwise."""
    return name_or_path in DATASETS and DATASETS[name_or_path].normalize


def load_dataset(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """Return a data set by name, or from an `.npz` file or image folder of the user's.

    A `Path` is never taken for a name. `data_dir` defaults to `default_data_dir()`.
    """
    if isinstance(name_or_path, str) and name_or_path in DATASETS:
        return DATASETS[name_or_path].load(_folder(data_dir))
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
    where = _folder(data_dir)
    return [
        Description(
            name,
            row.shape,
            row.classes,
            "part of Tightrope" if row.source is None else row.source.url,
            row.find(where),
        )
        for name, row in DATASETS.items()
    ]


def fetch(name: str, data_dir: Path, progress: Progress | None = None) -> Path:
    """Download and unpack a data set into `data_dir`; return its folder."""
    sources = {known: row.source for known, row in DATASETS.items()}
    if name not in sources:
        raise unknown_name("data set to fetch", name, [n for n, s in sources.items() if s])
    source = sources[name]
    if source is None:
        raise UserError(f"{name} comes with Tightrope; there is nothing to fetch")
    return download(source, data_dir, progress)


def _folder(data_dir: Path | None) -> Path:
    return default_data_dir() if data_dir is None else Path(data_dir).expanduser()


def _tinyimagenet(name: str) -> Row:
    """Return the row of one of the two conventions, which differ in their crops."""
    size = (3, tinyimagenet.SIZE, tinyimagenet.SIZE)
    return Row(
        tinyimagenet.AUGMENTATIONS[name].output_shape(size),
        tinyimagenet.CLASSES,
        partial(tinyimagenet.load_tinyimagenet, name=name),
        tinyimagenet.find_tinyimagenet,
        Source(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            tinyimagenet.FOLDER,
        ),
        normalize=True,
    )


# Those of the paper's Appendix B are normalised.
DATASETS: dict[str, Row] = {
    "mnist": Row(
        (1, 28, 28),
        len(mnist.CLASSES),
        lambda data_dir: mnist.load_mnist(),
        lambda data_dir: mnist.EMBEDDED,
        source=None,
        normalize=False,
    ),
    "cifar10": Row(
        cifar10.SHAPE,
        len(cifar10.CLASSES),
        cifar10.load_cifar10,
        cifar10.find_cifar10,
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            cifar10.FOLDER,
        ),
        normalize=True,
    ),
    "tinyimagenet": _tinyimagenet("tinyimagenet"),
    "tinyimagenet-64": _tinyimagenet("tinyimagenet-64"),
}
