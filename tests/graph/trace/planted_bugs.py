"""Bugs to plant in converters, each with a module that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from handmade_modules import Call
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.trace import elementwise
from tightrope.graph.values import Apply, Composed, Value, apply

aten = torch.ops.aten
FLAT, SQUARE, IMAGE = (4,), (3, 3), (2, 5, 5)
Convert = Callable[..., Any]


@dataclass(frozen=True)
class Bug:
    """A module that shows a bug, and the converters (of one or more operators) with it."""

    forward: Callable[[Call, Tensor], Tensor]
    shape: tuple[int, ...]
    convert: Callable[[Convert], Convert]
    operators: tuple[Any, ...]


def bug(
    forward: Callable[[Call, Tensor], Tensor],
    shape: tuple[int, ...],
    convert: Callable[[Convert], Convert],
    *operators: Any,
) -> Bug:
    return Bug(forward, shape, convert, operators)


class Meddling:
    """A maker of graphs that changes operations, or what they read."""

    def __init__(self, make: Any, op: Callable[[Any], ops.Op], inputs: Callable[[Any], Any]):
        self.make, self.op, self.inputs = make, op, inputs
        self.changed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.make, name)

    def append(self, op: ops.Op, *inputs: int) -> int:
        made, given = self.op(op), self.inputs(inputs)
        self.changed |= made is not op or given != inputs
        return self.make.append(made, *given)


def meddled(
    found: Composed,
    op: Callable[[Any], ops.Op] = lambda op: op,
    inputs: Callable[[Any], Any] = lambda inputs: inputs,
) -> Composed:
    """The same composition by a maker that meddles with it."""

    def build(make: Any) -> Any:
        meddling = Meddling(make, op, inputs)
        result = found.build(meddling)
        assert meddling.changed
        return result

    return Composed(build)


def changed(kind: type[ops.Op], change: Callable[[Any], ops.Op]) -> Callable[[Convert], Convert]:
    """A converter whose operations of one kind are changed afterwards."""

    def wrap(convert: Convert) -> Convert:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = convert(*args, **kwargs)
            if isinstance(found, Composed):
                return meddled(found, lambda op: change(op) if isinstance(op, kind) else op)
            made = tuple(change(op) if isinstance(op, kind) else op for op in found.operations)
            assert made != found.operations
            return replace(found, operations=made)

        return wrong

    return wrap


def fields(kind: type[ops.Op], **values: Any) -> Callable[[Convert], Convert]:
    """A converter with other values of some fields; functions are applied to the right ones."""

    def change(op: Any) -> ops.Op:
        new = {k: v(getattr(op, k)) if callable(v) else v for k, v in values.items()}
        return replace(op, **new)

    return changed(kind, change)


def instead(wrong: Convert) -> Callable[[Convert], Convert]:
    return lambda convert: wrong


def inputs(
    change: Callable[[tuple[Value, ...]], tuple[Value, ...]],
) -> Callable[[Convert], Convert]:
    """A converter that reads other values."""

    def wrap(convert: Convert) -> Convert:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = convert(*args, **kwargs)
            if isinstance(found, Composed):
                return meddled(found, inputs=lambda given: change(given) if given[1:] else given)
            assert isinstance(found, Apply)
            return replace(found, inputs=change(found.inputs))

        return wrong

    return wrap


def swapped(pair: tuple[int, int]) -> tuple[int, int]:
    return pair[::-1]


def larger(pair: tuple[int, int]) -> tuple[int, int]:
    return (pair[0] + 1, pair[1] + 1)


def shifted(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Slices and indices that begin one later."""
    moved = [
        slice(i.start + 1, i.stop + 1, i.step) if isinstance(i, slice) and i.start else i
        for i in index
    ]
    return tuple(i + 1 if isinstance(i, int) else i for i in moved)


def along_the_last(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1) if tensor.dim() > 1 else tensor


def pads(first: int, second: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    def exchange(found: tuple[int, ...]) -> tuple[int, ...]:
        values = list(found)
        values[first], values[second] = values[second], values[first]
        return tuple(values)

    return exchange


def max_for_mean(x: Value, kernel: Any, *options: Any) -> Any:
    return apply(x, ops.MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False))


