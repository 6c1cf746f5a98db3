"""Strict intervals of long sums and at the edges of the number range, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from lost_digits import (
    BOTH,
    assert_exact_margins,
    assert_exactly_inside,
    digits,
    eps,
    strict_bounds,
)
from networks import points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


# --- long sums, as in real layers -------------------------------------------------------------


@BOTH
def test_long_dot_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3000, 4).to(dtype)
    scales = 2.0 ** torch.randint(-20, 20, (3000,))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 3000) * scales)
        layer.weight[1].copy_(-layer.weight[0])
    graph = trace(nn.Sequential(layer), (3000,)).detach()
    x = (torch.randn(1, 3000) / scales).to(dtype)
    box = Box(x, x + x.abs() * 1e-6)
    points = points_in(box, 4)
    assert_exactly_inside(graph, box, points)
    assert_exact_margins(graph, box, points)


@BOTH
@pytest.mark.parametrize("stride", [1, 2])
def test_wide_convolutions(dtype: torch.dtype, stride: int) -> None:
    """Large enough for the blocked kernels of the convolution library."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(32, 16, 3, stride, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
    graph = trace(module.to(dtype), (32, 6, 6)).detach()
    x = torch.randn(1, 32, 6, 6, dtype=dtype) * 100
    box = Box(x, x)
    assert_exactly_inside(graph, box, x)


@BOTH
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_products_that_a_large_bias_swallows(kind: str, dtype: torch.dtype) -> None:
    """Each product is below the last bit of the bias, all of them together are not."""
    count = 64
    layer = nn.Linear(count, 2) if kind == "linear" else nn.Conv2d(count, 2, 1)
    layer = layer.to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.copy_(torch.tensor([1.0, -1.0]) * 2.0 ** digits(dtype))
    shape = (count,) if kind == "linear" else (count, 2, 2)
    graph = trace(nn.Sequential(layer), shape).detach()
    for value in (0.9, -0.9, 1.0, -1.0, 0.1):
        x = torch.full((1, *shape), value, dtype=dtype)
        assert_exactly_inside(graph, Box(x, x), x)


# Thousands of values at once: rules with too little slack fail on a few of them. Each operation
# gets values at which it loses most.


def many(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Values of both signs and all magnitudes from 2^-20 to 2^20."""
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** (40 * torch.rand(shape, generator=generator, dtype=torch.float64) - 20)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (size * sign).to(dtype)


def many_norms(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Inputs near the mean and biases of the size of the result: everything cancels."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(1500).to(dtype)
    norm.running_mean = many(dtype, (1500,))
    norm.running_var = torch.rand(1500, dtype=dtype) * 10
    norm.weight = nn.Parameter(torch.randn(1500, dtype=dtype))
    x = norm.running_mean * (1 + torch.randn(1500, dtype=dtype) * 1e-3)
    norm.bias = nn.Parameter(torch.zeros(1500, dtype=dtype))
    with torch.no_grad():
        norm.bias.copy_(-norm.eval()(x[None])[0] * (1 + 1e-3 * torch.randn(1500)))
    return norm, x


@BOTH
def test_many_values_of_batchnorm(dtype: torch.dtype) -> None:
    norm, x = many_norms(dtype)
    graph = trace(nn.Sequential(norm.eval()), (1500,)).detach()
    assert_exactly_inside(graph, Box(x[None], x[None]), x[None])


@BOTH
@pytest.mark.parametrize(
    "layer",
    [
        nn.LeakyReLU(0.3),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d((3, 5), count_include_pad=False),
    ],
)
def test_many_values(layer: nn.Module, dtype: torch.dtype) -> None:
    shape = (1, 40, 50)
    graph = trace(nn.Sequential(layer), shape).detach()
    x = many(dtype, (1, *shape))
    for scale in (1.0, 1e-4):  # activations are interesting below 20, pools anywhere
        assert_exactly_inside(graph, Box(x * scale, x * scale), x * scale)


class TwoConstants(nn.Module):
    """`x * a + b - c / d` with constants of all magnitudes, and sums of its parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, row in zip("abcd", many(dtype, (4, 500)), strict=True):
            self.register_buffer(name, row)

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.a + self.b - self.c) / self.d
        return (x + y) - (y - x) * 0.3


