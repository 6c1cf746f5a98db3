"""A graph follows the parameters of its module; detached or in float64 it is a value."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import Call, assert_same_or_refused, norm, rows, two_paths
from torch import Tensor, nn
from used_numbers import in_float64

from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT, IMAGE = (6,), (4, 6, 5)


# --- live parameters --------------------------------------------------------------------------


def learned() -> nn.Module:
    """A network in which everything that can be learned is used in its own way."""

    def forward(self: Call, x: Tensor) -> Tensor:
        x = (x - self.shift) * self.scale / self.divisor
        x = F.leaky_relu(self.norm(self.conv(x)), 0.5)
        x = self.extra - torch.flatten(x, 1)
        return F.linear(self.hidden(x), self.weight, self.bias)

    torch.manual_seed(0)
    return Call(
        forward,
        shift=rows(1, 4, 1, 1),
        scale=rows(4, 1, 1),
        divisor=nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)),
        conv=nn.Conv2d(4, 2, 3),
        norm=norm(nn.BatchNorm2d, 2),
        extra=rows(24),
        hidden=nn.Linear(24, 5),
        weight=rows(3, 5),
        bias=rows(3),
    )


def test_graph_follows_the_parameters() -> None:
    module = learned().double().eval()
    graph = trace(module, IMAGE)
    x = torch.randn(6, *IMAGE, dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    before = graph(x).detach()
    for _ in range(2):  # twice: a graph that holds on to an old autograd graph would fail
        optimizer.zero_grad()
        graph(x).square().mean().backward()
        optimizer.step()
    after = graph(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["shift", "scale", "divisor", "extra", "weight", "bias"])
def test_graph_follows_each_parameter(name: str) -> None:
    module = learned().double().eval()
    graph = trace(module, IMAGE)
    x = torch.randn(6, *IMAGE, dtype=torch.float64)
    before = graph(x).detach()
    with torch.no_grad():
        getattr(module, name).mul_(1.5).add_(0.25)
    after = graph(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, module(x), rtol=1e-12, atol=1e-12)


def test_graph_follows_the_running_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(6))
    graph = trace(module, FLAT)
    x = torch.randn(50, 6) * 3 + 1
    before = graph(x)
    module.train()(x)  # updates the statistics in place
    assert not torch.allclose(before, graph(x))
    torch.testing.assert_close(graph(x), module.eval()(x))


def test_gradients_are_those_of_the_module() -> None:
    module = learned().double().eval()
    twin = copy.deepcopy(module)
    graph = trace(module, IMAGE)
    x = torch.randn(6, *IMAGE, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    graph(x).sin().sum().backward()
    twin(y).sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-12)
    for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None and a.grad.abs().sum() > 0, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_composed_parameters_stay_live_or_are_refused() -> None:
    """A weight computed in the forward pass must not be frozen at its value of today."""

    def forward(self: Call, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.gain)

    module = Call(forward, weight=rows(3, 6), gain=rows(3, 1))
    assert_same_or_refused(module, lambda: module.gain.mul_(2.0))


# --- the graph as a value ---------------------------------------------------------------------


def test_propagate_returns_what_is_asked_for() -> None:
    graph = trace(Call(two_paths, a=nn.Linear(6, 4), b=nn.Linear(4, 4)), FLAT)
    x = torch.randn(2, 6)
    last = len(graph.nodes) - 1
    assert set(graph.propagate(evaluate.RULES, x)) == {last}
    assert set(graph.propagate(evaluate.RULES, x, keep=[0, 2])) == {0, 2, last}
    everything = graph.propagate(evaluate.RULES, x, keep=range(len(graph.nodes)))
    assert torch.equal(everything[0], x)
    for i, node in enumerate(graph.nodes):
        assert everything[i].shape == (2, *node.shape)


def test_detach_cuts_off_gradients() -> None:
    module = learned().eval()
    graph: Graph = trace(module, IMAGE).detach()
    x = torch.randn(2, *IMAGE, requires_grad=True)
    graph(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert all(p.grad is None for p in module.parameters())
    assert not graph(x.detach()).requires_grad
    with torch.no_grad():
        module.bias.add_(1.0)  # detached tensors still share their memory
    torch.testing.assert_close(graph(x), module(x), rtol=1e-4, atol=1e-4)


def test_to_float64_leaves_the_module_alone() -> None:
    module = learned().eval()
    graph = trace(module, IMAGE)
    double = graph.to(torch.float64)
    x = torch.randn(3, *IMAGE)
    assert double(x.double()).dtype == torch.float64
    assert graph(x).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in module.parameters())
    exact = in_float64(module, x.double())
    torch.testing.assert_close(double(x.double()), exact, rtol=1e-12, atol=1e-12)
    norm_op = next(n.op for n in double.nodes if isinstance(n.op, ops.BatchNorm))
    assert norm_op.batches is not None and not norm_op.batches.is_floating_point()


def test_to_float64_passes_gradients_on() -> None:
    module = learned().eval()
    trace(module, IMAGE).to(torch.float64)(torch.randn(3, *IMAGE).double()).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


CHOSEN = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: torch.where(CHOSEN, x, self.start),
        lambda self, x: torch.where(CHOSEN, self.start, x),
        lambda self, x: torch.maximum(x, self.start),
        lambda self, x: torch.cat([self.start.expand(len(x), -1), x], 1),
        lambda self, x: F.cosine_similarity(x[:, None], self.start + 0 * x[:, None], dim=2),
    ],
)
@pytest.mark.parametrize("learned", [True, False])
def test_parameters_that_begin_at_zero_may_change(forward: object, learned: bool) -> None:
    start = nn.Parameter(torch.zeros(1, 3), requires_grad=learned)
    module = Call(forward, start=start).eval()
    graph, x = trace(module, (3,)), torch.randn(4, 3)
    start.data += torch.tensor([0.5, -0.7, 1.5])
    torch.testing.assert_close(graph(x), module(x))


def test_directions_to_compare_with_have_to_stay() -> None:
    def forward(self: Call, x: Tensor) -> Tensor:
        return F.cosine_similarity(x[:, None], self.ways[None], dim=2)

    module = Call(forward, ways=nn.Parameter(torch.randn(4, 3))).eval()
    with pytest.raises(UserError, match="up to date"):
        trace(module, (3,))
    x = torch.randn(2, 3)
    torch.testing.assert_close(trace(module, (3,), frozen=True)(x), module(x))
