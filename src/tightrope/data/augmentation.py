"""Random flips and crops of a whole batch of images at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.devices import upload
from tightrope.errors import UserError


@dataclass(frozen=True)
class Augmentation:
    """Horizontal flips and random square crops, both drawn per sample.

    `crop` is the output size (None: no cropping); `padding` repeats the edge pixels that many
    times on every side before cropping. Works on uint8 and on float images [N, C, H, W].
    """

    flip: bool = False
    crop: int | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise UserError(f"augmentation padding must not be negative, found {self.padding}")
        if self.crop is not None and self.crop < 1:
            raise UserError(f"augmentation crop must be at least 1 pixel, found {self.crop}")
        if self.crop is None and self.padding:
            raise UserError("augmentation padding needs a crop size")

    @property
    def active(self) -> bool:
        """Whether random augmentation changes anything."""
        return self.flip or self.crop is not None

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample after cropping, given its shape before."""
        if not self.active:
            return shape
        if len(shape) != 3:
            raise UserError(f"augmentation needs images [C, H, W], found samples of shape {shape}")
        if self.crop is None:
            return shape
        if self.crop > min(shape[1:]):
            raise UserError(f"crop size {self.crop} is larger than the images {shape}")
        return (shape[0], self.crop, self.crop)

    def randomize(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Flip and crop each image of a batch at random; for training.

        All random numbers come from the CPU generator, whatever the device of the images, so
        a seed means the same augmentation everywhere.
        """
        if not self.active:
            return images
        _, out_height, out_width = self.output_shape(tuple(images.shape[1:]))
        size, _, height, width = images.shape
        flipped = torch.zeros(size, dtype=torch.bool)
        if self.flip:
            flipped = torch.rand(size, generator=generator) < 0.5
        rows = self._offsets(size, height, out_height, generator)
        columns = self._offsets(size, width, out_width, generator)
        return _gather(images, rows, columns, flipped, (out_height, out_width), self.padding)

    def centre_crop(self, images: Tensor) -> Tensor:
        """Cut the middle of each image when `crop` is smaller than it; for evaluation."""
        if self.crop is None:
            return images
        self.output_shape(tuple(images.shape[1:]))
        height, width = images.shape[2:]
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        return images[..., top : top + self.crop, left : left + self.crop]

    def _offsets(
        self, count: int, size: int, out: int, generator: torch.Generator | None
    ) -> Tensor:
        """Draw where each crop starts, in coordinates of the padded image."""
        return torch.randint(0, size + 2 * self.padding - out + 1, (count,), generator=generator)


def _gather(
    images: Tensor,
    tops: Tensor,
    lefts: Tensor,
    flipped: Tensor,
    out: tuple[int, int],
    padding: int,
) -> Tensor:
    """Flip, edge-pad and crop by looking up one source pixel per output pixel.

    Clamping the coordinates is the edge padding and mirroring them is the flip, so neither
    the padded nor the flipped images are ever built.
    """
    size, channels, height, width = images.shape
    device = images.device
    rows = tops[:, None] + torch.arange(out[0]) - padding
    columns = lefts[:, None] + torch.arange(out[1]) - padding
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    columns = torch.where(flipped[:, None], width - 1 - columns, columns)
    rows, columns = upload(rows, device), upload(columns, device)
    source = (rows[:, :, None] * width + columns[:, None, :]).view(size, 1, -1)
    pixels = images.flatten(2).gather(2, source.expand(-1, channels, -1))
    return pixels.view(size, channels, *out)