def added(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return elementwise._add(a, b)


def twice_the_first(a: Any, b: Any) -> Any:
    return apply((a, a), ops.Add()) if isinstance(b, Value) else elementwise._add(a, b)


BUGS: dict[str, Bug] = {
    # affine layers
    "linear without its bias": bug(
        lambda s, x: s.square(x), FLAT, fields(ops.Linear, bias=None), aten.linear
    ),
    "linear with its bias negated": bug(
        lambda s, x: s.square(x), FLAT, fields(ops.Linear, bias=torch.neg), aten.linear
    ),
    "linear transposed": bug(
        lambda s, x: s.square(x), FLAT, fields(ops.Linear, weight=torch.t), aten.linear
    ),
    "linear with a weight off by a thousandth": bug(
        lambda s, x: s.square(x), FLAT,
        fields(ops.Linear, weight=lambda t: t + 1e-3 * torch.eye(4, dtype=t.dtype)), aten.linear,
    ),
    "convolution without its bias": bug(
        lambda s, x: s.conv(x), IMAGE, fields(ops.Conv2d, bias=None), aten.conv2d
    ),
    "convolution with swapped padding": bug(
        lambda s, x: s.conv(x), IMAGE, fields(ops.Conv2d, padding=swapped), aten.conv2d
    ),
    "convolution with swapped stride": bug(
        lambda s, x: F.conv2d(x, s.kernel, stride=(2, 1), padding=(3, 0)), IMAGE,
        fields(ops.Conv2d, stride=swapped), aten.conv2d,
    ),
    "convolution with swapped dilation": bug(
        lambda s, x: F.conv2d(x, s.kernel, stride=7, padding=(2, 2), dilation=(1, 2)), IMAGE,
        fields(ops.Conv2d, dilation=swapped), aten.conv2d,
    ),
    "convolution without its dilation": bug(
        lambda s, x: F.conv2d(x, s.kernel, stride=4, dilation=2), IMAGE,
        fields(ops.Conv2d, dilation=(1, 1)), aten.conv2d,
    ),
    "convolution with transposed kernels": bug(
        lambda s, x: s.conv(x), IMAGE, fields(ops.Conv2d, weight=torch.adjoint), aten.conv2d
    ),
    "convolution with its groups exchanged": bug(
        lambda s, x: s.grouped(x), IMAGE,
        fields(ops.Conv2d, weight=lambda t: t.flip(0)), aten.conv2d,
    ),
    "convolution in one group": bug(
        lambda s, x: s.grouped(x), IMAGE, fields(ops.Conv2d, groups=1), aten.conv2d
    ),
    "same padding on the other side": bug(
        lambda s, x: F.conv2d(x, s.even, padding="same"), IMAGE,
        fields(ops.Pad, pads=pads(0, 1)), aten.conv2d,
    ),
    # batch norm
    "batch norm with another epsilon": bug(
        lambda s, x: s.norm(x), IMAGE, fields(ops.BatchNorm, epsilon=1.1e-5), aten.batch_norm
    ),
    "batch norm without its mean": bug(
        lambda s, x: s.norm(x), IMAGE, fields(ops.BatchNorm, mean=torch.zeros_like), aten.batch_norm
    ),
    "batch norm with deviations for variances": bug(
        lambda s, x: s.norm(x), IMAGE, fields(ops.BatchNorm, variance=torch.sqrt), aten.batch_norm
    ),
    "batch norm without its weight": bug(
        lambda s, x: s.norm(x), IMAGE, fields(ops.BatchNorm, weight=None), aten.batch_norm
    ),
    "batch norm without its bias": bug(
        lambda s, x: s.norm(x), IMAGE, fields(ops.BatchNorm, bias=None), aten.batch_norm
    ),
    # pooling
    "average with a larger window": bug(
        lambda s, x: F.avg_pool2d(x, 2), IMAGE, fields(ops.AvgPool, kernel=larger), aten.avg_pool2d
    ),
    "average that counts padding": bug(
        lambda s, x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False), IMAGE,
        fields(ops.AvgPool, count_include_pad=True), aten.avg_pool2d,
    ),
    "average that does not count padding": bug(
        lambda s, x: F.avg_pool2d(x, 3, padding=1), IMAGE,
        fields(ops.AvgPool, count_include_pad=False), aten.avg_pool2d,
    ),
    "average rounded down": bug(
        lambda s, x: F.avg_pool2d(x, 2, ceil_mode=True), IMAGE,
        fields(ops.AvgPool, ceil_mode=False), aten.avg_pool2d,
    ),
    "maximum for average": bug(
        lambda s, x: F.avg_pool2d(x, 2), IMAGE, instead(max_for_mean), aten.avg_pool2d
    ),
    "maximum with a larger window": bug(
        lambda s, x: F.max_pool2d(x, 2), IMAGE, fields(ops.MaxPool, kernel=larger), aten.max_pool2d
    ),
    "maximum without its dilation": bug(
        lambda s, x: F.max_pool2d(x, 2, 4, dilation=2), IMAGE,
        fields(ops.MaxPool, dilation=(1, 1)), aten.max_pool2d,
    ),
    "maximum without its padding": bug(
        lambda s, x: F.max_pool2d(x, 3, 1, padding=1), IMAGE,
        fields(ops.MaxPool, padding=(0, 0)), aten.max_pool2d,
    ),
    # rearranging
    "padding on the other side": bug(
        lambda s, x: F.pad(x, (2, 0, 1, 1)), IMAGE, fields(ops.Pad, pads=pads(0, 1)), aten.pad
    ),
    "padding of the other axis": bug(
        lambda s, x: F.pad(x, (1, 1, 2, 0, 0, 0)), IMAGE,
        fields(ops.Pad, pads=lambda p: (*p[2:4], *p[:2], *p[4:])), aten.pad,
    ),
    "padding with zero": bug(
        lambda s, x: F.pad(x, (1, 1), value=-0.1), FLAT, fields(ops.Pad, value=0.0), aten.pad
    ),
    "axes not permuted": bug(
        lambda s, x: x.permute(0, 2, 1), SQUARE, fields(ops.Permute, dims=(0, 1, 2)), aten.permute
    ),
    "axes permuted the other way": bug(
        lambda s, x: x.view(-1, 1, 2, 2).permute(0, 3, 1, 2), FLAT,
        fields(ops.Permute, dims=(0, 2, 1, 3)), aten.permute,
    ),
    "slice off by one": bug(
        lambda s, x: x[:, 1:3], FLAT, fields(ops.Slice, index=shifted), aten.slice
    ),
    "index off by one": bug(
        lambda s, x: x[:, 1], SQUARE, fields(ops.Slice, index=shifted), aten.select
    ),
    "reshape that reads columns": bug(
        lambda s, x: x.reshape(-1, 9), SQUARE,
        instead(lambda x, shape: apply(x, ops.Permute((0, 2, 1)), ops.Reshape((9,)))),
        aten.view, aten.reshape,
    ),
    "concatenation the other way round": bug(
        lambda s, x: torch.cat((x, 2 * x), 1), FLAT, inputs(lambda v: v[::-1]), aten.cat
    ),
    # arithmetic
    "difference the other way round": bug(
        lambda s, x: s.square(x) - x, FLAT, inputs(lambda v: v[::-1]), aten.sub
    ),
    "sum of one value": bug(
        lambda s, x: s.square(x) + x, FLAT, instead(twice_the_first), aten.add
    ),
    "number minus value the other way round": bug(
        lambda s, x: torch.rsub(x, 0.5), FLAT,
        instead(lambda a, b, alpha=1: elementwise._sub(a, b)), aten.rsub,
    ),
    "constant added for subtracted": bug(
        lambda s, x: x - s.row, FLAT, instead(added), aten.sub
    ),
    "constant along the wrong axis": bug(
        lambda s, x: x * s.column, SQUARE, fields(ops.Scale, factor=along_the_last), aten.mul
    ),
    "constant of another sign": bug(
        lambda s, x: x * -0.1, FLAT, fields(ops.Scale, factor=torch.abs), aten.mul
    ),
    "quotient for product": bug(
        lambda s, x: x * s.row, FLAT, fields(ops.Scale, divide=True), aten.mul
    ),
    "product for quotient": bug(
        lambda s, x: x / s.row, FLAT, fields(ops.Scale, divide=False), aten.div
    ),
    "maximum for minimum": bug(
        lambda s, x: torch.minimum(x, s.square(x)), FLAT, instead(elementwise.maximum), aten.minimum
    ),
    "limit off by a thousandth": bug(
        lambda s, x: x.clamp(-0.5, 0.7), FLAT,
        fields(ops.Shift, offset=lambda t: t * 1.001), aten.clamp,
    ),
    "limit from the other side": bug(
        lambda s, x: x.clamp_min(0.2), FLAT,
        instead(lambda x, low: elementwise._clamp(x, high=low)), aten.clamp_min,
    ),
    "slopes of the wrong sign": bug(
        lambda s, x: F.prelu(x, s.row), FLAT, fields(ops.Scale, factor=torch.abs), aten.prelu
    ),
    "slopes of the wrong channels": bug(
        lambda s, x: F.prelu(x, s.row), FLAT,
        fields(ops.Scale, factor=lambda t: t.flip(0) if t.dim() else t), aten.prelu,
    ),
    "absolute value of one half": bug(
        lambda s, x: x.abs(), FLAT, inputs(lambda pair: (pair[0], pair[0])), aten.abs
    ),
    # copies
    "copies off by one": bug(
        lambda s, x: x.roll(1, 1), FLAT, fields(ops.Take, index=lambda t: t.roll(1)), aten.roll
    ),
    "copies of one place only": bug(
        lambda s, x: x.flip((1, 2)), SQUARE, fields(ops.Take, index=torch.zeros_like), aten.flip
    ),
    "stacked the other way round": bug(
        lambda s, x: torch.stack((x, 2 * x), 1), FLAT, inputs(lambda v: v[::-1]), aten.stack
    ),
    "sum of another axis": bug(
        lambda s, x: x.sum(1), SQUARE, fields(ops.Permute, dims=(0, 1, 2)), aten.sum
    ),
    "mean of one more": bug(
        lambda s, x: x.mean(2), SQUARE, fields(ops.Scale, factor=lambda t: t + 1), aten.mean
    ),
    # transposed convolutions
    "transposed convolution with turned kernels": bug(
        lambda s, x: F.conv_transpose2d(x, s.grouped.weight, stride=2), IMAGE,
        fields(ops.ConvTranspose2d, weight=lambda t: t.flip(-1)), aten.conv_transpose2d,
    ),
    "transposed convolution with swapped padding": bug(
        lambda s, x: F.conv_transpose2d(x, s.grouped.weight, padding=(1, 0)), IMAGE,
        fields(ops.ConvTranspose2d, padding=swapped), aten.conv_transpose2d,
    ),
    "sign ignored": bug(lambda s, x: -x, FLAT, instead(lambda x: x), aten.neg),
    # activations
    "another slope": bug(
        lambda s, x: F.leaky_relu(x, 0.011), FLAT,
        fields(ops.LeakyRelu, slope=0.01), aten.leaky_relu,
    ),
    "leaky rectifier": bug(
        lambda s, x: x.relu(), FLAT, instead(lambda x: apply(x, ops.LeakyRelu(1e-3))), aten.relu
    ),
    "rectifier dropped": bug(
        lambda s, x: s.square(x).relu(), FLAT, instead(lambda x: x), aten.relu
    ),
    "hyperbolic tangent for sigmoid": bug(
        lambda s, x: x.sigmoid(), FLAT, instead(lambda x: apply(x, ops.Tanh())), aten.sigmoid
    ),
    "sigmoid for hyperbolic tangent": bug(
        lambda s, x: x.tanh(), FLAT, instead(lambda x: apply(x, ops.Sigmoid())), aten.tanh
    ),
}  # fmt: skip