@BOTH
def test_many_values_of_arithmetic(dtype: torch.dtype) -> None:
    graph = trace(TwoConstants(dtype), (500,)).detach()
    x = many(dtype, (5, 500))[4:]
    assert_exactly_inside(graph, Box(x, x), x)


# --- the edges of the number range ------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("large", [False, True])
def test_boxes_thinner_than_the_smallest_normal_number(large: bool, dtype: torch.dtype) -> None:
    """The centre of such a box is itself rounded, and a large weight magnifies that."""
    smallest = torch.finfo(dtype).tiny * eps(dtype)
    layer = nn.Linear(1, 1, bias=False).to(dtype)
    norm = nn.BatchNorm1d(1, affine=False).to(dtype)
    norm.running_var.fill_(1.0)
    with torch.no_grad():
        layer.weight.fill_(2.0 ** (digits(dtype) + 16) if large else 1.0)
    for module in (nn.Sequential(layer), nn.Sequential(norm, layer), nn.Sequential(layer, norm)):
        graph = trace(module, (1,)).detach()
        for steps in (1, 3):
            lower = torch.zeros(1, 1, dtype=dtype)
            box = Box(lower, lower + steps * smallest)
            assert_exactly_inside(graph, box, points_in(box, 2))


@BOTH
def test_margins_of_boxes_thinner_than_the_smallest_normal_number(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).tiny * eps(dtype)
    layer = nn.Linear(1, 2, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-1.0], [1.0]]) * 2.0 ** (digits(dtype) + 16))
    graph = trace(nn.Sequential(layer), (1,)).detach()
    lower = torch.zeros(1, 1, dtype=dtype)
    box = Box(lower, lower + smallest)
    assert_exact_margins(graph, box, points_in(box, 2))


@BOTH
def test_products_that_underflow(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 1, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1e-30 if dtype == torch.float32 else 1e-200)
    graph = trace(nn.Sequential(layer, nn.LeakyReLU(0.3)), (2,)).detach()
    x = layer.weight.detach().clone() * torch.tensor([[1.0, 3.0]], dtype=dtype)
    box = Box(-x, x)
    assert_exactly_inside(graph, box, points_in(box, 6))


@BOTH
@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.LeakyReLU(0.3), nn.Tanh(), nn.Sigmoid(), nn.MaxPool2d(1)]
)
def test_box_given_by_centre_and_radius(module: nn.Module, dtype: torch.dtype) -> None:
    """The true corners of such a box need not be floating-point numbers; they count, too."""
    center = torch.full((1, 1, 1, 1), 1.0, dtype=dtype)
    box = Box.around(center, center * eps(dtype) / 8)
    graph = trace(nn.Sequential(module), (1, 1, 1)).detach()
    out, _ = interval.bounds(graph, box, rounding=eps(dtype))
    exact_upper = 1 + Fraction(eps(dtype)) / 8
    if isinstance(module, nn.ReLU | nn.LeakyReLU | nn.MaxPool2d):
        assert Fraction(out.upper.item()) >= exact_upper
        assert Fraction(out.lower.item()) <= 2 - exact_upper
    assert out.lower < out.upper


@BOTH
def test_saturated_activations_stay_in_their_range(dtype: torch.dtype) -> None:
    x = torch.tensor([[-1e4, -800.0, -100.0, -1e-30, 0.0, 1e-30, 20.0, 1e4]], dtype=dtype)
    for layer, floor in ((nn.Sigmoid(), 0.0), (nn.Tanh(), -1.0)):
        graph = trace(nn.Sequential(layer), (8,))
        assert_exactly_inside(graph, Box(x, x), x)
        out = strict_bounds(graph, Box(x, x))[1]
        assert (out.lower >= floor).all() and (out.upper <= 1.0).all()
