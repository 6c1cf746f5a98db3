"""The comparison of a graph with its network: what is let through and what is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import Call, norm
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import Graph, ops, trace
from tightrope.graph.graph import Node
from tightrope.graph.same import Shown, box_points, general_points, same_function

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max


def chain(*steps: ops.Op, size: int = 2) -> Graph:
    """A graph of operations in a row on `size` numbers."""
    nodes = [Node("input", ops.Input(), (), (size,))]
    nodes += [Node(f"step{i}", op, (i,), (size,)) for i, op in enumerate(steps)]
    return Graph(tuple(nodes))


def showing(*values: Tensor, outputs: Tensor | None = None) -> Callable[[Tensor], Shown]:
    """A network that shows the values of the steps (of a chain)."""
    shown = {i: [value] for i, value in enumerate(values, start=1)}
    return lambda x: Shown(values[-1] if outputs is None else outputs, shown)


def difference(graph: Graph, run: Callable[[Tensor], Shown], points: Tensor) -> str:
    with pytest.raises(UserError) as caught:
        same_function(graph, run, points)
    assert "\n" not in str(caught.value)
    return str(caught.value)


X = torch.tensor([[1.0, 2.0], [-3.0, 1e9]])
DOUBLE = ops.Scale(torch.tensor(2.0))


# --- what is let through ----------------------------------------------------------------------


def test_the_same_numbers() -> None:
    same_function(chain(DOUBLE, ops.Relu()), showing(2 * X, F.relu(2 * X)), X)


def test_values_may_have_another_shape() -> None:
    found = (2 * X).view(2, 1, 2)
    same_function(chain(DOUBLE), showing(found, outputs=found), X)


def test_a_difference_of_one_rounding() -> None:
    found = torch.nextafter(2 * X, torch.tensor(INF))
    same_function(chain(DOUBLE), showing(found), X)


def test_a_network_need_not_show_every_step() -> None:
    same_function(chain(DOUBLE, ops.Relu()), lambda x: Shown(F.relu(2 * X), {}), X)


def test_rounding_of_steps_that_are_not_shown_is_carried() -> None:
    """A third of three times a number, by one who rounds in between in another way."""
    steps = chain(ops.Scale(torch.tensor(1e-3)), ops.Scale(torch.tensor(1e3)))
    found = torch.nextafter(X, torch.tensor(INF))
    same_function(steps, lambda x: Shown(found, {2: [found]}), X)


@pytest.mark.parametrize("overflow", [INF, -INF, NAN])
def test_overflow_of_both(overflow: float) -> None:
    x = torch.tensor([[LARGEST, 1.0]])
    found = torch.tensor([[overflow, 2.0]])
    same_function(chain(DOUBLE), showing(found), x)


def test_overflow_of_a_graph_that_nearly_does() -> None:
    """The network's sum overflows, ours in another order just does not."""
    x = torch.nextafter(torch.tensor([[LARGEST, 1.0]]), torch.zeros(()))
    found = torch.where(x > 1, INF, x)
    same_function(chain(ops.Shift(torch.zeros(()))), showing(found), x)


# --- what is found ----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("relative", [1e-6, 1e-3, 1.0])
def test_one_element_beside_large_ones(row: int, relative: float) -> None:
    found = 2 * X
    found[row, 0] += relative * found[row, 0].abs()
    message = difference(chain(DOUBLE), showing(found), X)
    assert "at 'step0' (Scale)" in message and "at element (0,)" in message


UNIT = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_bound_is_that_of_the_rule(sign: int) -> None:
    """A product may be off by three units: those of its factor and of two results."""
    x, same = torch.ones(1, 2), ops.Scale(torch.tensor(1.0))
    same_function(chain(same), showing(x + sign * 2 * UNIT), x)
    difference(chain(same), showing(x + sign * 4 * UNIT), x)


def test_each_step_starts_from_the_numbers_of_the_network() -> None:
    """The second step undoes more of the first than its own rounding explains."""
    x, same = torch.ones(1, 2), ops.Scale(torch.tensor(1.0))
    run = showing(x + 2 * UNIT, x - 2 * UNIT)
    assert "'step1'" in difference(chain(same, same), run, x)


def test_a_step_in_the_middle_that_the_outputs_hide() -> None:
    """The rectifier cuts the difference off at these points."""
    steps = chain(DOUBLE, ops.Relu())
    x = torch.tensor([[-1.0, -2.0]])
    message = difference(steps, showing(2 * x - 1, torch.zeros(1, 2)), x)
    assert "'step0' (Scale)" in message


def test_a_second_showing_of_the_same_step() -> None:
    values = [2 * X, 2 * X + torch.tensor([1e-3, 0])]
    run = lambda x: Shown(2 * X, {1: values})  # noqa: E731
    assert "'step0'" in difference(chain(DOUBLE), run, X)


def test_a_copy_of_the_input_that_is_none() -> None:
    run = lambda x: Shown(2 * X, {0: [X + torch.tensor([1e-3, 0])], 1: [2 * X]})  # noqa: E731
    assert "'input'" in difference(chain(DOUBLE), run, X)


