"""Small networks evaluated many points at a time: the same outputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tightrope.attacks import CrossEntropy, Steps, for_points, pgd
from tightrope.attacks.kernels import small
from tightrope.attacks.kernels.small import small_network
from tightrope.box import Box
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def modules(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, int, int]]:
    """Draw a convolution or two, perhaps a hidden linear layer, and a linear layer."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(3, 7)), draw(st.integers(3, 7)))
    layers: list[nn.Module] = []
    size = shape
    for _ in range(draw(st.integers(1, 2))):
        kernel, stride, padding = (draw(st.integers(*ends)) for ends in ((1, 3), (1, 2), (0, 2)))
        if min(size[1:]) + 2 * padding < kernel:
            kernel = 1
        layer = nn.Conv2d(
            size[0], draw(st.integers(1, 3)), kernel, stride, padding, bias=draw(st.booleans())
        )
        layers += [layer, nn.ReLU()]
        size = tuple(layer(torch.zeros(1, *size)).shape[1:])
    layers.append(nn.Flatten())
    width = torch.zeros(size).numel()
    if draw(st.booleans()):
        layers += [nn.Linear(width, 6), nn.ReLU()]
        width = 6
    layers.append(nn.Linear(width, 4))
    return nn.Sequential(*layers), shape


def evaluated(network: object, points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    points = points.detach().requires_grad_()
    outputs = network(points)
    (slopes,) = torch.autograd.grad((outputs * weights).sum(), points)
    return outputs.detach(), slopes


@settings(max_examples=60)
@given(drawn=modules(), count=st.sampled_from([1, 15, 16, 17, 40]), last=st.booleans())
def test_outputs_and_gradients_are_those_of_the_network(
    drawn: tuple[nn.Module, tuple[int, int, int]], count: int, last: bool
) -> None:
    module, shape = drawn
    graph = trace(module.double(), shape)
    network = small_network(graph.detach())
    assert network is not None
    points, weights = torch.randn(count, *shape).double(), torch.randn(count, 4).double()
    if last:
        points = points.contiguous(memory_format=torch.channels_last)
    found, expected = (evaluated(n, points, weights) for n in (network, graph.detach()))
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def tiny() -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)
    ).double()
    return module, trace(module, (1, 8, 8))


def test_attacks_use_it_and_find_the_same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = tiny()
    box = Box.ball(torch.rand(20, 1, 8, 8).double(), 0.2)
    start, goal = box.sample(), CrossEntropy(torch.arange(20) % 4)
    calls: list[int] = []
    real = small.SmallNetwork.__call__

    def spy(self: small.SmallNetwork, points: Tensor) -> Tensor:
        calls.append(len(points))
        return real(self, points)

    monkeypatch.setattr(small.SmallNetwork, "__call__", spy)
    fast = pgd(for_points(graph), box, goal, steps=Steps(6), starts=(start,))
    assert calls == [20] * 7
    monkeypatch.setattr(small, "LARGEST_WORK", 0)
    usual = pgd(for_points(graph), box, goal, steps=Steps(6), starts=(start,))
    assert len(calls) == 7
    torch.testing.assert_close(fast, usual, rtol=0, atol=1e-12)
    assert not torch.equal(fast, start)


def test_weights_are_those_of_the_moment_and_get_no_gradient() -> None:
    module, graph = tiny()
    points = torch.rand(3, 1, 8, 8).double()
    before = for_points(graph)(points)
    with torch.no_grad():
        module[0].weight.mul_(2.0)
    after = for_points(graph)(points.requires_grad_())
    torch.testing.assert_close(after, module(points))
    assert not torch.allclose(before, after)
    after.sum().backward()
    assert points.grad is not None and all(p.grad is None for p in module.parameters())


def test_a_normalisation_before_it_counts() -> None:
    module, _ = tiny()

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = module

        def forward(self, x: Tensor) -> Tensor:
            return self.rest((x - 0.1307) / 0.3081)

    graph = trace(Normalised(), (1, 8, 8)).detach()
    network = small_network(graph)
    assert network is not None
    points, weights = torch.rand(5, 1, 8, 8).double(), torch.randn(5, 4).double()
    for a, b in zip(*(evaluated(n, points, weights) for n in (network, graph)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_other_numbers_and_other_networks_go_the_usual_way() -> None:
    _, graph = tiny()
    network = small_network(graph.detach())
    assert network is not None
    assert not network.suits(torch.zeros(2, 1, 8, 8))  # the weights are doubles
    assert not network.suits(torch.zeros(2, 1, 8, 8, device="meta", dtype=torch.float64))
    large = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, 4))
    assert small_network(trace(large, (3, 8, 8))) is None
    pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4))
    assert small_network(trace(pooled, (1, 8, 8))) is None
    for other in (torch.bfloat16, torch.float16):
        assert small_network(graph.detach().to(other)) is None
    assert small_network(graph.detach().to("meta")) is None  # as on a GPU
    mixed = {1: replace(graph.nodes[1].op, weight=graph.nodes[1].op.weight.float())}
    assert small_network(graph.detach().replace_ops(mixed)) is None
