"""Zonotopes have the values of the DeepZ formulas, and hold whatever the slopes are."""

from __future__ import annotations

import pytest
import torch
from enclosures import assert_inside
from fuzzed import zonotope_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval, zonotope
from tightrope.graph import Graph, Node, evaluate, ops, trace
from tightrope.graph.windows import pooled_places

pytestmark = pytest.mark.usefixtures("one_thread")

KINKED = (ops.Relu, ops.LeakyRelu)


def every_node(graph: Graph, box: Box, slopes: dict[int, Tensor]) -> dict[int, Box]:
    return zonotope.bounds(graph, box, keep=range(len(graph.nodes)), slopes=slopes)[1]


def network(*layers: nn.Module, shape: tuple[int, ...] = (1,)) -> Graph:
    return trace(nn.Sequential(*layers).double().eval(), shape).detach()


def one_op(op: ops.Op, shape: tuple[int, ...] = (1,)) -> Graph:
    return Graph((Node("input", ops.Input(), (), shape), Node("op", op, (0,), shape)))


def interval_box(lower: list[float], upper: list[float]) -> Box:
    return Box(
        torch.tensor([lower], dtype=torch.float64), torch.tensor([upper], dtype=torch.float64)
    )


# --- soundness --------------------------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data(), op=st.sampled_from(KINKED), outside=st.booleans())
def test_any_slopes_are_sound(data: st.DataObject, op: type[ops.Op], outside: bool) -> None:
    module = data.draw(networks(containing=op))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    slopes = {}
    for i, node in enumerate(graph.nodes):
        if isinstance(node.op, KINKED):
            batch = data.draw(st.sampled_from([1, 2]))
            drawn = torch.rand(batch, *node.shape, generator=generator, dtype=torch.float64)
            slopes[i] = 3 * drawn - 1 if outside else drawn
    # Lines that do not go through the ends make zonotopes a few times larger than boxes.
    errors = zonotope_errors(graph, box, torch.float64)
    slack = {i: 4.0 * 16 ** len(slopes) * error for i, error in errors.items()}
    assert_inside(graph, every_node(graph, box, slopes), points_in(box, 16), slack)


def test_boxes_of_a_point_stay_points() -> None:
    torch.manual_seed(0)
    graph = network(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3),
        nn.Tanh(), shape=(1, 4, 4),
    )  # fmt: skip
    x = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    output, _ = zonotope.bounds(graph, Box(x, x))
    torch.testing.assert_close(output.lower, graph(x), rtol=0, atol=1e-14)
    torch.testing.assert_close(output.upper, graph(x), rtol=0, atol=1e-14)


# --- values -----------------------------------------------------------------------------------


def test_relu_has_the_parallelogram_of_deepz() -> None:
    graph = network(nn.ReLU())
    found = zonotope.propagate(graph, interval_box([-1.0], [3.0]))[1]
    # slope 3/4, mu = -l u / (2 (u - l)) = 3/8
    assert found.center.tolist() == [[9 / 8]]
    assert found.generators.tolist() == [[[3 / 2], [3 / 8]]]
    assert (found.box.lower.item(), found.box.upper.item()) == (-0.75, 3.0)


@pytest.mark.parametrize(
    ("slope", "expected"),
    [(0.0, (0.0, 3.0)), (1.0, (-1.0, 4.0)), (0.5, (-0.5, 3.0)), (0.9, (-0.9, 3.6))],
)
def test_chosen_slopes_have_their_mu(slope: float, expected: tuple[float, float]) -> None:
    """With mu = max(-slope l, (1 - slope) u) / 2 the bounds are slope l and slope u + 2 mu."""
    box = interval_box([-1.0], [3.0])
    found, _ = zonotope.bounds(network(nn.ReLU()), box, slopes={1: torch.tensor(slope).double()})
    assert (found.lower.item(), found.upper.item()) == pytest.approx(expected, abs=1e-7)


def test_relu_of_stable_neurons_is_exact_and_adds_no_terms() -> None:
    found = zonotope.propagate(network(nn.ReLU(), shape=(4,)), interval_box(
        [-2.0, 0.0, 1.0, -1.0], [-1.0, 2.0, 2.0, 0.0]
    ))[1]  # fmt: skip
    assert found.generators.shape == (1, 4, 4)
    assert found.box.lower.tolist() == [[0.0, 0.0, 1.0, 0.0]]
    assert found.box.upper.tolist() == [[0.0, 2.0, 2.0, 0.0]]


def test_terms_are_made_for_neurons_unstable_somewhere_in_the_batch() -> None:
    lower = torch.tensor([[1.0, -1.0, -2.0], [-1.0, -2.0, -2.0]], dtype=torch.float64)
    box = Box(lower, lower + 1.5)
    found = zonotope.propagate(network(nn.ReLU(), shape=(3,)), box)[1]
    assert found.generators.shape == (2, 3 + 2, 3)
    assert found.generators[0, 3:, 0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0, 2.0])
def test_leaky_relu_is_as_tight_as_its_chord(slope: float) -> None:
    found = zonotope.propagate(one_op(ops.LeakyRelu(slope)), interval_box([-1.0], [3.0]))[1]
    chord = (3 + slope) / 4
    assert found.generators[0, 0, 0].item() == pytest.approx(2 * chord)
    radius = abs(-slope + chord) / 2  # the gap at the ends; at the kink there is none
    assert found.generators[0, 1, 0].item() == pytest.approx(radius)
    middle = (-slope + chord) / 2
    assert found.center.item() == pytest.approx(chord + middle)


