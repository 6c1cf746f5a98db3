"""Convolutions and pools in three dimensions, made of those of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.composed import Shape, places, taken
from tightrope.graph.values import Maker, pair, refuse
from tightrope.graph.windows import Side

Pool = Callable[[Any, Any, Any, Any], ops.Op]  # of kernel, stride, padding, dilation


def convolved(
    make: Maker,
    x: int,
    weight: Tensor,
    bias: Tensor | None,
    sides: Sequence[Side],
    groups: int,
) -> int:
    """Append a convolution with a weight [outputs, channels, depth, height, width].

    The layers that a tap in depth looks at are channels, and the outputs in depth lie in one high
    image, with enough room that windows begin where each of them does.
    """
    deep, high, wide = sides
    refuse(min(side.free for side in sides) < 0, "a kernel larger than its input")
    pads = [pad for side in (wide, high, deep) for pad in (side.before, side.after)]
    if any(pads):
        x = make.append(ops.Pad(tuple(pads), 0.0), x)
    padded = make.shape_of(x)
    with torch.enable_grad():  # a view of the weight, whatever the mode at present
        flat = weight.flatten(1, 2)
    steps, apart = (high.stride, wide.stride), (high.dilation, wide.dilation)
    conv = ops.Conv2d(flat, bias, steps, (0, 0), apart, groups)
    image = make.append(conv, taken(make, x, _layers(padded, deep, high)))
    every = -(-padded[2] // high.stride)
    rows = torch.arange(deep.windows())[:, None] * every + torch.arange(high.windows())
    return taken(make, image, places(make.shape_of(image))[:, rows])


def _layers(shape: Shape, deep: Side, high: Side) -> Tensor:
    """Return where the numbers of the high image come from; what fills it up is never looked at."""
    channels, _, height, width = shape
    taps = torch.arange(deep.kernel) * deep.dilation
    layers = taps[:, None] + torch.arange(deep.windows()) * deep.stride
    rows = torch.arange(-(-height // high.stride) * high.stride).clamp(max=height - 1)
    found = places(shape)[:, layers][:, :, :, rows]
    return found.reshape(channels * deep.kernel, -1, width)


def pooled(make: Maker, x: int, pool: Pool, options: Sequence[Sequence[int]]) -> int:
    """Append a pool: means and maxima of boxes are those of means and maxima of their layers.

    `options` are kernel, stride, padding and dilation along each of the three dimensions.
    """
    channels, depth, height, width = make.shape_of(x)
    x = make.append(ops.Reshape((channels * depth, height, width)), x)
    x = make.append(pool(*(pair(option[1:]) for option in options)), x)
    _, *size = make.shape_of(x)
    x = make.append(ops.Reshape((channels, depth, math.prod(size))), x)
    deep = ((option[0], rest) for rest, option in zip((1, 1, 0, 1), options, strict=True))
    x = make.append(pool(*deep), x)
    return make.append(ops.Reshape((channels, make.shape_of(x)[1], *size)), x)
