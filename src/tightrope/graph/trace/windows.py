"""Converters of convolutions, pools and interpolation, in one to three dimensions.

What has one dimension is an image of height one. Weights with a dimension more or less are views of
the module's own, so that they stay up to date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import composed, ops, volumes
from tightrope.graph.values import Composed, Value, apply, pair, refuse
from tightrope.graph.windows import Side

Shape = tuple[int, ...]


def _view(weight: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a view of a weight that gradients pass through, whatever the mode at present."""
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    with torch.enable_grad():
        return view(weight)


def _sizes(given: Any, count: int) -> tuple[int, ...]:
    """Read a size for each dimension, which torch takes as one number, too."""
    values = list(given) if isinstance(given, tuple | list) else [given]
    values = values * count if len(values) == 1 else values
    refuse(len(values) != count, f"{len(values)} sizes for {count} dimensions")
    return tuple(int(value) for value in values)


def _check_rank(x: Value, count: int) -> None:
    refuse(len(x.shape) != count + 1, f"samples of shape {x.shape} in {count} dimensions")


def _of_images(x: Value, *operations: ops.Op) -> Composed:
    """Ask for operations on images of height one, of which lines are made again."""

    def build(make: Any) -> int:
        position = make.append(ops.Reshape((x.shape[0], 1, x.shape[1])), x.position)
        for op in operations:
            position = make.append(op, position)
        channels, height, width = make.shape_of(position)
        refuse(height != 1, f"lines of height {height}")
        return int(make.append(ops.Reshape((channels, width)), position))

    return Composed(build)


# --- convolutions ---------------------------------------------------------------------------


def _conv2d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    steps = pair(dilation)
    before, inside = _explicit_padding(x.shape, padding, weight, steps)
    return apply(x, *before, ops.Conv2d(weight, bias, pair(stride), inside, steps, groups))


def _explicit_padding(
    shape: Shape, padding: Any, weight: Tensor, dilation: Sequence[int]
) -> tuple[tuple[ops.Op, ...], ops.Pair]:
    """Resolve `padding="same"`; an odd total needs a padding layer of its own."""
    if not isinstance(padding, str):
        return (), pair(padding)
    sides = _same_padding(shape, padding, weight, dilation)
    (top, bottom), (left, right) = sides
    if (top, left) == (bottom, right):
        return (), (top, left)
    return (ops.Pad((left, right, top, bottom), 0.0),), (0, 0)


