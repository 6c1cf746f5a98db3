"""The networks of the certified-training literature, as plain `nn.Sequential`.

Every builder takes the shape of one input and the number of classes; its keyword arguments are the
network's settings, whose defaults are in `summaries.py`. `width` is the number of channels of the
first convolution (of each hidden layer in `mlp`); the other convolutions keep their ratio to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from tightrope.errors import UserError
from tightrope.nets.layers import Residual, Stack

Convolution = tuple[int, int, int, int]  # channels in widths, kernel, stride, padding


def mlp(
    input_shape: Sequence[int], num_classes: int, *, width: int, depth: int, batch_norm: bool
) -> nn.Sequential:
    """Build `depth` hidden linear layers of `width` neurons; takes images and flat inputs."""
    stack = Stack(input_shape, batch_norm).flatten()
    for _ in range(depth):
        stack.linear(width)
    return stack.logits(num_classes)


def convolutional(
    convolutions: Sequence[Convolution],
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int,
    batch_norm: bool,
    hidden: int | None = None,
) -> nn.Sequential:
    """Build convolutions and a linear layer, or two with `hidden` neurons between them."""
    stack = Stack(input_shape, batch_norm)
    for channels, kernel, stride, padding in convolutions:
        stack.conv(channels * width, kernel, stride, padding)
    stack.flatten()
    if hidden is not None:
        stack.linear(hidden)
    return stack.logits(num_classes)


def resnet(
    input_shape: Sequence[int], num_classes: int, *, width: int, blocks: int, batch_norm: bool
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


_CNN7 = ((1, 3, 1, 1), (1, 3, 1, 1), (2, 3, 2, 1), (2, 3, 1, 1))
_CONVOLUTIONS: dict[str, tuple[Convolution, ...]] = {
    "cnn3": ((1, 5, 2, 2), (2, 4, 2, 1)),
    "cnn4": ((1, 5, 2, 2), (2, 4, 2, 1)),
    "cnn5": ((1, 3, 1, 1), (1, 4, 2, 1), (2, 4, 2, 1)),
    "cnn7": (*_CNN7, (2, 3, 1, 1)),
    "cnn7-tin": (*_CNN7, (2, 3, 2, 1)),
    "convsmall": ((1, 4, 2, 0), (2, 4, 2, 0)),
    "convmed": ((1, 5, 2, 2), (4, 4, 2, 1)),
    "convmedbig": ((1, 3, 1, 1), (1, 4, 2, 1), (4, 4, 2, 1)),
}
BUILDERS: dict[str, Callable[..., nn.Sequential]] = {
    "mlp": mlp,
    **{name: partial(convolutional, found) for name, found in _CONVOLUTIONS.items()},
    "resnet": resnet,
}
