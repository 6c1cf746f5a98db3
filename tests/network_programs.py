"""Programs of random layers: what `networks` draws, one move per operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Set

import network_moves
import smooth_moves
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tightrope.graph import ops

Shape = tuple[int, ...]
Draw = Callable[..., object]

# Networks stay tiny: a property that fails does so on few neurons, too.
MOST_VALUES = 48


class Program(nn.Module):
    """Steps in a row, each of which reads earlier values by position; 0 is the input."""

    def __init__(self, input_shape: Shape) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.steps: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = []

    def append(self, step: Callable[..., Tensor], inputs: tuple[int, ...]) -> None:
        """Add a step; layers become submodules so that they follow `.to(dtype)`."""
        if isinstance(step, nn.Module):
            self.add_module(f"step{len(self.steps)}", step)
        self.steps.append((step, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Run all steps and return the last value."""
        values = [x]
        for step, inputs in self.steps:
            values.append(step(*(values[i] for i in inputs)))
        return values[-1]

    def extra_repr(self) -> str:
        """Show the wiring in hypothesis' reports."""
        lines = [f"input_shape={self.input_shape}"]
        lines += [f"{i + 1} = {step}({inputs})" for i, (step, inputs) in enumerate(self.steps)]
        return "\n".join(lines)


class WithConstant(nn.Module):
    """A function of the input and one constant tensor, which is a buffer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], constant: Tensor) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("constant", constant)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(x, self.constant)


def generator_of(draw: Draw) -> torch.Generator:
    """Draw the seed of the numbers inside a network or a box."""
    return torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))


class Writer:
    """A program in the making; moves append to it and read its last value."""

    def __init__(self, draw: Draw, input_shape: Shape, allowed: Set[type[ops.Op]]) -> None:
        self.draw = draw
        self.allowed = allowed
        self.program = Program(input_shape)
        self.shapes = [input_shape]
        self.generator = generator_of(draw)

    @property
    def shape(self) -> Shape:
        return self.shapes[-1]

    def choose(self, *options: object) -> object:
        return self.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def append(self, step: Callable[..., Tensor], *inputs: int) -> None:
        """Append a step that reads `inputs`, the last value unless told otherwise."""
        inputs = inputs or (len(self.shapes) - 1,)
        if isinstance(step, nn.Module):
            step = step.to(torch.float64).eval()
        probes = [torch.zeros(1, *self.shapes[i], dtype=torch.float64) for i in inputs]
        with torch.no_grad():
            self.shapes.append(tuple(step(*probes).shape[1:]))
        self.program.append(step, inputs)

    def numbers(
        self, *shape: int, magnitudes: tuple[float, ...] = (1.0, 0.01, 0.3, 30.0)
    ) -> Tensor:
        """Draw a tensor of one magnitude, sometimes with exact zeros."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if self.integer(0, 3) == 3:
            keep = torch.rand(shape, generator=self.generator) < 0.5
            values = values * keep
        return values * self.choose(*magnitudes)

    def fill(self, layer: nn.Linear | nn.Conv2d) -> None:
        """Give a layer random weights."""
        fan_in = math.prod(layer.weight.shape[1:])
        layer.weight = nn.Parameter(self.numbers(*layer.weight.shape) / math.sqrt(fan_in))
        if layer.bias is not None:
            layer.bias = nn.Parameter(self.numbers(*layer.bias.shape))

    def flatten(self) -> None:
        if len(self.shape) != 1:
            self.append(nn.Flatten())

    def linear(self, width: int) -> None:
        layer = nn.Linear(self.shape[-1], width, bias=self.choose(True, False))
        self.fill(layer)
        self.append(layer)

    def to_image(self) -> None:
        """Rearrange the last value as an image of one channel."""
        size = math.prod(self.shape)
        height = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
        self.append(lambda x: x.contiguous().view(x.size(0), 1, height, size // height))

    def keep_small(self) -> None:
        if math.prod(self.shape) > MOST_VALUES:
            self.flatten()
            self.linear(self.integer(2, 6))

    def branch(self) -> tuple[int, int]:
        """Return two positions of the same shape: earlier values, or a new side branch."""
        last = len(self.shapes) - 1
        same = [i for i, shape in enumerate(self.shapes) if shape == self.shape]
        other = self.choose(None, *same)
        if other is None:
            conv = ops.Conv2d in self.allowed and len(self.shape) == 3
            if conv and self.choose(True, False):
                channels = self.shape[0]
                layer = nn.Conv2d(channels, channels, 3, padding=1)
            else:
                layer = nn.Linear(self.shape[-1], self.shape[-1])
            self.fill(layer)
            self.append(layer)
            if ops.Relu in self.allowed and self.choose(True, False):
                self.append(nn.ReLU())
            other = len(self.shapes) - 1
        pair = (last, other)
        return pair if self.choose(True, False) else pair[::-1]


# --- one move per operation -------------------------------------------------------------------


def _linear(w: Writer) -> None:
    if w.integer(0, 9) == 9:
        network_moves.reduction(w)
    w.linear(w.integer(1, 6))


def _conv(w: Writer) -> None:
    channels, height, width = w.shape
    dilation = (w.integer(1, 2), w.integer(1, 2))
    kernel = (w.integer(1, 3), w.integer(1, 3))
    padding = w.choose((1, 1), (0, 0), (0, 1), (2, 1), "same", "valid")
    stride = (1, 1) if padding == "same" else (w.integer(1, 2), w.integer(1, 2))
    room = (0, 0) if isinstance(padding, str) else padding
    for size, k, d, p in zip((height, width), kernel, dilation, room, strict=True):
        if padding != "same" and d * (k - 1) + 1 > size + 2 * p:
            kernel = (1, 1)
    groups = w.choose(1, channels)
    outputs = groups * w.integer(1, 2)
    bias = w.choose(True, False)
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups, bias)
    w.fill(layer)
    w.append(layer)


def _batch_norm(w: Writer) -> None:
    channels = w.shape[0]
    kind = nn.BatchNorm2d if len(w.shape) == 3 else nn.BatchNorm1d
    layer = kind(channels, affine=w.choose(True, False), eps=w.choose(1e-5, 1e-3))
    layer = layer.to(torch.float64)
    layer.running_mean = w.numbers(channels)
    layer.running_var = w.numbers(channels, magnitudes=(1.0, 1e-4, 100.0)).abs()
    if layer.affine:
        layer.weight = nn.Parameter(w.numbers(channels))
        layer.bias = nn.Parameter(w.numbers(channels))
    w.append(layer)


def _constant(w: Writer) -> Tensor:
    """Return a constant that fits the samples: one number, one per channel, or one per value."""
    per_channel = (w.shape[0],) + (1,) * (len(w.shape) - 1)
    return w.numbers(*w.choose((), per_channel, w.shape, (1, *w.shape)))


def _shift(w: Writer) -> None:
    function = w.choose(
        lambda x, c: x + c, lambda x, c: c + x, lambda x, c: x - c, lambda x, c: c - x
    )
    if w.integer(0, 3) == 3:
        number = w.choose(0.5, -3.0, 16777216.0, 0.1)
        w.append(lambda x: function(x, number))
    else:
        w.append(WithConstant(function, _constant(w)))


def _scale(w: Writer) -> None:
    constant = _constant(w)
    functions = [lambda x, c: x * c, lambda x, c: c * x, lambda x, c: -x]
    if (constant != 0).all():
        functions.append(lambda x, c: x / c)
    w.append(WithConstant(w.choose(*functions), constant))


def _pool_options(w: Writer) -> dict[str, object]:
    kernel = tuple(min(size, w.integer(1, 3)) for size in w.shape[1:])
    padding = tuple(w.integer(0, k // 2) for k in kernel)
    stride = (w.integer(1, 2), w.integer(1, 2))
    return {"kernel_size": kernel, "stride": stride, "padding": padding}


def _avg_pool(w: Writer) -> None:
    kind = w.choose("layer", "adaptive", "mean")
    if kind == "mean":
        keep = w.choose(True, False)
        w.append(lambda x: x.mean((2, 3), keepdim=keep))
    elif kind == "adaptive":
        w.append(nn.AdaptiveAvgPool2d(tuple(w.choose(1, size) for size in w.shape[1:])))
    else:
        ceil, count = w.choose(False, True), w.choose(True, False)
        w.append(nn.AvgPool2d(**_pool_options(w), ceil_mode=ceil, count_include_pad=count))


def _max_pool(w: Writer) -> None:
    w.append(nn.MaxPool2d(**_pool_options(w), ceil_mode=w.choose(False, True)))


def _reshape(w: Writer) -> None:
    size = math.prod(w.shape)
    divisor = w.choose(*[d for d in range(1, size + 1) if size % d == 0])
    w.append(
        w.choose(
            lambda x: x.contiguous().view(x.size(0), -1),
            lambda x: x.reshape(-1, size),
            lambda x: x.reshape((x.shape[0], divisor, -1)),
            lambda x: torch.flatten(x, 1),
        )
    )


def _permute(w: Writer) -> None:
    order = w.draw(st.permutations(range(1, len(w.shape) + 1)))
    if w.choose(True, False):
        w.append(lambda x: x.permute(0, *order))
    else:
        w.append(lambda x: x.transpose(order[0], order[-1]))


def _pad(w: Writer) -> None:
    pads = [w.integer(0, 1) for _ in range(2 * w.integer(1, len(w.shape)))]
    if w.shape[-1] > 1 and w.integer(0, 3) == 3:
        pads[0] = -1  # a negative number crops
    value = w.choose(0.0, -2.0, 0.5)
    w.append(lambda x: F.pad(x, pads, value=value))


def _slice(w: Writer) -> None:
    index: list[slice | int] = []
    for size in w.shape:
        start = w.integer(0, size - 1)
        stop = w.integer(start + 1, size)
        index.append(slice(start, stop, w.integer(1, 2)))
    if len(index) > 1 and w.choose(False, True):
        index[-1] = w.integer(-1, 0)
    whole = all(i == slice(0, size, 1) for i, size in zip(index, w.shape, strict=True))
    if whole:  # PyTorch leaves these out, unless they are asked for by name
        w.append(lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, x.shape[1]))
    else:
        w.append(lambda x: x[(slice(None), *index)])


def _concat(w: Writer) -> None:
    pair = w.branch()
    dim = w.choose(1, -1)
    w.append(lambda a, b: torch.cat((a, b), dim), *pair)


def _add(w: Writer) -> None:
    w.append(lambda a, b: a + b, *w.branch())


def _sub(w: Writer) -> None:
    w.append(lambda a, b: a - b, *w.branch())


def _relu(w: Writer) -> None:
    if w.integer(0, 4) == 4:
        w.choose(network_moves.bend, network_moves.extremum)(w)
        return
    w.append(w.choose(nn.ReLU(), F.relu, torch.relu, lambda x: x.relu()))


def _leaky_relu(w: Writer) -> None:
    slope = w.choose(0.125, 0.01, 0.0, 1.0, 2.0)
    w.append(nn.LeakyReLU(slope))


def _sigmoid(w: Writer) -> None:
    w.append(w.choose(nn.Sigmoid(), torch.sigmoid, lambda x: x.sigmoid()))


def _tanh(w: Writer) -> None:
    w.append(w.choose(nn.Tanh(), torch.tanh, lambda x: x.tanh()))


MOVES: dict[type[ops.Op], Callable[[Writer], None]] = {
    ops.Linear: _linear,
    ops.Relu: _relu,
    ops.Conv2d: _conv,
    ops.BatchNorm: _batch_norm,
    ops.Add: _add,
    ops.Shift: _shift,
    ops.Scale: _scale,
    ops.AvgPool: _avg_pool,
    ops.MaxPool: _max_pool,
    ops.Reshape: _reshape,
    ops.Permute: _permute,
    ops.Pad: _pad,
    ops.Slice: _slice,
    ops.Take: network_moves.take,
    ops.Step: network_moves.step,
    ops.Where: network_moves.choice,
    ops.ArgMax: network_moves.place,
    ops.Distance: network_moves.distance,
    ops.ConvTranspose2d: network_moves.conv_transpose,
    ops.Concat: _concat,
    ops.Sub: _sub,
    ops.LeakyRelu: _leaky_relu,
    ops.Sigmoid: _sigmoid,
    ops.Tanh: _tanh,
    **smooth_moves.MOVES,
}
WEIGHTS = {ops.Linear: 4, ops.Relu: 4, ops.Conv2d: 3, ops.BatchNorm: 2, ops.Add: 2}
IMAGE_ONLY = {ops.Conv2d, ops.ConvTranspose2d, ops.AvgPool, ops.MaxPool}