@pytest.mark.parametrize("op", [ops.Sigmoid(), ops.Tanh()])
@pytest.mark.parametrize("ends", [(-1.0, 3.0), (0.5, 0.75), (-900.0, 900.0), (-4.0, -2.0)])
def test_squashing_reaches_exactly_the_ends(op: ops.Op, ends: tuple[float, float]) -> None:
    box = interval_box([ends[0]], [ends[1]])
    found = zonotope.propagate(one_op(op), box)[1]
    exact = [evaluate.RULES[type(op)](op, t).item() for t in box.corners]
    assert [t.item() for t in found.box.corners] == pytest.approx(exact, abs=1e-14)
    x = box.center.clone().requires_grad_()
    steepest = torch.autograd.grad(evaluate.RULES[type(op)](op, x).sum(), x)[0]
    assert 0 <= found.generators[0, 0, 0].item() <= (steepest * box.radius).item() + 1e-14


def test_affine_networks_are_exact() -> None:
    torch.manual_seed(1)
    graph = network(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3),
        shape=(1, 3, 3),
    )  # fmt: skip
    x = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    found, _ = zonotope.bounds(graph, Box.around(x, torch.full_like(x, 0.5)))
    jacobian = torch.autograd.functional.jacobian(graph, x).flatten(2)[0]
    expected = 0.5 * jacobian.abs().flatten(1).sum(1)
    torch.testing.assert_close(found.radius[0], expected)
    torch.testing.assert_close(found.center, graph(x))
    loose, _ = interval.bounds(graph, Box.around(x, torch.full_like(x, 0.5)))
    assert (found.radius < loose.radius).all()


class Join(nn.Module):
    """relu(x) joined with relu(-x), each branch with error terms of its own."""

    def __init__(self, join: str) -> None:
        super().__init__()
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.relu(x), torch.relu(-x)
        if self.join == "cat":
            return torch.cat((left, right), 1)
        return left + right if self.join == "add" else left - right


def test_error_terms_of_branches_stay_apart() -> None:
    """relu(x) = x/2 + 1/4 ± 1/4 and relu(-x) = -x/2 + 1/4 ± 1/4 on [-1, 1]."""
    box = interval_box([-1.0], [1.0])
    difference, _ = zonotope.bounds(trace(Join("sub"), (1,)), box)
    assert (difference.lower.item(), difference.upper.item()) == (-1.5, 1.5)
    total, _ = zonotope.bounds(trace(Join("add"), (1,)), box)
    assert (total.lower.item(), total.upper.item()) == (0.0, 1.0)
    both = zonotope.propagate(trace(Join("cat"), (1,)), box)
    (both,) = both.values()
    assert both.generators.tolist() == [[[0.5, -0.5], [0.25, 0.0], [0.0, 0.25]]]


def test_max_pool_passes_on_what_dominates_and_takes_the_hull_otherwise() -> None:
    graph = trace(nn.MaxPool2d((1, 2)), (1, 2, 2))
    lower = torch.tensor([[[[2.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    upper = torch.tensor([[[[3.0, 2.0], [2.0, 4.0]]]], dtype=torch.float64)
    found = zonotope.propagate(graph, Box(lower, upper))[1]
    assert found.center.flatten().tolist() == [2.5, 2.5]
    assert found.generators.shape[1] == 4 + 1
    assert found.generators[0, :, 0, 0, 0].tolist() == [0.5, 0, 0, 0, 0]
    assert found.generators[0, :, 0, 1, 0].tolist() == [0, 0, 0, 0, 1.5]


@settings(max_examples=60)
@given(data=st.data())
def test_windows_are_those_of_torch(data: st.DataObject) -> None:
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride, dilation = data.draw(pair), data.draw(pair), data.draw(pair)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    shape = (data.draw(st.integers(1, 2)), 7, 8)
    op = ops.MaxPool(kernel, stride, padding, dilation, data.draw(st.booleans()))
    x = torch.randn(1, *shape, dtype=torch.float64)
    found = pooled_places(op, shape)
    values = x.flatten()[found.clamp(min=0)].masked_fill(found < 0, -torch.inf).amax(0)
    assert torch.equal(values, evaluate.RULES[ops.MaxPool](op, x)[0])


# --- gradients and refusals -------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh()])
def test_gradients_are_those_of_the_bounds(activation: nn.Module) -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, 4), activation).double()
    graph = trace(module, (3,))
    center, radius = torch.randn(2, 3).double(), torch.rand(2, 3).double()
    parameters = tuple(module.parameters())

    def upper(*tensors: Tensor) -> Tensor:
        held = dict(zip(map(id, parameters), tensors, strict=True))
        changed = graph.map_tensors(lambda t: held.get(id(t), t))
        box, _ = zonotope.bounds(changed, Box.around(center, radius))
        return torch.cat((box.lower, box.upper))

    assert torch.autograd.gradcheck(upper, parameters)


def test_gradients_are_finite_on_points_and_stable_neurons() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2), nn.Sigmoid()
    )
    x = torch.rand(2, 1, 4, 4)
    bound, _ = zonotope.margins(trace(module, (1, 4, 4)), Box(x, x), torch.tensor([0, 1]))
    bound.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_slopes_belong_to_activations() -> None:
    with pytest.raises(ValueError, match="node 1 is no ReLU"):
        zonotope.bounds(
            network(nn.Linear(1, 1)), interval_box([0.0], [1.0]), slopes={1: torch.ones(1)}
        )
