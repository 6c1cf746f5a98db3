"""Convolutional networks like those of vision libraries: residual, mobile, U-shaped, a line."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _convolution(
    before: int, after: int, size: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class Residual(nn.Module):
    """Two convolutions beside the way past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(before, after, stride=stride)
        self.second = _convolution(after, after)
        same = stride == 1 and before == after
        self.past = nn.Identity() if same else _convolution(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.past(x))


class ResNet18(nn.Module):
    """The 18 layers of torchvision's, with the stem of small images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        blocks, before = [], width
        for i, after in enumerate((width, 2 * width, 4 * width, 8 * width)):
            blocks += [Residual(before, after, 1 if i == 0 else 2), Residual(after, after, 1)]
            before = after
        self.stem, self.blocks = _convolution(3, width), nn.Sequential(*blocks)
        self.head = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Inverted(nn.Module):
    """Wider, by channel, narrow again: the block of MobileNetV2."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 3 * before
        self.layers = nn.Sequential(
            *(_convolution(before, wide, 1), nn.ReLU6()),
            *(_convolution(wide, wide, 3, stride, wide), nn.ReLU6()),
            _convolution(wide, after, 1),
        )
        self.same = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.same else self.layers(x)


class MobileNet(nn.Sequential):
    """A few blocks of MobileNetV2."""

    def __init__(self) -> None:
        super().__init__(
            *(_convolution(3, 8, stride=2), nn.ReLU6()),
            *(Inverted(8, 8, 1), Inverted(8, 16, 2), Inverted(16, 16, 1), Inverted(16, 24, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, 10)),
        )


class UNet(nn.Module):
    """Down twice, up twice by transposed convolutions, joined with what was there; then classes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.top, self.middle = _convolution(3, width), _convolution(width, 2 * width)
        self.bottom = _convolution(2 * width, 4 * width)
        self.rise = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join = _convolution(4 * width, 2 * width)
        self.rise_again = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join_again = _convolution(2 * width, width)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        top = F.relu(self.top(x))
        middle = F.relu(self.middle(F.max_pool2d(top, 2)))
        low = self.rise(F.relu(self.bottom(F.max_pool2d(middle, 2))))
        middle = F.relu(self.join(torch.cat([middle, low], 1)))
        top = F.relu(self.join_again(torch.cat([top, self.rise_again(middle)], 1)))
        return self.head(F.avg_pool2d(top, 8).flatten(1))


class Line(nn.Module):
    """A one-dimensional network over the rows of an image, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(3, 8, 7, 4, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(4)),
            *(nn.Conv1d(8, 16, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten()),
            *(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(2))
