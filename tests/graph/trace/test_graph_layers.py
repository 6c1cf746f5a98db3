"""Layers and functions that copy, bend and reduce: traced, they compute the same.

`trace` compares node by node; here the outputs are compared once more, at other points, and
gradients of weights that are seen through a view.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import call
from test_graph_more_layers import CASES as MORE
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, ops, trace
from tightrope.graph.trace import elementwise, moves, reductions, windows
from tightrope.graph.trace.tracing import converters
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE, LINE, BLOCK, FLAT = (4, 4, 6), (4, 7), (2, 5, 4, 6), (6,)
INDEX = torch.tensor([2, 0, 1, 1])
COLUMN = torch.linspace(-1, 1, 4).view(4, 1, 1)
aten = torch.ops.aten

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "index": (lambda x: x[:, INDEX], IMAGE),
    "two indices": (lambda x: x[:, [0, 2], [1, 3]], IMAGE),
    "index_select": (lambda x: x.index_select(2, INDEX), IMAGE),
    "gather": (lambda x: x.gather(1, (torch.arange(18).view(1, -1) % 6).expand(len(x), -1)), FLAT),
    "take_along_dim": (lambda x: torch.take_along_dim(x, INDEX.view(1, 4), 1), FLAT),
    "narrow": (lambda x: x.narrow(2, 1, 2), IMAGE),
    "split": (lambda x: torch.cat(torch.split(x, [1, 3], 2)[::-1], 2), IMAGE),
    "split evenly": (lambda x: x.split(2, 1)[1], IMAGE),
    "chunk": (lambda x: x.chunk(3, 3)[1], IMAGE),
    "tensor_split": (lambda x: torch.tensor_split(x, 3, 1)[0], FLAT),
    "unbind": (lambda x: torch.stack(x.unbind(1)[::-1], 2), IMAGE),
    "expand": (lambda x: x[:, :, :1].expand(-1, -1, 5, -1), IMAGE),
    "expand by the batch": (lambda x: x[:, :1].expand(x.shape[0], 3, 4, 6), IMAGE),
    "broadcast_to": (lambda x: x[:, :1].broadcast_to(len(x), 5), FLAT),
    "repeat": (lambda x: x.repeat(1, 2, 1, 3), IMAGE),
    "tile": (lambda x: x.tile(2), FLAT),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), FLAT),
    "roll": (lambda x: x.roll((1, 2), (2, 3)), IMAGE),
    "flip": (lambda x: x.flip((1, 3)), IMAGE),
    "rot90": (lambda x: torch.rot90(x, 1, (2, 3)), IMAGE),
    "movedim": (lambda x: x.movedim(1, 3), IMAGE),
    "swapaxes": (lambda x: x.swapaxes(1, 2), IMAGE),
    "swapdims": (lambda x: x.swapdims(1, 3), IMAGE),
    "unfold": (lambda x: x.unfold(2, 2, 1).flatten(1), IMAGE),
    "diagonal": (lambda x: x.diagonal(0, 2, 3), IMAGE),
    "steps": (lambda x: x[:, :, ::2, 1::3], IMAGE),
    "interpolate": (lambda x: F.interpolate(x, size=(7, 5)), IMAGE),
    "nearest exact": (lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), IMAGE),
    "sum of shapes": (lambda x: x + x.mean((2, 3), keepdim=True), IMAGE),
    "difference of shapes": (lambda x: x[:, :1] - x, IMAGE),
    "constant that is larger": (lambda x: COLUMN * x[:, :1] + COLUMN, IMAGE),
    "number minus larger": (lambda x: COLUMN - x[:, :1], IMAGE),
    "clamp": (lambda x: x.clamp(-0.3, 0.6), IMAGE),
    "clamp by tensors": (lambda x: torch.clamp(x, COLUMN, COLUMN + 1), IMAGE),
    "clamp by values": (lambda x: torch.clamp(x, max=x.roll(1, 1)), FLAT),
    "clip": (lambda x: torch.clip(x, max=0.2), FLAT),
    "clamp_min": (lambda x: x.clamp_min(0.2), FLAT),
    "clamp_max": (lambda x: x.clamp_max(0.2), FLAT),
    "clamp at infinity": (lambda x: x.clamp(float("-inf"), 0.5), FLAT),
    "relu6": (lambda x: F.relu6(4 * x), FLAT),
    "abs": (torch.abs, FLAT),
    "maximum": (lambda x: torch.maximum(x, x.flip(1)), FLAT),
    "maximum with a constant": (lambda x: torch.maximum(torch.tensor(0.3), x), FLAT),
    "minimum": (lambda x: torch.minimum(x, x[:, :1]), IMAGE),
    "fmax": (lambda x: torch.fmax(x, x.flip(1)), FLAT),
    "fmin": (lambda x: torch.fmin(x, x.flip(1)), FLAT),
    "max of two": (lambda x: torch.max(x, x.flip(1)), FLAT),
    "amax": (lambda x: x.amax((1, 3)), IMAGE),
    "amin": (lambda x: x.amin(2, keepdim=True), IMAGE),
    "max": (lambda x: x.max(1).values, IMAGE),
    "min": (lambda x: x.min(1, keepdim=True)[0], IMAGE),
    "sum": (lambda x: x.sum((1, 2)), IMAGE),
    "sum of all": (lambda x: x.sum((1, 2, 3), keepdim=True), IMAGE),
    "mean": (lambda x: x.mean(1), IMAGE),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.5, -1.0, 2.0, 0.0])), IMAGE),
}

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(4, 2, 3, 2, 1, 2), LINE),
    "Conv1d same": (lambda: nn.Conv1d(4, 4, 4, padding="same", groups=2), LINE),
    "Conv1d reflect": (lambda: nn.Conv1d(4, 2, 3, padding=1, padding_mode="reflect"), LINE),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 3, 2, 1), BLOCK),
    "Conv3d of all options": (
        lambda: nn.Conv3d(2, 6, (2, 3, 1), (1, 2, 3), (0, 1, 0), 1, 2), BLOCK,
    ),
    "Conv3d dilated": (lambda: nn.Conv3d(2, 3, 2, (2, 1, 2), 1, (2, 1, 2), bias=False), BLOCK),
    "Conv3d same": (lambda: nn.Conv3d(2, 3, (2, 3, 4), padding="same"), BLOCK),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 2, 3, 2, 1, 1), LINE),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, True, (1, 2)), IMAGE,
    ),
    "ConvTranspose2d, much output padding": (
        lambda: nn.ConvTranspose2d(4, 2, 3, 1, 0, 1, 1, True, 2), IMAGE,
    ),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1, True), LINE),
    "AvgPool3d": (lambda: nn.AvgPool3d(3, 2, 1, True, False), BLOCK),
    "MaxPool1d": (lambda: nn.MaxPool1d(3, 2, 1), LINE),
    "MaxPool3d": (lambda: nn.MaxPool3d((2, 3, 2), 2, (1, 1, 0), ceil_mode=True), BLOCK),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), LINE),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((3, 5)), IMAGE),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d((2, 3, 5)), BLOCK),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear, corners": (
        lambda: nn.Upsample(size=(7, 10), mode="bilinear", align_corners=True), IMAGE,
    ),
    "bilinear by 1.7": (lambda: nn.Upsample(scale_factor=1.7, mode="bilinear"), IMAGE),
    "linear": (lambda: nn.Upsample(size=9, mode="linear"), LINE),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), BLOCK),
    "nearest 1d": (lambda: nn.Upsample(scale_factor=2), LINE),
    "nearest 3d": (lambda: nn.Upsample(size=(3, 4, 5)), BLOCK),
    "PReLU": (lambda: nn.PReLU(4, -0.5), IMAGE),
    "LeakyReLU": (lambda: nn.LeakyReLU(-0.5), FLAT),
    "Hardtanh": (lambda: nn.Hardtanh(-0.5, 0.2), FLAT),
    "Hardsigmoid": (lambda: nn.Hardsigmoid(), FLAT),
    "Softshrink": (lambda: nn.Softshrink(0.3), FLAT),
    "Threshold": (lambda: nn.Threshold(0.1, 0.1), FLAT),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(2), IMAGE),
    "ReplicationPad3d": (lambda: nn.ReplicationPad3d(1), BLOCK),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), IMAGE),
}  # fmt: skip

CASES = {
    **{name: (lambda f=f: call(f), shape) for name, (f, shape) in FUNCTIONS.items()},
    **{name: (lambda m=m: nn.Sequential(m()), shape) for name, (m, shape) in LAYERS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_traced(name: str) -> None:
    build, shape = CASES[name]
    torch.manual_seed(0)
    module = build().eval()
    graph = trace(module, shape)
    x = torch.randn(7, *shape) * 2
    with torch.no_grad():
        expected, found = module(x), graph(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_boxes_hold(graph, x)


def assert_boxes_hold(graph: Graph, x: Tensor) -> None:
    """Strict boxes around boxes of points hold what a float64 network computes there."""
    wide = graph.detach().to(torch.float64)
    center = x[:2].double()
    box = Box(center - 0.2, center + 0.2)
    found, _ = interval.bounds(wide, box, rounding=ROUNDING)
    for seed in range(20):
        noise = torch.rand(center.shape, generator=torch.Generator().manual_seed(seed)).double()
        outputs = wide(center + 0.2 * (2 * noise - 1).round(decimals=seed % 3))
        assert bool(((outputs >= found.lower - 1e-12) & (outputs <= found.upper + 1e-12)).all())


def test_every_converter_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these rooms: the other ones have theirs elsewhere."""
    used = set()

    def noting(operator: object, convert: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            used.add(operator)
            return convert(*args, **kwargs)

        return wrapped

    rooms = {**moves.CONVERTERS, **windows.CONVERTERS, **reductions.CONVERTERS}
    for operator, convert in {**rooms, **elementwise.CONVERTERS}.items():
        monkeypatch.setitem(converters.CONVERTERS, operator, noting(operator, convert))
    for build, shape in {**CASES, **MORE}.values():
        trace(build(), shape, frozen=True)
    missing = set(rooms) - used
    # What PyTorch's exporter writes in another way, and what is there to be refused.
    names = {str(operator).removeprefix("aten.") for operator in missing}
    assert {name for name in names if not name.endswith("_with_indices")} <= {
        *("as_strided", "unsafe_split", "unsafe_chunk", "_upsample_nearest_exact1d"),
        *("_upsample_nearest_exact3d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
        *("replication_pad1d", "replication_pad2d", "replication_pad3d", "conv2d", "avg_pool2d"),
        *(
            "max_pool2d",
            "norm",
        ),
    }


VIEWED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(4, 2, 3), LINE),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), BLOCK),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 2, 3), LINE),
    "PReLU": (lambda: nn.PReLU(4), LINE),
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_of_weights_stay_live(name: str) -> None:
    build, shape = VIEWED[name]
    layer = build().double()
    with torch.no_grad():  # whatever the mode is when it is traced
        graph = trace(layer, shape)
    x = torch.randn(3, *shape, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        graph(x).square().sum().backward()
        ours = layer.weight.grad.clone()
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        torch.testing.assert_close(ours, layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(graph(x), layer(x))


def test_piecewise_linear_layers_are_relus() -> None:
    for name in ("relu6", "clamp", "abs", "maximum", "minimum", "PReLU", "Hardsigmoid"):
        build, shape = CASES[name]
        kinds = {type(node.op) for node in trace(build(), shape).nodes}
        assert ops.Relu in kinds
        assert kinds <= {ops.Input, ops.Relu, ops.Scale, ops.Shift, ops.Add, ops.Sub, ops.Take,
                         ops.Slice}, name  # fmt: skip
