"""Max pools written with ReLUs compute the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.graph import Graph, evaluate, ops, trace
from tightrope.graph.maxpool import expand_max_pools

pytestmark = pytest.mark.usefixtures("one_thread")

INSIDE = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 1),
    nn.MaxPool2d((1, 3), (2, 1)),
    nn.MaxPool2d(2, 2, dilation=2),
    nn.MaxPool2d((3, 2), 2, dilation=(1, 3)),
    nn.MaxPool2d(1),
    nn.MaxPool2d(1, 2),
    nn.MaxPool2d(3, 3, ceil_mode=True),
]
OVER_THE_EDGE = [
    nn.MaxPool2d(2, 2, 1),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d(4, 3, ceil_mode=True),
    nn.MaxPool2d((3, 2), (1, 2), (1, 0), dilation=(2, 1)),
    nn.MaxPool2d(3, 2, (0, 1)),
]


def pools(graph: Graph) -> int:
    return sum(isinstance(node.op, ops.MaxPool) for node in graph.nodes)


def traced(*layers: nn.Module, shape: tuple[int, ...] = (2, 6, 9)) -> Graph:
    torch.manual_seed(0)
    return trace(nn.Sequential(*layers).double(), shape).detach()


def assert_same(graph: Graph, expanded: Graph, x: Tensor) -> None:
    assert torch.allclose(graph(x), expanded(x), rtol=1e-12, atol=1e-12)
    assert expanded.input_shape == graph.input_shape
    assert expanded.output_shape == graph.output_shape
    values = expanded.propagate(
        evaluate.RULES,
        x,
        keep=range(len(expanded.nodes)),
    )
    for i, node in enumerate(expanded.nodes):
        assert values[i].shape[1:] == node.shape
        assert all(j < i for j in node.inputs)


@pytest.mark.parametrize("pool", INSIDE, ids=str)
def test_windows_inside_the_image(pool: nn.Module) -> None:
    graph = traced(nn.Conv2d(2, 3, 1), pool, nn.Flatten())
    expanded = expand_max_pools(graph)
    assert pools(graph) == 1 and pools(expanded) == 0
    assert not any(isinstance(node.op, ops.Pad) for node in expanded.nodes)
    assert_same(graph, expanded, torch.randn(20, 2, 6, 9, dtype=torch.float64))


@pytest.mark.parametrize("pool", OVER_THE_EDGE, ids=str)
def test_windows_over_the_edge_need_nonnegative_inputs(pool: nn.Module) -> None:
    x = torch.randn(20, 2, 6, 9, dtype=torch.float64) - 0.5
    plain = traced(nn.Conv2d(2, 3, 1), pool, nn.Flatten())
    assert pools(expand_max_pools(plain)) == 1
    assert_same(plain, expand_max_pools(plain), x)
    behind_relu = traced(nn.Conv2d(2, 3, 1), nn.ReLU(), pool, nn.Flatten())
    expanded = expand_max_pools(behind_relu)
    assert pools(expanded) == 0
    assert_same(behind_relu, expanded, x)


class Between(nn.Module):
    """A padded pool behind a ReLU and something in between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.pool = kind, nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        if self.kind == "shape":
            y = nn.functional.pad(y.permute(0, 1, 3, 2)[:, :1], (1, 0), value=0.5)
        elif self.kind == "negative padding":
            y = nn.functional.pad(y, (1, 0), value=-0.5)
        elif self.kind == "sum":
            y = y + torch.sigmoid(x)
        elif self.kind == "sum with input":
            y = y + x
        elif self.kind == "join":
            y = torch.cat((y, torch.relu(-x)), 1)
        elif self.kind == "leaky":
            y = nn.functional.leaky_relu(x, 0.1)
        elif self.kind == "shift":
            y = y - 1.0
        return torch.flatten(self.pool(y), 1)


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("shape", True),
        ("sum", True),
        ("join", True),
        ("negative padding", False),
        ("sum with input", False),
        ("leaky", False),
        ("shift", False),
    ],
)
def test_what_keeps_values_nonnegative(kind: str, exact: bool) -> None:
    graph = trace(Between(kind), (2, 5, 6)).detach()
    expanded = expand_max_pools(graph)
    assert pools(expanded) == (0 if exact else 1)
    assert_same(graph, expanded, torch.randn(50, 2, 5, 6, dtype=torch.float64) - 1.0)


def test_zero_padding_of_negative_values_would_be_wrong() -> None:
    """The reason why padded pools may have to stay: zeros win over negative inputs."""
    graph = traced(nn.MaxPool2d(3, 2, 1), nn.Flatten(), shape=(1, 3, 3))
    x = -torch.ones(1, 1, 3, 3, dtype=torch.float64)
    assert (expand_max_pools(graph)(x) == -1).all()


def test_names_tell_the_pool() -> None:
    graph = traced(nn.Conv2d(2, 3, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
    name = next(node.name for node in graph.nodes if isinstance(node.op, ops.MaxPool))
    expanded = expand_max_pools(graph)
    names = [node.name for node in expanded.nodes]
    assert len(set(names)) == len(names)
    new = [n for n in names if n not in {node.name for node in graph.nodes}]
    assert len(new) == 4 + 3 * 3 and all(n.startswith(f"{name}.") for n in new)
    assert {node.name for node in graph.nodes} - {name} <= set(names)


def test_a_balanced_tree() -> None:
    """Nine inputs need eight ReLUs, and no input goes through more than four of them."""
    expanded = expand_max_pools(traced(nn.MaxPool2d(3), nn.Flatten()))
    assert len(expanded.relus) == 8
    depth = [0] * len(expanded.nodes)
    for i, node in enumerate(expanded.nodes):
        deepest = max((depth[j] for j in node.inputs), default=0)
        depth[i] = deepest + isinstance(node.op, ops.Relu)
    assert max(depth) == 4


def test_networks_without_pools_stay_as_they_are() -> None:
    graph = traced(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten())
    expanded = expand_max_pools(graph)
    assert [vars(node) for node in expanded.nodes] == [vars(node) for node in graph.nodes]


def test_a_window_without_any_input_stays() -> None:
    """Such an output is minus infinity, which no zero stands for."""
    graph = traced(nn.ReLU(), nn.MaxPool2d(2, 1, 1, dilation=3), nn.Flatten(), shape=(1, 2, 2))
    assert pools(expand_max_pools(graph)) == 1


def check_random(data: st.DataObject) -> None:
    module = data.draw(networks(containing=ops.MaxPool))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    points = points_in(box, 6)
    expanded = expand_max_pools(graph)
    # max(a, b) = a + (b - a) rounds, in proportion to the largest number in the window.
    size = 1 + max(
        float(v.abs().max())
        for v in graph.propagate(
            evaluate.RULES,
            points,
            keep=range(len(graph.nodes)),
        ).values()
    )
    assert torch.allclose(graph(points), expanded(points), rtol=1e-9, atol=1e-9 * size)


@settings(max_examples=40)
@given(data=st.data())
def test_random_networks(data: st.DataObject) -> None:
    check_random(data)


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data())
def test_random_networks_at_length(data: st.DataObject) -> None:
    check_random(data)


def test_pools_of_very_large_windows_stay():
    """A tree over thousands of numbers would take longer to build than to bound."""
    sides = {32: "Sub", 33: "MaxPool"}
    for side, kind in sides.items():
        graph = trace(nn.MaxPool2d(side), (1, side, side))
        assert kind in {type(node.op).__name__ for node in expand_max_pools(graph).nodes}
