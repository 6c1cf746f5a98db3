"""The dual network of Wong and Kolter has the bounds of zonotopes, computed backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import zonotope
from tightrope.domains.linear import dual
from tightrope.domains.linear.patches import Patches
from tightrope.graph import Graph, Node, ops, trace
from tightrope.nets import Normalize

pytestmark = pytest.mark.usefixtures("one_thread")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Linear(3 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last((x + self.second(x).relu()).relu().flatten(1))


def conv_net(stride: int = 2, padding: int = 1, kernel: int = 3) -> nn.Sequential:
    """Two convolutions and two linear layers; some windows stick out, some inputs are left over."""
    first = nn.Conv2d(2, 6, kernel, stride=stride, padding=padding)
    second = nn.Conv2d(6, 5, 3, padding=padding, stride=stride, bias=False)
    before = [Normalize([0.4, 0.5], [0.3, 0.2]), first, nn.LeakyReLU(0.1)]
    body = [*before, nn.BatchNorm2d(6), second, nn.ReLU(), nn.Flatten()]
    width = nn.Sequential(*body).eval()(torch.zeros(1, 2, 9, 8)).shape[1]
    return nn.Sequential(*body, nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, 3))


NETS = {
    "dense": (lambda: nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
    ), (4,)),
    "conv": (conv_net, (2, 9, 8)),
    "no padding": (lambda: conv_net(1, 0), (2, 9, 8)),
    "wide": (lambda: conv_net(3, 2, 4), (2, 9, 8)),
    "sum": (Residual, (2, 4, 4)),
    "linear": (lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Conv2d(3, 4, 2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(4 * 30, 3)
    ), (2, 9, 8)),
    "pool": (lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 3),
    ), (2, 9, 8)),
    "open": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU()), (4,)),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Graph, Box, Tensor]:
    torch.manual_seed(3)
    build, shape = NETS[name]
    module = build().double().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
            nn.init.normal_(layer.weight)
    x = torch.rand(4, *shape, dtype=torch.float64)
    return module, trace(module, shape), Box.ball(x, 0.15), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize("name", NETS)
def test_bounds_and_margins_are_those_of_the_zonotope(name):
    _, graph, box, y = made(name)
    known = dual.bounds(graph, box)
    expected, layers = zonotope.margins(graph, box, y, keep=dual.relu_inputs(graph))
    assert known.keys() == layers.keys() == {*dual.relu_inputs(graph)}
    for i, bound in layers.items():
        torch.testing.assert_close(known[i].lower, bound.lower, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(known[i].upper, bound.upper, rtol=1e-12, atol=1e-12)
        if name != "open":
            assert bool(((bound.lower < 0) & (bound.upper > 0)).any())
    found = dual.margins(graph, box, y, known)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["dense", "conv", "sum"])
def test_gradients_are_those_of_the_zonotope(name):
    results = []
    for way in ("backward", "forward"):
        module, graph, box, y = made(name)
        if way == "backward":
            found = dual.margins(graph, box, y, dual.bounds(graph, box))
        else:
            found, _ = zonotope.margins(graph, box, y)
        (found * torch.arange(1.0, 4.0)).sum().backward()
        results.append({n: p.grad for n, p in module.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-9, atol=1e-10, msg=name)


# --- the formulas as published, one sample and row after the other ------------------------------


def published_bound(
    layers: list[tuple[Tensor, Tensor]], known: list[tuple[Tensor, Tensor]], ends: Box, c: Tensor
) -> Tensor:
    """`J(-c) = -x . nu_1 - eps |nu_1| - sum_i b_i . nu_i + sum_crossing l_j max(nu_j, 0)`."""
    nu, total = -c, torch.zeros((), dtype=torch.float64)
    for i in range(len(layers) - 1, -1, -1):
        weight, bias = layers[i]
        total = total - bias @ nu
        hat = weight.T @ nu
        if i == 0:
            return total - ends.center @ hat - ends.radius @ hat.abs()
        low, high = known[i - 1]
        crossing = (low < 0) & (high > 0)
        nu = torch.where(crossing, high / (high - low), (low >= 0).double()) * hat
        total = total + (low * nu.clamp(min=0))[crossing].sum()
    raise AssertionError


def published_layers(layers: list[tuple[Tensor, Tensor]], ends: Box) -> list[tuple[Tensor, Tensor]]:
    known: list[tuple[Tensor, Tensor]] = []
    for k in range(1, len(layers)):
        units = torch.eye(len(layers[k - 1][1]), dtype=torch.float64)
        low = torch.stack([published_bound(layers[:k], known, ends, unit) for unit in units])
        high = torch.stack([-published_bound(layers[:k], known, ends, -unit) for unit in units])
        known.append((low, high))
    return known


def test_it_is_the_published_objective():
    module, graph, box, y = made("dense")
    layers = [(m.weight, m.bias) for m in module if isinstance(m, nn.Linear)]
    found = dual.margins(graph, box, y, dual.bounds(graph, box))
    for n, label in enumerate(y.tolist()):
        ends = Box(box.lower[n], box.upper[n])
        known = published_layers(layers, ends)
        for i in range(3):
            c = torch.eye(3).double()[label] - torch.eye(3).double()[i]
            expected = published_bound(layers, known, ends, c)
            torch.testing.assert_close(found[n, i], expected, rtol=1e-12, atol=1e-12)


def test_one_neuron_by_hand():
    """relu(x) on [-1, 3] lies in x 3/4 + 3/8 ± 3/8: from -0.75 to 3."""
    nodes = (Node("input", ops.Input(), (), (1,)), Node("relu", ops.Relu(), (0,), (1,)))
    two = ops.Linear(torch.tensor([[1.0], [0.0]]).double(), None)
    graph = Graph((*nodes, Node("out", two, (1,), (2,))))
    box = Box(torch.tensor([[-1.0]]).double(), torch.tensor([[3.0]]).double())
    known = dual.bounds(graph, box)
    for label, expected in ((0, [0.0, -0.75]), (1, [-3.0, 0.0])):
        found = dual.margins(graph, box, torch.tensor([label]), known)
        assert found.tolist() == [expected]


def test_patches_are_rows_of_the_convolution():
    torch.manual_seed(0)
    first = nn.Conv2d(5, 6, 3, stride=2, padding=1, bias=False).double()
    second = nn.Conv2d(6, 2, 2, stride=1, padding=1, bias=False).double()
    net = nn.Sequential(first, second)
    graph = trace(net, (5, 7, 8)).detach()
    patches = Patches.of(graph.nodes[2].op, graph.nodes[2].shape)
    inside = patches.times(torch.ones(1, *graph.nodes[1].shape, dtype=torch.float64))
    patches = inside.through(graph.nodes[1].op)
    x = torch.randn(3, 5, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(patches.dot(x).view(3, *graph.nodes[2].shape), net(x))
    jacobian = torch.autograd.functional.jacobian(net, x[:1])[0, :, :, :, 0].abs()
    reach = (jacobian * x.abs()[:, None, None, None]).flatten(4).sum(4)
    torch.testing.assert_close(patches.reach(x.abs()).view(3, *graph.nodes[2].shape), reach)


def test_only_what_convolutions_alone_reach_goes_by_patches():
    for name, expected in {"conv": 2, "no padding": 2, "sum": 2, "pool": 1, "dense": 0}.items():
        _, graph, _, _ = made(name)
        assert sum(dual.is_convolutional(graph, i) for i in dual.relu_inputs(graph)) == expected


def test_what_is_kept_is_estimated():
    """A convolution's neurons keep their patches, a linear layer's all that is before them."""
    graph = trace(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,))
    assert dual.numbers_kept(graph) == dual.KEPT * (6 * 4 + 3 * (4 + 6 + 6 + 3))
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.ReLU())
    graph = trace(conv, (1, 6, 6))
    rows, outputs = 2 * 16 * 9 + 27 * (2 * 2 * 4 + 16), 27 * (36 + 64 + 54)
    assert dual.numbers_kept(graph) == dual.KEPT * (rows + outputs)
