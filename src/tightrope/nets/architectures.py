"""The networks of the certified-training literature, as plain `nn.Sequential`.

Every builder takes the shape of one input and the number of classes; its keyword arguments,
with their defaults, are the network's settings. `width` is the number of channels of the first
convolution (of each hidden layer in `mlp`); the other convolutions keep their ratio to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tightrope.errors import UserError
from tightrope.nets.layers import Residual, Stack


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 256,
    depth: int = 2,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Build `depth` hidden linear layers of `width` neurons; takes images and flat inputs."""
    stack = Stack(input_shape, batch_norm).flatten()
    for _ in range(depth):
        stack.linear(width)
    return stack.logits(num_classes)


def cnn3(
    input_shape: Sequence[int], num_classes: int, *, width: int = 16, batch_norm: bool = True
) -> nn.Sequential:
    """Build two convolutions and a linear layer; `width=1` is the literature's "tiny" net."""
    stack = Stack(input_shape, batch_norm)
    stack.conv(width, kernel=5, stride=2, padding=2)
    stack.conv(2 * width, kernel=4, stride=2, padding=1)
    return stack.flatten().logits(num_classes)


def cnn4(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 16,
    hidden: int = 512,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Build the convolutions of `cnn3` and two linear layers."""
    stack = Stack(input_shape, batch_norm)
    stack.conv(width, kernel=5, stride=2, padding=2)
    stack.conv(2 * width, kernel=4, stride=2, padding=1)
    return stack.flatten().linear(hidden).logits(num_classes)


def cnn5(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 16,
    hidden: int = 512,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Build three convolutions and two linear layers."""
    stack = Stack(input_shape, batch_norm)
    stack.conv(width, kernel=3, stride=1, padding=1)
    stack.conv(width, kernel=4, stride=2, padding=1)
    stack.conv(2 * width, kernel=4, stride=2, padding=1)
    return stack.flatten().linear(hidden).logits(num_classes)


def cnn7(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 64,
    hidden: int = 512,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Build five convolutions, the third of stride 2, and two linear layers."""
    stack = _first_four_of_cnn7(Stack(input_shape, batch_norm), width)
    stack.conv(2 * width, kernel=3, stride=1, padding=1)
    return stack.flatten().linear(hidden).logits(num_classes)


def cnn7_tin(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 64,
    hidden: int = 512,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Build `cnn7` for TinyImageNet, where the fifth convolution has stride 2 as well."""
    stack = _first_four_of_cnn7(Stack(input_shape, batch_norm), width)
    stack.conv(2 * width, kernel=3, stride=2, padding=1)
    return stack.flatten().linear(hidden).logits(num_classes)


def _first_four_of_cnn7(stack: Stack, width: int) -> Stack:
    stack.conv(width, kernel=3, stride=1, padding=1)
    stack.conv(width, kernel=3, stride=1, padding=1)
    stack.conv(2 * width, kernel=3, stride=2, padding=1)
    return stack.conv(2 * width, kernel=3, stride=1, padding=1)


def convmed(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 32,
    hidden: int = 250,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Build COLT's ConvMed: two convolutions and two linear layers."""
    stack = Stack(input_shape, batch_norm)
    stack.conv(width, kernel=5, stride=2, padding=2)
    stack.conv(4 * width, kernel=4, stride=2, padding=1)
    return stack.flatten().linear(hidden).logits(num_classes)


def convmedbig(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 32,
    hidden: int = 250,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Build COLT's ConvMedBig: three convolutions and two linear layers."""
    stack = Stack(input_shape, batch_norm)
    stack.conv(width, kernel=3, stride=1, padding=1)
    stack.conv(width, kernel=4, stride=2, padding=1)
    stack.conv(4 * width, kernel=4, stride=2, padding=1)
    return stack.flatten().linear(hidden).logits(num_classes)


def resnet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 16,
    blocks: int = 3,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Build a small residual network; each block halves the image and doubles the channels."""
    stack = Stack(input_shape, batch_norm).conv(width, kernel=3, stride=1, padding=1)
    for _ in range(blocks):
        incoming, height, breadth = stack.image()
        if height == breadth == 1:
            _, *size = stack.input_shape
            raise UserError(f"images of {size[0]}x{size[1]} are too small for {blocks} blocks")
        block = Residual(incoming, 2 * incoming, batch_norm)
        stack.add(block, (2 * incoming, (height + 1) // 2, (breadth + 1) // 2))
    channels, height, breadth = stack.image()
    # A fixed window instead of adaptive pooling: every verifier and ONNX reader knows it.
    stack.add(nn.AvgPool2d((height, breadth)), (channels, 1, 1))
    return stack.flatten().logits(num_classes)