def _same_padding(
    shape: Shape, padding: str, weight: Tensor, dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and after, for each dimension of the kernel."""
    kernel = weight.shape[2:]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    sizes = zip(shape[-len(kernel) :], kernel, dilation, strict=True)
    return [Side(size, taps, dilation=step).same for size, taps, step in sizes]


def _conv1d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    _check_rank(x, 1)
    weight = _view(weight, lambda w: w.unsqueeze(2))
    steps = (1, *_sizes(dilation, 1))
    inside = padding if isinstance(padding, str) else (0, *_sizes(padding, 1))
    before, around = _explicit_padding((x.shape[0], 1, x.shape[1]), inside, weight, steps)
    stride = (1, *_sizes(stride, 1))
    return _of_images(x, *before, ops.Conv2d(weight, bias, stride, around, pair(steps), groups))


def _conv3d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    _check_rank(x, 3)
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    strides, steps = _sizes(stride, 3), _sizes(dilation, 3)
    if isinstance(padding, str):
        pads = _same_padding(x.shape, padding, weight, steps)
    else:
        pads = [(p, p) for p in _sizes(padding, 3)]
    found = [
        Side(size, taps, step, *pad, apart)
        for size, taps, step, pad, apart in zip(
            x.shape[1:], weight.shape[2:], strides, pads, steps, strict=True
        )
    ]
    return Composed(lambda make: volumes.convolved(make, x.position, weight, bias, found, groups))


def _conv_transpose2d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    _check_rank(x, 2)
    options = (pair(stride), pair(padding), pair(output_padding), pair(dilation))
    return apply(x, *composed.transposed(weight, bias, *options, groups))


def _conv_transpose1d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    _check_rank(x, 1)
    weight = _view(weight, lambda w: w.unsqueeze(2))
    given = (stride, padding, output_padding, dilation)
    strides, pads, extra, steps = (
        pair((default, *_sizes(g, 1))) for default, g in zip((1, 0, 0, 1), given, strict=True)
    )
    found = composed.transposed(weight, bias, strides, pads, extra, steps, groups)
    return _of_images(x, *found)


# --- pools ----------------------------------------------------------------------------------


def _pooled(x: Value, count: int, given: Sequence[Any], pool: volumes.Pool) -> Any:
    """Ask for a pool in so many dimensions."""
    _check_rank(x, count)
    options = [_sizes(g, count) for g in given]
    if count == 1:
        flat = ((d, *option) for d, option in zip((1, 1, 0, 1), options, strict=True))
        return _of_images(x, pool(*flat))
    if count == 2:
        return apply(x, pool(*options))
    return Composed(lambda make: volumes.pooled(make, x.position, pool, options))


def _avg_pool(count: int) -> Callable[..., Any]:
    def convert(
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        refuse(divisor_override is not None, "divisor_override")
        given = (kernel_size, stride or kernel_size, padding, 1)
        return _pooled(
            x, count, given, lambda k, s, p, d: ops.AvgPool(k, s, p, ceil_mode, count_include_pad)
        )

    return convert


def _max_pool(count: int) -> Callable[..., Any]:
    def convert(
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        given = (kernel_size, stride or kernel_size, padding, dilation)
        return _pooled(x, count, given, lambda k, s, p, d: ops.MaxPool(k, s, p, d, ceil_mode))

    return convert


def _max_pool_and_indices(x: Value, *options: Any) -> Any:
    raise NotImplementedError("return_indices")


def _adaptive_avg_pool(count: int) -> Callable[..., Any]:
    def convert(x: Value, output_size: Any) -> Any:
        _check_rank(x, count)
        given = output_size if isinstance(output_size, tuple | list) else [output_size] * count
        sizes = [after or size for after, size in zip(given, x.shape[1:], strict=True)]
        if any(size % after for size, after in zip(x.shape[1:], sizes, strict=True)):
            return Composed(lambda make: composed.adaptive_mean(make, x.position, sizes))
        kernel = [size // after for size, after in zip(x.shape[1:], sizes, strict=True)]
        return _avg_pool(count)(x, kernel)

    return convert


def _adaptive_max_pool(count: int) -> Callable[..., Any]:
    """The largest numbers, and no places."""

    def convert(x: Value, output_size: Any) -> Any:
        _check_rank(x, count)
        sizes = _sizes(output_size, count)
        return Composed(lambda make: (composed.adaptive_largest(make, x.position, sizes), None))

    return convert


# --- windows as numbers of their own --------------------------------------------------------


def _unfold(x: Value, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The numbers of each window: a convolution that has one weight of one for each."""
    _check_rank(x, 2)
    weight = composed.unfolding(x.shape[0], pair(kernel))
    conv = ops.Conv2d(weight, None, pair(stride), pair(padding), pair(dilation), x.shape[0])

    def build(make: Any) -> int:
        found = make.append(conv, x.position)
        taps, *windows = make.shape_of(found)
        return composed.shaped(make, found, (taps, math.prod(windows)))

    return Composed(build)


def _fold(x: Value, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Windows added up where they overlap: the transposed convolution."""
    _check_rank(x, 1)
    given = zip(*map(pair, (size, kernel, dilation, padding, stride)), strict=True)
    sides = [Side(s, k, step, p, p, d) for s, k, d, p, step in given]
    counts = [side.windows() for side in sides]
    channels = x.shape[0] // math.prod(pair(kernel))
    weight = composed.unfolding(channels, pair(kernel))
    extra = tuple(side.free - (n - 1) * side.stride for side, n in zip(sides, counts, strict=True))
    options = (pair(stride), pair(padding), (extra[0], extra[1]), pair(dilation))

    def build(make: Any) -> int:
        position = composed.shaped(make, x.position, (x.shape[0], *counts))
        for op in composed.transposed(weight, None, *options, channels):
            position = make.append(op, position)
        return int(position)

    return Composed(build)


# --- interpolation --------------------------------------------------------------------------


def _linear_upsample(count: int) -> Callable[..., Any]:
    """Interpolation between neighbours, along one dimension after the other."""

    def convert(
        x: Value, output_size: Any, align_corners: bool, scale_factors: Any = None, *more: Any
    ) -> Any:
        _check_rank(x, count)
        refuse(bool(more), "scales of that form")
        sizes = list(output_size) if output_size is not None else [None] * count
        scales = list(scale_factors) if scale_factors is not None else [None] * count

        def build(make: Any) -> int:
            position = x.position
            for axis, (size, scale) in enumerate(zip(sizes, scales, strict=True), start=1):
                units = torch.eye(x.shape[axis], dtype=make.probe.dtype)
                shares = torch.ops.aten.upsample_linear1d.vec(
                    units.unsqueeze(0),
                    None if size is None else [size],
                    align_corners,
                    None if scale is None else [scale],
                )[0]
                position = composed.along(make, position, axis, shares.T.contiguous())
            return position

        return Composed(build)

    return convert


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.conv1d: _conv1d,
    aten.conv2d: _conv2d,
    aten.conv3d: _conv3d,
    aten.conv_transpose1d: _conv_transpose1d,
    aten.conv_transpose2d: _conv_transpose2d,
    aten.avg_pool1d: _avg_pool(1),
    aten.avg_pool2d: _avg_pool(2),
    aten.avg_pool3d: _avg_pool(3),
    aten.max_pool1d: _max_pool(1),
    aten.max_pool2d: _max_pool(2),
    aten.max_pool3d: _max_pool(3),
    aten.max_pool1d_with_indices: _max_pool_and_indices,
    aten.max_pool2d_with_indices: _max_pool_and_indices,
    aten.max_pool3d_with_indices: _max_pool_and_indices,
    aten.adaptive_avg_pool1d: _adaptive_avg_pool(1),
    aten.adaptive_avg_pool2d: _adaptive_avg_pool(2),
    aten.adaptive_avg_pool3d: _adaptive_avg_pool(3),
    aten.adaptive_max_pool1d: _adaptive_max_pool(1),
    aten.adaptive_max_pool2d: _adaptive_max_pool(2),
    aten.adaptive_max_pool3d: _adaptive_max_pool(3),
    aten.im2col: _unfold,
    aten.col2im: _fold,
    aten.upsample_linear1d: _linear_upsample(1),
    aten.upsample_bilinear2d: _linear_upsample(2),
    aten.upsample_trilinear3d: _linear_upsample(3),
}
