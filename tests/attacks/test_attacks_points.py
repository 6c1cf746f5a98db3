"""The network for attacks is the same function with the same gradients, minus the parameters."""

import pytest
import torch
from torch import nn

from tightrope.attacks import for_points
from tightrope.graph import trace


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        (3, 1, 1, 8),
        (5, 2, 2, 14),
        (4, 2, 1, 9),
        (3, 2, 0, 8),
        (2, 3, 0, 10),
        (1, 2, 0, 7),
        (5, 1, 0, 6),
    ],
)
def test_gradients_of_points(
    channels: int, kernel: int, stride: int, padding: int, size: int
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(channels, 6, kernel, stride, padding),
        nn.Tanh(),
        nn.Conv2d(6, 3, 2),
        nn.Flatten(),
    ).double()
    network = for_points(trace(module, (channels, size, size)))
    x = torch.rand(4, channels, size, size, dtype=torch.float64, requires_grad=True)
    points = x.detach().clone().requires_grad_()
    expected, found = module(x), network(points)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad((expected * direction).sum(), x)
    (got,) = torch.autograd.grad((found * direction).sum(), points)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_no_gradient_reaches_the_parameters() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    output = for_points(trace(module, (1, 4, 4)))(torch.rand(3, 1, 4, 4, requires_grad=True))
    output.sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 4, 3, dilation=2),
        nn.Conv2d(2, 4, (3, 2)),
        nn.Conv2d(2, 4, 3, stride=(1, 2)),
    ],
)
def test_layers_left_to_the_library(layer: nn.Conv2d) -> None:
    x = torch.rand(2, 2, 8, 8, requires_grad=True)
    points = x.detach().clone().requires_grad_()
    for_points(trace(nn.Sequential(layer), (2, 8, 8)))(points).square().sum().backward()
    layer(x).square().sum().backward()
    torch.testing.assert_close(points.grad, x.grad)
