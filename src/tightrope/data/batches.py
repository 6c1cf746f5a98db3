"""Batches of float images, made on the device from uint8 images in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tightrope.data.augmentation import Augmentation
from tightrope.devices import upload
from tightrope.errors import UserError


def as_float(images: Tensor) -> Tensor:
    """Return images as float32 in [0, 1]: uint8 is divided by 255, float32 stays as it is."""
    if images.dtype == torch.uint8:
        return images.to(torch.float32).div_(255)
    if images.dtype == torch.float32:
        return images
    raise TypeError(f"images must be uint8 or float32, not {images.dtype}")


class Batches:
    """Iterates over `(x, y)` batches: x float32 in [0, 1], y int64, both on `device`.

    With `training`, the samples are shuffled and randomly augmented anew in each iteration;
    otherwise they come in order, centre-cropped if the augmentation crops. Randomness comes
    from `generator` (a CPU one), or from torch's global generator, and from nowhere else.
    `indices` restricts the batches to some of the samples without copying them.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        *,
        training: bool = False,
        augment: Augmentation | None = None,
        indices: Tensor | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> None:
        self.images, self.labels, self.indices = images, labels, indices
        self.batch_size, self.drop_last, self.training = batch_size, drop_last, training
        self.augment = augment or Augmentation()
        self.device, self.generator = torch.device(device), generator
        if len(images) != len(labels):
            raise UserError(f"{len(images)} images but {len(labels)} labels")
        if batch_size < 1:
            raise UserError(f"batch size must be at least 1, found {batch_size}")
        if drop_last and 0 < self.samples < batch_size:
            raise UserError(f"batch size {batch_size} is larger than the {self.samples} samples")

    @property
    def samples(self) -> int:
        """The number of samples to draw from (a dropped last batch included)."""
        return len(self.images) if self.indices is None else len(self.indices)

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._order()
        loaded = self._loaded(order)
        if self.device.type == "cpu":
            yield from map(self._batch, loaded)
            return
        # One ahead: its copy to the device goes on while the device works on the one before.
        ahead = next(loaded, None)
        while ahead is not None:
            present, ahead = ahead, next(loaded, None)
            yield self._batch(present)

    def _loaded(self, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels of each batch on the device, as they are stored."""
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            place = slice(start, min(start + self.batch_size, self.samples))
            # Slicing where there is no order to follow makes a view, not a copy.
            chosen = place if order is None else order[place]
            images, labels = _chosen(self.images, chosen), _chosen(self.labels, chosen)
            yield upload(images, self.device), upload(labels, self.device)

    def _order(self) -> Tensor | None:
        """Return the sample indices of one pass, or None for all samples in order."""
        if not self.training:
            return self.indices
        shuffled = torch.randperm(self.samples, generator=self.generator)
        return shuffled if self.indices is None else self.indices[shuffled]

    def _batch(self, loaded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Make one batch; only here do images become float."""
        images, labels = loaded
        if self.training:
            images = self.augment.randomize(images, self.generator)
        else:
            images = self.augment.centre_crop(images)
        return as_float(images), labels


def _chosen(samples: Tensor, chosen: Tensor | slice) -> Tensor:
    """Take samples; `index_select` copies whole images, many times faster than indexing."""
    if isinstance(chosen, slice):
        return samples[chosen]
    return samples.index_select(0, chosen.to(samples.device))
