"""Networks of layers that copy and bend: like MobileNet, like a U-Net, and one of lines."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """A convolution of each channel by itself, and one of single pixels, as in MobileNet."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(inplace=True),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


def mobile() -> nn.Module:
    """A small network like MobileNet."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(inplace=True),
        separable(8, 16, 2),
        separable(16, 16, 1),
        separable(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class UNet(nn.Module):
    """Down by pools, up by transposed convolutions, with what was there before beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.third = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.wider = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.fourth = nn.Sequential(nn.Conv2d(16, 6, 3, padding=1), nn.ReLU())
        self.widest = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Sequential(nn.Conv2d(10, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 10, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each class: the mean over all pixels."""
        first = self.first(x)
        second = self.second(first)
        wide = self.fourth(torch.cat((second, self.wider(self.third(second))), 1))
        return self.last(torch.cat((first, self.widest(wide)), 1)).mean((2, 3))


class Lines(nn.Module):
    """A network of the rows of an image as channels of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(96, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(16, 16, 3, padding=1),
            nn.PReLU(16),
            nn.MaxPool1d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.layers(x.flatten(1, 2))


MODULES = {"mobile": mobile, "unet": UNet, "lines": Lines}


def made(name: str) -> nn.Module:
    """Return a network with the weights of seed 0, in evaluation mode."""
    torch.manual_seed(0)
    return MODULES[name]().eval()
