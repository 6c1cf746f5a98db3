"""What cannot be traced is refused in one line that says what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.errors import UserError
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE = (2, 4, 4)


class Call(nn.Module):
    """A module whose forward is the given function; it holds a few layers to play with."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def refusal(module: nn.Module, shape: tuple[int, ...]) -> str:
    """Return the message of the `UserError`, which has to fit on one line."""
    with pytest.raises(UserError) as caught:
        trace(module, shape)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- unsupported layers -----------------------------------------------------------------------


class Unknown(nn.Module):
    """A function that is not known."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.digamma(x)


def blocks() -> nn.Module:
    """A layer that is not known, of four numbers."""
    return nn.Sequential(nn.Unflatten(1, (1, 1, 2, 2)), nn.ConvTranspose3d(1, 1, 1), nn.Flatten())


class InParallel(nn.Module):
    """Unsupported parts that all read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Unknown()
        self.blocks = blocks()
        self.head = nn.Sequential(nn.Linear(4, 4), blocks())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + self.blocks(x) + self.head(x) + torch.erfc(x) + x.lgamma()


class InARow(nn.Module):
    """Unsupported parts, each of which reads the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Unknown()
        self.blocks = blocks()
        self.head = nn.Sequential(nn.Linear(4, 4), blocks())

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.act(x))
        return self.head(torch.erfc(F.relu(x).lgamma()))


@pytest.mark.parametrize("module", [InParallel(), InARow()])
def test_all_unsupported_parts_are_listed_at_once(module: nn.Module) -> None:
    message = refusal(module, (4,))
    for part in (
        "operation 'digamma'",
        "layer 'blocks.1' (ConvTranspose3d)",
        "layer 'head.1.1' (ConvTranspose3d)",
        "operation 'erfc'",
        "operation 'lgamma'",
    ):
        assert message.count(part) == 1, part
    for fine in ("add", "getitem", "relu", "head.0"):
        assert f"'{fine}'" not in message, "a part that is fine by itself is not listed"


@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (nn.BatchNorm2d(2, track_running_stats=False), IMAGE, "track_running_stats"),
        (nn.AvgPool2d(2, divisor_override=3), IMAGE, "divisor_override"),
        (nn.LeakyReLU(float("inf")), (4,), "slope"),
        (nn.ConvTranspose3d(2, 2, 3), (2, 3, 3, 3), "ConvTranspose3d"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (4,), "Linear"),
    ],
)
def test_unsupported_option(layer: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    message = refusal(nn.Sequential(nn.ReLU(), layer), shape)
    assert "layer '1'" in message and reason in message


# --- functions that make no network of ours ---------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., object], tuple[int, ...], str]] = {
    # control flow
    "branch on a value": (lambda s, x: x if x.sum() > 0 else -x, (4,), "branch on tensor values"),
    "loop over samples": (lambda s, x: sum(row for row in x), (4,), "unbind"),
    # reshapes that mix the batch
    "flatten everything": (lambda s, x: x.flatten(), IMAGE, "batch"),
    "view(-1)": (lambda s, x: x.view(-1), IMAGE, "reshape"),
    "view mixes samples": (lambda s, x: x.view(-1, 16), IMAGE, "reshape of (2, 4, 4) to (16,)"),
    "fixed batch size": (lambda s, x: x.view(8, -1), IMAGE, "batch"),
    "half the batch size": (lambda s, x: x.view(x.size(0) // 2, -1), IMAGE, "cannot trace"),
    "twice the batch size": (lambda s, x: x.view(x.size(0) * 2, -1), IMAGE, "batch"),
    "batch size as a number": (lambda s, x: x + x.size(0), (4,), "differs from Call"),
    "transpose the batch": (lambda s, x: x.transpose(0, 1), IMAGE, "batch"),
    "permute the batch": (lambda s, x: x.permute(1, 0, 2, 3), IMAGE, "batch"),
    "pad the batch": (lambda s, x: F.pad(x, (0, 0, 1, 0)), (4,), "batch"),
    "concat along the batch": (lambda s, x: torch.cat((x, x)), (4,), "batch"),
    "first sample": (lambda s, x: x[0], (4,), "batch"),
    "first samples": (lambda s, x: x[:2], (4,), "batch"),
    # arithmetic
    "division by zero": (lambda s, x: x / 0, (4,), "division by zero"),
    "sum that broadcasts": (lambda s, x: x + x.flatten(1), (1, 4), "(1, 4) and (4,)"),
    "constant that broadcasts the sample": (
        lambda s, x: x + torch.ones(3, 4),
        (4,),
        "does not fit the input shape",
    ),
    "constant that does not fit": (lambda s, x: x * torch.ones(5), (4,), "does not fit"),
    "alpha": (lambda s, x: torch.add(x, s.token, alpha=2), (4,), "alpha times a constant"),
    "rounding division": (lambda s, x: torch.div(x, 2, rounding_mode="floor"), (4,), "div"),
    "concat with a constant of each sample": (
        lambda s, x: torch.cat((x, torch.arange(4 * len(x)).view(-1, 4)), 1),
        (4,),
        "constant",
    ),
    "layer on a constant": (lambda s, x: x + s.linear(s.token), (4,), "computed"),
    # means
    "mean of everything": (lambda s, x: x.mean(), IMAGE, "mean"),
    "mean of the batch": (lambda s, x: x + x.mean(0, keepdim=True), IMAGE, "mean"),
    # indices
    "index by a value": (lambda s, x: x[:, x[0].long()], (4,), "operation"),
    # options of functions
    "samples mixed": (lambda s, x: x.roll(1, 0), IMAGE, "mixes the samples"),
    "samples turned": (lambda s, x: x.flip(0), IMAGE, "mixes the samples"),
    "indices": (lambda s, x: F.max_pool2d(x, 2, return_indices=True)[0], IMAGE, "max_pool2d"),
    "another dtype": (lambda s, x: x.double(), (4,), "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    function, shape, reason = REFUSED[case]
    assert reason in refusal(Call(function), shape)


# What torch accepts as well as the forms in test_graph_trace.py: either it is understood, or it
# is refused like everything else.
SPELLINGS: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "torch.flatten(input=...)": (lambda s, x: torch.flatten(input=x, start_dim=1), IMAGE),
    "torch.transpose(dim0=...)": (lambda s, x: torch.transpose(x, dim0=1, dim1=2), IMAGE),
    "torch.permute(dims=...)": (lambda s, x: torch.permute(x, dims=(0, 2, 1, 3)), IMAGE),
    "x.permute(dims=...)": (lambda s, x: x.permute(dims=(0, 2, 1, 3)), IMAGE),
    "torch.add(input=..., other=...)": (lambda s, x: torch.add(input=x, other=1), (4,)),
    "torch.mean(dtype=...)": (lambda s, x: torch.mean(x, (2, 3), dtype=torch.float32), IMAGE),
    "one-sided adaptive pooling": (lambda s, x: F.adaptive_avg_pool2d(x, (None, 1)), IMAGE),
    "parameter.view": (lambda s, x: x * s.token.view(1, -1, 1), (4, 3)),
    "parameter.abs": (lambda s, x: x * s.token.abs(), (4,)),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_spellings_are_understood_or_refused(case: str) -> None:
    function, shape = SPELLINGS[case]
    module = Call(function).eval()
    try:
        graph = trace(module, shape)
    except UserError as error:
        assert "\n" not in str(error)
        return
    x = torch.randn(3, *shape)
    torch.testing.assert_close(graph(x), module(x))


# --- shapes, inputs, outputs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(10, 2)), (4,)),
        (nn.Sequential(nn.Conv2d(3, 2, 3)), IMAGE),
        (nn.Sequential(nn.Conv2d(2, 2, 7)), IMAGE),
        (nn.Sequential(nn.BatchNorm2d(3)), IMAGE),
        (nn.Sequential(nn.MaxPool2d(9)), IMAGE),
        (nn.Sequential(nn.AvgPool2d(9)), IMAGE),
        (Call(lambda s, x: x[:, 7]), (4,)),
        (Call(lambda s, x: torch.cat((x, x[:, :1]), 2)), IMAGE),
        (Call(lambda s, x: x.permute(0, 2, 1)), IMAGE),
    ],
)
def test_wrong_input_shape(module: nn.Module, shape: tuple[int, ...]) -> None:
    message = refusal(module, shape)
    assert f"does not fit the input shape {shape}" in message


def test_wrong_input_shape_names_the_layer() -> None:
    module = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(10, 2))
    message = refusal(module, IMAGE)
    assert "'2'" in message and "8" in message and "10" in message


@pytest.mark.parametrize("dims", [(1, 7), (7, 1)])
def test_dimensions_that_do_not_exist(dims: tuple[int, int]) -> None:
    assert "out of range" in refusal(Call(lambda s, x: x.transpose(*dims)), IMAGE)


def test_second_input() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + mask

    assert "second input 'mask'" in refusal(Two(), (4,))


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: s.token,
        lambda s, x: torch.ones(4) * 2,
        lambda s, x: (x, x),
        lambda s, x: {"logits": x},
        lambda s, x: None,
        lambda s, x: x.size(0),
    ],
)
def test_output_must_be_one_tensor_of_the_input(function: Callable[..., object]) -> None:
    assert "must return one tensor" in refusal(Call(function), (4,))


def test_errors_in_the_module_become_refusals() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("first line\nsecond line")

    message = refusal(Broken(), (4,))
    assert "cannot trace Broken: first line" in message and "second line" not in message
