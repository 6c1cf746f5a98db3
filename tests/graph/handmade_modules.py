"""Modules made by hand, to be traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tightrope.errors import UserError
from tightrope.graph import trace

FLAT = (6,)


class Call(nn.Module):
    """A module whose forward is the given function of itself and the input."""

    def __init__(self, function: Callable[..., Tensor], **held: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def call(function: Callable[[Tensor], Tensor]) -> Call:
    """A module that is nothing but a function of its input."""
    return Call(lambda self, x: function(x))


class Buffers(nn.Module):
    """Normalisation as users write it, with buffers that broadcast."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-1, 1, 4).view(shape))
        self.register_buffer("std", torch.linspace(0.2, 3, 4).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def norm(kind: type[nn.Module], channels: int, **options: object) -> nn.Module:
    """A BatchNorm that has seen data."""
    layer = kind(channels, **options)
    layer.running_mean = torch.linspace(-2, 2, channels)
    layer.running_var = torch.linspace(0.1, 5, channels)
    if layer.affine:
        layer.weight = nn.Parameter(torch.linspace(-1.5, 1, channels))
        layer.bias = nn.Parameter(torch.linspace(1, -1, channels))
    return layer


def rows(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1.1, 2, torch.Size(shape).numel()).view(shape))


def two_paths(self: Call, x: Tensor) -> Tensor:
    a = torch.relu(self.a(x))
    return self.b(a) - a


def assert_same_or_refused(module: nn.Module, change: Callable[[], object] = lambda: None) -> None:
    """Check that the graph is right (also after a change of the module) if there is one."""
    try:
        graph = trace(module.eval(), FLAT)
    except UserError as error:
        assert "\n" not in str(error)
        return
    with torch.no_grad():
        change()
        x = torch.randn(20, 6)
        torch.testing.assert_close(graph(x), module(x))