def test_outputs_of_the_network_as_its_user_runs_it() -> None:
    run = showing(2 * X, outputs=2 * X + torch.tensor([1e-3, 0]))
    assert "in its outputs" in difference(chain(DOUBLE), run, X)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_overflow_of_the_network_alone(value: float) -> None:
    found = 2 * X
    found[0, 1] = value
    assert "at element (1,)" in difference(chain(DOUBLE), showing(found), X)


@pytest.mark.parametrize("value", [0.0, 1.0, LARGEST / 2])
def test_overflow_of_the_graph_alone(value: float) -> None:
    x = torch.tensor([[LARGEST, 1.0]])
    assert "inf instead of" in difference(chain(DOUBLE), showing(torch.tensor([[value, 2.0]])), x)


def test_another_precision() -> None:
    message = difference(chain(DOUBLE), showing((2 * X).double()), X)
    assert "torch.float64 for torch.float32" in message


@pytest.mark.parametrize("found", [torch.zeros(2, 3), torch.zeros(4, 1), torch.zeros(1, 2)])
def test_another_number_of_values(found: Tensor) -> None:
    assert "shape" in difference(chain(DOUBLE), showing(found), X)


# --- deep and ill-conditioned networks --------------------------------------------------------


def deep(activation: type[nn.Module], gain: float) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(30):
        layers += [nn.Linear(12, 12), activation()]
        nn.init.normal_(layers[-2].weight, std=gain / math.sqrt(12))
    return nn.Sequential(*layers, nn.Linear(12, 3))


class Cancelling(nn.Module):
    """Blocks that add large numbers and take them away again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(30))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = 1e6 * layer(x)
            x = x + (hidden + torch.relu(layer(x))) - hidden
        return x


class Residual(nn.Module):
    """Thirty blocks of convolution and BatchNorm whose variances are nearly nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(30))
        self.norms = nn.ModuleList(norm(nn.BatchNorm2d, 3) for _ in range(30))
        for layer in self.norms:
            layer.running_var.mul_(1e-9)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, layer in zip(self.convolutions, self.norms, strict=True):
            x = x + 1e-2 * torch.relu(layer(convolution(x)))
        return x.flatten(1)


def opposite_weights() -> nn.Module:
    layer = nn.Linear(400, 3)
    with torch.no_grad():
        layer.weight[:, 200:] = -layer.weight[:, :200] * (1 + 1e-6)
        layer.weight.mul_(1e8)
    return Call(lambda self, x: self.layer(torch.cat((x, x), 1)), layer=layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: deep(nn.ReLU, 1.0), (12,)),
        (lambda: deep(nn.ReLU, 4.0), (12,)),
        (lambda: deep(nn.Tanh, 3.0), (12,)),
        (lambda: deep(nn.Sigmoid, 30.0), (12,)),
        (Cancelling, (12,)),
        (Residual, (3, 6, 6)),
        (opposite_weights, (200,)),
    ],
    ids=["deep", "growing", "saturated", "steps", "cancelling", "residual", "opposite weights"],
)
def test_rounding_is_not_taken_for_an_error(
    build: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    module = build().to(dtype).eval()
    x = torch.rand(1, *shape, dtype=dtype)
    graph = trace(module, shape, box=Box.ball(x, 0.1))
    assert graph.input_shape == shape


def test_a_network_that_overflows() -> None:
    torch.manual_seed(1)
    module = deep(nn.ReLU, 1e3)
    assert not torch.isfinite(module(torch.ones(1, 12))).all()
    assert trace(module, (12,)).output_shape == (3,)


# --- points -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 19])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_general_points(shape: tuple[int, ...], count: int) -> None:
    like = torch.zeros(1, dtype=torch.float64)
    points = general_points(shape, count, like)
    assert points.shape == (count, *shape) and points.dtype == torch.float64
    assert torch.equal(points, general_points(shape, count, like))
    assert (points[0] == 0).all()
    if count == 19:
        assert (points[1] == 1).all()
        assert (points < 0).any() and points.abs().max() >= 1e3
        rows = points.reshape(count, -1)
        assert ((rows >= 0) & (rows <= 1)).all(1).sum() >= 4
        assert (rows.abs() == rows.abs().amax(1, keepdim=True)).all(1).sum() >= 5


@pytest.mark.parametrize("count", [1, 2, 5, 19])
def test_box_points(count: int) -> None:
    lower = torch.tensor([[0.1, 0.2, 0.7]])
    upper = torch.tensor([[0.3, 0.2, 0.8]])
    points = box_points(Box(lower, upper), count)
    assert points.shape == (count, 3)
    assert ((points >= lower) & (points <= upper)).all()
    assert torch.equal(points[0], lower[0])
    if count == 19:
        assert torch.equal(points[1], upper[0])
        corners = ((points == lower) | (points == upper)).all(1)
        assert 8 <= corners.sum() < 19
        assert len(points.unique(dim=0)) > 8
