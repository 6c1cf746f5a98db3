"""The networks of the certified-training literature, as plain `nn.Sequential`.

Every builder takes the shape of one input and the number of classes; its keyword arguments are the
network's settings, whose defaults are in `summaries.py`. `width` is the number of channels of the
first convolution (of each hidden layer in `mlp`); the other convolutions keep their ratio to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from tightrope.errors import UserError
from tightrope.nets.distance import Bias, Distance, FixedScale, MeanShift, Nearest
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


def distance_net(
    input_shape: Sequence[int], num_classes: int, *, width: int, depth: int, keep: int = 100
) -> nn.Sequential:
    """Build `depth` layers of distances; `keep` is SortNet's share of kept inputs, in percent."""
    layers, size = _distances(input_shape, width, depth - 1, keep)
    last = Distance(size, num_classes, _share(keep) if depth > 1 else 1.0)
    return nn.Sequential(*layers, last, Bias(num_classes), Nearest())


def distance_mlp(
    input_shape: Sequence[int], num_classes: int, *, width: int, depth: int, keep: int, hidden: int
) -> nn.Sequential:
    """Build `depth - 2` layers of distances and two linear ones with a tanh between them."""
    if depth < 3:
        raise UserError(f"depth of 'sortnet-mlp' counts two linear layers: at least 3, got {depth}")
    layers, size = _distances(input_shape, width, depth - 2, keep)
    head = (*_scaled_linear(size, hidden), nn.Tanh(), *_scaled_linear(hidden, num_classes))
    return nn.Sequential(*layers, *head)


def _scaled_linear(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """Return a layer of standard normal weights, whose inputs are scaled instead of them."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight)
    nn.init.zeros_(linear.bias)
    return FixedScale(inputs), linear


def _distances(
    input_shape: Sequence[int], width: int, count: int, keep: int
) -> tuple[list[nn.Module], int]:
    """Return hidden layers of distances, the first of which sees all inputs, and their width."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = math.prod(input_shape)
    for i in range(count):
        layers += [Distance(size, width, _share(keep) if i else 1.0), MeanShift(width)]
        size = width
    return layers, size


def _share(keep: int) -> float:
    if not 1 <= keep <= 100:
        raise UserError(f"keep is a share of inputs in percent, from 1 to 100, got {keep}")
    return keep / 100


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
    "linf-dist": distance_net,
    "sortnet": distance_net,
    "sortnet-mlp": distance_mlp,
}
