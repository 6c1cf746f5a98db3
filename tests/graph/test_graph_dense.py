"""Small convolutions as matrices: the same network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from networks import networks
from torch import nn

from tightrope.graph import dense, ops, trace
from tightrope.graph.dense import convolution_matrix


@settings(max_examples=40)
@given(module=networks(containing=ops.Conv2d))
def test_matrices_evaluate_the_network(module: nn.Module) -> None:
    graph = trace(module, module.input_shape)
    torch.manual_seed(0)
    values, slopes = [], []
    points = torch.randn(3, *module.input_shape, dtype=torch.float64)
    inputs = [points.requires_grad_(), *(p for p in module.parameters() if p.requires_grad)]
    for smallest in (0, 1 << 60):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense, "SMALLEST_PRODUCT", smallest)
            value = graph(points)
        values.append(value.detach())
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view_as(value)
        total = (value * weights).sum()
        slopes.append(torch.autograd.grad(total, inputs, allow_unused=True))
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9)
    for found, expected in zip(*slopes, strict=True):
        found, expected = (torch.zeros(()) if g is None else g for g in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, check_dtype=False)


def test_a_shared_convolution_has_a_matrix_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SMALLEST_PRODUCT", 0)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3)
    module = nn.Sequential(conv, nn.ReLU(), conv, nn.Flatten(), nn.Linear(8, 3)).double()
    graph = trace(module, (2, 6, 6))
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(graph(x), module(x))


def test_convolution_matrix_by_hand() -> None:
    weight = torch.tensor([[[[1.0, 2.0]]]])
    op = ops.Conv2d(weight, torch.tensor([7.0]), (1, 1), (0, 0), (1, 1), 1)
    matrix, bias = convolution_matrix(op, (1, 1, 3))
    assert matrix.tolist() == [[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
    assert bias.tolist() == [7.0, 7.0]


def test_large_convolutions_and_few_points_stay_convolutions() -> None:
    op = trace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (1, 5, 5)).nodes[1].op
    enough = -(-dense.SMALLEST_PRODUCT // (25 * 18))
    assert dense.pays(op, torch.zeros(enough, 1, 5, 5))
    assert not dense.pays(op, torch.zeros(enough - 1, 1, 5, 5))
    assert not dense.pays(op, torch.zeros(enough, 1, 30, 30))  # too large a matrix
