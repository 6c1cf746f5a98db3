"""Data sets by name, data of the user's, and batches of them."""

from tightrope.data.augmentation import Augmentation
from tightrope.data.batches import Batches, as_float
from tightrope.data.catalog import (
    Description,
    dataset_names,
    default_data_dir,
    describe,
    fetch,
    is_normalized,
    load_dataset,
)
from tightrope.data.checks import dataset_from_arrays
from tightrope.data.dataset import Dataset, Split
from tightrope.data.fetch import Progress, Source
from tightrope.data.samples import read_test_samples, samples_of_pair

__all__ = [
    "Augmentation",
    "Batches",
    "Dataset",
    "Description",
    "Progress",
    "Source",
    "Split",
    "as_float",
    "dataset_from_arrays",
    "dataset_names",
    "default_data_dir",
    "describe",
    "fetch",
    "is_normalized",
    "load_dataset",
    "read_test_samples",
    "samples_of_pair",
]
