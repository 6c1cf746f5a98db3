"""Gradients of interval bounds and margins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from by_hand import DOUBLE, doubles, graph_of, linear
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.relu_box import relu_box
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


# --- gradients --------------------------------------------------------------------------------


def plain_relu_box(center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = torch.relu(center + radius), torch.relu(center - radius)
    return (upper + lower) / 2, (upper - lower) / 2


def away_from_kinks(count: int) -> tuple[Tensor, Tensor]:
    """Centres and radii with |center ± radius| > 0.05, of all three kinds."""
    torch.manual_seed(0)
    center = torch.randn(count, dtype=DOUBLE) * 2
    radius = torch.rand(count, dtype=DOUBLE) + 0.1
    far = ((center + radius).abs() > 0.05) & ((center - radius).abs() > 0.05)
    return center[far].requires_grad_(), radius[far].requires_grad_()


def test_relu_box_value_and_gradient() -> None:
    center, radius = away_from_kinks(60)
    lower, upper = (center - radius).detach(), (center + radius).detach()
    assert (upper < 0).any() and (lower > 0).any() and ((lower < 0) & (upper > 0)).any()
    assert torch.autograd.gradcheck(relu_box, (center, radius))
    expected = plain_relu_box(center, radius)
    actual = relu_box(center, radius)
    weights = torch.randn(2, len(center), dtype=DOUBLE)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)
    gradients = [
        torch.autograd.grad((pair[0] * weights[0] + pair[1] * weights[1]).sum(), (center, radius))
        for pair in (actual, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("part", [0, 1])
def test_relu_box_gradient_of_one_output_only(part: int) -> None:
    center, radius = away_from_kinks(60)
    a = torch.autograd.grad(relu_box(center, radius)[part].sum(), (center, radius))
    b = torch.autograd.grad(plain_relu_box(center, radius)[part].sum(), (center, radius))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)


def test_relu_box_at_the_kink_follows_the_plain_formula() -> None:
    center = doubles([1.0, -1.0, 0.0]).requires_grad_()
    radius = doubles([1.0, 1.0, 0.0]).requires_grad_()
    a = torch.autograd.grad(sum(t.sum() for t in relu_box(center, radius)), (center, radius))
    b = torch.autograd.grad(sum(t.sum() for t in plain_relu_box(center, radius)), (center, radius))
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def naive_margins(module: nn.Sequential, lower: Tensor, upper: Tensor, labels: Tensor) -> Tensor:
    """Margins as one would write them down: corners, signs, one matrix per sample."""
    for layer in module[:-1]:
        if isinstance(layer, nn.Linear):
            positive, negative = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
            lower, upper = (
                F.linear(lower, positive, layer.bias) + F.linear(upper, negative),
                F.linear(upper, positive, layer.bias) + F.linear(lower, negative),
            )
        else:
            lower, upper = layer(lower), layer(upper)
    last = module[-1]
    rows = []
    for k, label in enumerate(labels):
        gap = last.weight[label] - last.weight
        ends = torch.where(gap > 0, lower[k], upper[k])
        rows.append((gap * ends).sum(1) + last.bias[label] - last.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("rounding", [0.0, torch.finfo(DOUBLE).eps])
def test_margins_gradient_is_that_of_the_naive_formula(rounding: float) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LeakyReLU(0.1), nn.Linear(5, 3))
    module = nn.Sequential(*layers).double()
    graph = trace(module, (4,))
    x = torch.randn(7, 4, dtype=DOUBLE)
    labels = torch.tensor([0, 2, 2, 0, 0, 2, 2])
    weights = torch.randn(7, 3, dtype=DOUBLE)
    actual, _ = interval.margins(graph, Box(x - 0.2, x + 0.3), labels, rounding=rounding)
    expected = naive_margins(module, x - 0.2, x + 0.3, labels)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    parameters = list(module.parameters())
    a = torch.autograd.grad((actual * weights).sum(), parameters)
    b = torch.autograd.grad((expected * weights).sum(), parameters)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert all(g.abs().sum() > 0 for g in a)


def test_gradient_reaches_the_box() -> None:
    """Training through a box that depends on parameters needs this."""
    graph = graph_of(linear([[1.0, -2.0]]), nn.ReLU(), linear([[3.0], [0.0]]), shape=(2,))
    lower = doubles([[1.0, -1.0]]).requires_grad_()
    upper = doubles([[2.0, 0.0]]).requires_grad_()
    margins, _ = interval.margins(graph, Box(lower, upper), torch.tensor([0]))
    # o_0 - o_1 = 3 relu(x - 2y), smallest at x = lower, y = upper, where it is 3.
    assert margins[0, 1].item() == pytest.approx(3.0)
    margins[0, 1].backward()
    torch.testing.assert_close(lower.grad, doubles([[3.0, 0.0]]))
    torch.testing.assert_close(upper.grad, doubles([[0.0, -6.0]]))


def test_gradients_of_all_operations_are_finite_and_reach_all_weights() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.LeakyReLU(0.1),
        nn.AvgPool2d(2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(2, 3),
    ]
    module = nn.Sequential(*layers).double().eval()
    graph = trace(module, (1, 4, 4))
    x = torch.rand(3, 1, 4, 4, dtype=DOUBLE)
    for rounding in (0.0, torch.finfo(DOUBLE).eps):
        module.zero_grad()
        margins, _ = interval.margins(
            graph, Box.ball(x, 0.1), torch.tensor([0, 1, 2]), rounding=rounding
        )
        margins.sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
        assert module[0].weight.grad.abs().sum() > 0
