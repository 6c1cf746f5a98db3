"""The pieces that the architectures are put together from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from tightrope.errors import UserError
from tightrope.graph.windows import Side


class Stack:
    """A list of layers under construction that knows the shape leaving its last layer.

    Keeping the shape lets every architecture take inputs of any size: the first linear layer
    after a convolution gets its width from here.
    """

    def __init__(self, input_shape: Sequence[int], batch_norm: bool) -> None:
        self.input_shape = tuple(input_shape)
        self.shape = self.input_shape
        self.batch_norm = batch_norm
        self.layers: list[nn.Module] = []

    def conv(self, channels: int, kernel: int, stride: int, padding: int) -> Self:
        """Add a convolution with its BatchNorm (if any) and ReLU."""
        incoming, height, width = self.image()
        shape = (
            channels,
            self._conv_size(height, kernel, stride, padding),
            self._conv_size(width, kernel, stride, padding),
        )
        self.add(nn.Conv2d(incoming, channels, kernel, stride, padding), shape)
        if self.batch_norm:
            self.add(nn.BatchNorm2d(channels), shape)
        return self.add(nn.ReLU(), shape)

    def flatten(self) -> Self:
        """Add the step from images to vectors."""
        return self.add(nn.Flatten(), (math.prod(self.shape),))

    def linear(self, size: int) -> Self:
        """Add a hidden linear layer with its BatchNorm (if any) and ReLU."""
        self.add(nn.Linear(self.shape[0], size), (size,))
        if self.batch_norm:
            self.add(nn.BatchNorm1d(size), (size,))
        return self.add(nn.ReLU(), (size,))

    def logits(self, num_classes: int) -> nn.Sequential:
        """Add the last layer, which has neither BatchNorm nor ReLU, and return the network."""
        self.add(nn.Linear(self.shape[0], num_classes), (num_classes,))
        return nn.Sequential(*self.layers)

    def add(self, layer: nn.Module, shape: tuple[int, ...]) -> Self:
        """Add any layer, whose output has the given shape."""
        self.layers.append(layer)
        self.shape = shape
        return self

    def image(self) -> tuple[int, int, int]:
        """Return the current shape, which has to be that of an image."""
        if len(self.shape) != 3:
            raise UserError(
                f"a convolutional network needs inputs of shape (channels, height, width), "
                f"got {self.input_shape}"
            )
        channels, height, width = self.shape
        return channels, height, width

    def _conv_size(self, size: int, kernel: int, stride: int, padding: int) -> int:
        """Return what a convolution makes of one side of the image."""
        result = Side(size, kernel, stride, padding, padding).windows()
        if result < 1:
            _, height, width = self.input_shape
            raise UserError(
                f"images of {height}x{width} are too small for this network: its convolution "
                f"number {self._convolutions() + 1} has nothing left to work on"
            )
        return result

    def _convolutions(self) -> int:
        return sum(isinstance(layer, nn.Conv2d) for layer in self.layers)


class Residual(nn.Module):
    """A basic residual block that halves the image: two 3x3 convolutions beside a 1x1 one."""

    def __init__(self, incoming: int, channels: int, batch_norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(incoming, channels, 3, stride=2, padding=1),
            *_batch_norm(channels, batch_norm),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=1, padding=1),
            *_batch_norm(channels, batch_norm),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(incoming, channels, 1, stride=2),
            *_batch_norm(channels, batch_norm),
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return self.relu(self.body(x) + self.shortcut(x))


def _batch_norm(channels: int, batch_norm: bool) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels)] if batch_norm else []
