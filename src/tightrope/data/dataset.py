"""A data set in memory and the ways to take parts of it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tightrope.data.augmentation import Augmentation
from tightrope.data.batches import Batches, as_float
from tightrope.errors import UserError

FINGERPRINTED = 500  # samples at a time


@dataclass(frozen=True)
class Split:
    """Indices into the training set: what to train on and what to validate on.

    Both are sorted, and they are indices because copies of large data sets would not fit.
    """

    train: Tensor
    validation: Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, with what a network needs to know about them.

    Images are uint8 [N, C, H, W]; data of the user may also be float32 in [0, 1], and flat
    [N, D]. Labels are int64 in [0, number of classes). `mean` and `std`, one number per channel
    (one in total for flat data), are the suggested normalisation, in units of [0, 1] pixels.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        for part, x, y in (
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ):
            if len(x) != len(y):
                raise UserError(f"{self.name}: {len(x)} {part} samples but {len(y)} labels")
            if x.dtype not in (torch.uint8, torch.float32) or y.dtype != torch.int64:
                raise UserError(
                    f"{self.name}: {part} samples must be uint8 or float32 and labels int64, "
                    f"found {x.dtype} and {y.dtype}"
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise UserError(
                f"{self.name}: training samples of shape {tuple(self.x_train.shape[1:])} but "
                f"test samples of shape {tuple(self.x_test.shape[1:])}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample as the network sees it, after the test-time crop."""
        return self.augment.output_shape(tuple(self.x_train.shape[1:]))

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def split(self, validation: float | int, seed: int) -> Split:
        """Hold out part of the training set: a fraction in [0, 1) (float) or a count (int).

        The result depends on the arguments only, not on torch's global generator.
        """
        held_out = _held_out(validation, len(self.x_train))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.x_train), generator=generator)
        return Split(order[held_out:].sort().values, order[:held_out].sort().values)

    def subset(self, n_train: int | None = None, n_test: int | None = None) -> Dataset:
        """Return the data set with only the first samples (None: all of them)."""
        train = _first(n_train, len(self.x_train), f"{self.name} training")
        test = _first(n_test, len(self.x_test), f"{self.name} test")
        return dataclasses.replace(
            self,
            x_train=self.x_train[:train],
            y_train=self.y_train[:train],
            x_test=self.x_test[:test],
            y_test=self.y_test[:test],
        )

    def training_batches(
        self,
        batch_size: int,
        *,
        indices: Tensor | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> Batches:
        """Return shuffled, augmented batches of the training set (or of `indices` of it)."""
        return Batches(
            self.x_train,
            self.y_train,
            batch_size,
            training=True,
            augment=self.augment,
            indices=indices,
            drop_last=drop_last,
            device=device,
            generator=generator,
        )

    def validation_batches(
        self, batch_size: int, indices: Tensor, *, device: torch.device | str = "cpu"
    ) -> Batches:
        """Return batches of the given training samples in order, without augmentation."""
        return Batches(
            self.x_train,
            self.y_train,
            batch_size,
            augment=self.augment,
            indices=indices,
            device=device,
        )

    def test_batches(self, batch_size: int, *, device: torch.device | str = "cpu") -> Batches:
        """Return batches of the test set in order, centre-cropped if the data set crops."""
        return Batches(self.x_test, self.y_test, batch_size, augment=self.augment, device=device)

    def test_inputs(self, indices: Tensor) -> Tensor:
        """Return some test samples as the network gets them."""
        return as_float(self.augment.centre_crop(self.x_test[indices]))

    def renamed(self, classes: tuple[str, ...]) -> Dataset:
        """Return the data set with other names of its classes."""
        return dataclasses.replace(self, classes=classes)

    def fingerprints(self, indices: Tensor) -> Iterator[str]:
        """Yield a hash of each of these test samples: of its label and of its image."""
        for chosen in indices.split(FINGERPRINTED):
            images = self.test_inputs(chosen).numpy().astype("<f4", order="C", copy=False)
            for image, label in zip(images, self.y_test[chosen].tolist(), strict=True):
                yield _fingerprint(image, label)

    def digest(self) -> str:
        """Return a hash of all samples, their labels and the names of the classes."""
        content = hashlib.sha256(repr((self.classes, self.mean, self.std, self.augment)).encode())
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            content.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            content.update(tensor.contiguous().numpy().data)
        return content.hexdigest()[:16]

    def changed_sample(self, known: Mapping[int, str]) -> int | None:
        """Return the first test sample that does not have its known hash, None if all have."""
        here = [index for index in sorted(known) if 0 <= index < len(self.y_test)]
        if len(here) < len(known):
            return next(index for index in sorted(known) if index not in here)
        found = self.fingerprints(torch.tensor(here, dtype=torch.long))
        return next((i for i, hash in zip(here, found, strict=True) if known[i] != hash), None)


def _fingerprint(image: np.ndarray, label: int) -> str:
    content = hashlib.sha256(f"{label} {image.shape}\n".encode())
    content.update(image.data)
    return content.hexdigest()[:16]


def _held_out(validation: float | int, available: int) -> int:
    """Turn a fraction or a count into a count, or explain why it makes no sense."""
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise UserError(f"validation must be a fraction or a count, found {validation!r}")
    if isinstance(validation, float):
        if not 0 <= validation < 1:
            raise UserError(f"validation fraction must be in [0, 1), found {validation}")
        count = round(validation * available)
        if validation > 0 and count == 0:
            raise UserError(f"validation fraction {validation} of {available} samples is none")
    else:
        count = validation
    if not 0 <= count < available:
        raise UserError(f"cannot hold out {count} of {available} training samples for validation")
    return count


def _first(wanted: int | None, available: int, what: str) -> int:
    """Check how many samples a subset asks for."""
    if wanted is None:
        return available
    if not 1 <= wanted <= available:
        raise UserError(f"cannot take {wanted} {what} samples: there are {available}")
    return wanted
