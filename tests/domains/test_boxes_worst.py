"""Condensed networks and bounds on boxes where single terms matter, against fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from adverse import DIRECTIONS, adverse
from exact import exact_values, fractions
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.boxes.bounding import GraphBounder, RowBounds, box_bounder, smallest_values
from tightrope.domains.boxes.condensed import Condensed
from tightrope.domains.boxes.condensing import condense
from tightrope.domains.interval import row_bounds
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.domains.linear.forms import tighter
from tightrope.graph import Graph, trace
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")

EACH_DIRECTION = pytest.mark.parametrize("direction", DIRECTIONS)
THIN = 2.0**-41  # no variable


class Residual(nn.Module):
    """The sum, or the difference, of what two modules make of the same input."""

    def __init__(self, first: nn.Module, second: nn.Module, sign: int) -> None:
        super().__init__()
        self.first, self.second, self.sign = first, second, sign

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        return first + second if self.sign > 0 else first - second


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=torch.float64))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias, dtype=torch.float64))
    return layer


def graph_of(*layers: nn.Module, inputs: int) -> Graph:
    return trace(nn.Sequential(*layers).double().eval(), (inputs,)).detach()


def box_of(lower: list[float], upper: list[float]) -> Box:
    return Box(*(torch.tensor([t], dtype=torch.float64) for t in (lower, upper)))


def condensed(graph: Graph, box: Box, direction: str = "nearest") -> Condensed:
    """Condense one row, the sum of all outputs."""
    count = graph.output_shape[0]
    matrix, offset = torch.ones(1, count).double(), torch.zeros(1).double()
    known = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING).boxes
    with adverse(direction):
        rows = condense(graph, known, matrix, offset, rounding=ROUNDING)
    assert rows is not None
    return rows


def check_corners(graph: Graph, box: Box, rows: Condensed) -> None:
    """Compare the last row with the exact value at two corners, up to its own slack."""
    for corner in box.corners:
        values = fractions(corner[0])[rows.varying].tolist()
        for i in range(len(rows.bias)):
            span = range(rows.pointer[i], rows.pointer[i + 1])
            terms = (Fraction(rows.weight[p]) * values[rows.source[p]] for p in span)
            value = sum(terms, Fraction(rows.bias[i]))
            left = Fraction(rows.left[i]) if i < rows.neurons else Fraction(1)
            values.append(value if value >= 0 else left * value)
        exact = exact_values(graph, corner[0])[len(graph.nodes) - 1].sum()
        # Rows of neurons are exact in these networks, or linear in what is off.
        assert abs(values[-1] - exact) <= Fraction(float(rows.slack.sum()))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("twin", [False, True])
def test_inputs_that_hardly_vary_count_with_their_width(sign: int, twin: bool) -> None:
    box = box_of([1.0] * 4, [2.0, *[1 + THIN] * 3])
    weight = [[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, -1.0, -1.0]]
    layers: list[nn.Module] = [linear(weight), linear([[1.0, sign]])]
    if twin:
        part = Residual(linear([[0.0, 3.0, 2.0, 1.0]]), linear([[0.0, 1.0, 1.0, 4.0]]), sign)
        layers = [part, linear([[1.0]])]
    graph = graph_of(*layers, inputs=4)
    rows = condensed(graph, box)
    check_corners(graph, box, rows)
    found = box_bounder(graph, box, torch.ones(1, 1).double(), torch.zeros(1).double())
    low, high = (t[:, found.varying] for t in box.corners)
    exact = min(
        exact_values(graph, torch.tensor([a, b, c, d]).double())[len(graph.nodes) - 1][0]
        for a in (1.0, 2.0)
        for b in (1.0, 1 + THIN)
        for c in (1.0, 1 + THIN)
        for d in (1.0, 1 + THIN)
    )
    assert Fraction(float(found(low, high).lower)) <= exact


@pytest.mark.parametrize(("left", "sign"), [(0.0, 1), (0.25, 1), (0.0, -1), (0.25, -1)])
def test_twins_differ_by_what_they_are_off(left: float, sign: int) -> None:
    """`h + a` and `h + b` are one row where a and b hardly vary, and yet not the same."""
    box = box_of([-2.0, 1.0, 1.0], [2.0, 1 + THIN, 1 + THIN])
    first = linear([[1.0, 1.0, 0.0], [sign, 0.0, sign]])
    graph = graph_of(first, nn.LeakyReLU(left), linear([[1.0, -1.0], [-1.0, 1.0]]), inputs=3)
    matrix, offset = torch.eye(2).double(), torch.zeros(2).double()
    bounder = box_bounder(graph, box, matrix, offset)
    assert bounder.varying.tolist() == [0]
    for x in (-2.0, -1.0, 0.5, 2.0):
        at = torch.tensor([[x]], dtype=torch.float64)
        found = bounder(at, at).lower[0]
        for a, b in ((1.0, 1 + THIN), (1 + THIN, 1.0)):
            point = torch.tensor([x, a, b], dtype=torch.float64)
            exact = exact_values(graph, point)[len(graph.nodes) - 1]
            assert (fractions(found) <= exact).all()


@EACH_DIRECTION
def test_products_of_layers_that_cancel(direction: str) -> None:
    torch.manual_seed(0)
    for _ in range(10):
        first, second = torch.rand(30, 1).double() + 1, torch.rand(1, 30).double() + 1
        both = second @ first
        second[0, -1] -= float(both) / float(first[-1])
        graph = graph_of(linear(first.tolist()), linear(second.tolist()), inputs=1)
        box = box_of([1.0], [2.0])
        check_corners(graph, box, condensed(graph, box, direction))


@EACH_DIRECTION
def test_products_of_layers_that_vanish(direction: str) -> None:
    graph = graph_of(linear([[1e-200]]), linear([[1e-150]]), inputs=1)
    box = box_of([-1e100], [1e100])
    check_corners(graph, box, condensed(graph, box, direction))


@EACH_DIRECTION
def test_normalisation_by_large_means(direction: str) -> None:
    torch.manual_seed(1)
    for _ in range(10):
        norm = nn.BatchNorm1d(1).double()
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.fill_(1e6 * float(torch.rand(())) + 1e6)
        norm.running_var.fill_(float(torch.rand(())) + 0.5)
        with torch.no_grad():
            norm.weight.copy_(torch.rand(1) + 0.5)
            norm.bias.copy_(norm.running_mean * norm.weight / norm.running_var.sqrt())
        graph = graph_of(linear([[1e-3]]), norm, inputs=1)
        box = box_of([0.0], [1e-3])
        check_corners(graph, box, condensed(graph, box, direction))


# --- bounds on the graph ------------------------------------------------------------------------


def rows_on_graph(graph: Graph, box: Box, direction: str) -> RowBounds:
    matrix, offset = torch.ones(1, graph.output_shape[0]).double(), torch.zeros(1).double()
    bounder = GraphBounder(graph, box, matrix, offset)
    low, high = (t[:, bounder.varying] for t in box.corners)
    with adverse(direction):
        return bounder(low, high)


@EACH_DIRECTION
def test_graph_bounds_where_layers_cancel(direction: str) -> None:
    torch.manual_seed(0)
    first, second = torch.rand(300, 1).double() + 1, torch.rand(1, 300).double() + 1
    second[0, -1] -= float(second @ first) / float(first[-1])
    graph = graph_of(linear(first.tolist()), linear(second.tolist()), inputs=1)
    box = box_of([1.0], [2.0])
    found = rows_on_graph(graph, box, direction)
    for corner in box.corners:
        exact = exact_values(graph, corner[0])[len(graph.nodes) - 1][0]
        line = Fraction(float(found.slope)) * Fraction(float(corner)) + Fraction(
            float(found.constant)
        )
        assert Fraction(float(found.lower)) <= line <= exact


@EACH_DIRECTION
def test_graph_bounds_of_inputs_that_do_not_vary(direction: str) -> None:
    """They go into the constant: a long sum, each term of which is rounded beside the first."""
    count = 300
    graph = graph_of(linear([[1.0, *[1e-30] * count]], [0.0]), inputs=count + 1)
    box = box_of([1.0] * (count + 1), [1.0] * (count + 1))
    found = rows_on_graph(graph, box, direction)
    exact = 1 + count * Fraction(1e-30)
    assert Fraction(float(found.constant)) <= exact
    thin = box_of([1.0, *[1.0] * count], [2.0, *[1 + THIN] * count])
    graph = graph_of(linear([[1.0, *[-1.0] * count]]), inputs=count + 1)
    found = rows_on_graph(graph, thin, direction)
    assert Fraction(float(found.lower)) <= 1 - count * (1 + Fraction(THIN))


@EACH_DIRECTION
def test_smallest_values_of_long_sums(direction: str) -> None:
    count = 300
    slope = torch.full((1, 1, count), 1e-30, dtype=torch.float64)
    slope[0, 0, 0] = 1.0
    ends = torch.ones(1, count, dtype=torch.float64)
    with adverse(direction):
        found = smallest_values(slope, torch.zeros(1, 1).double(), ends, ends)
    assert Fraction(float(found)) <= 1 + (count - 1) * Fraction(1e-30)
    tiny = torch.full((1, 1, 1), -1e-200, dtype=torch.float64)
    with adverse(direction):
        found = smallest_values(tiny, torch.zeros(1, 1).double(), *[-tiny[0]] * 2)
    assert Fraction(float(found)) <= -(Fraction(1e-200) ** 2)


@EACH_DIRECTION
def test_rows_on_an_interval(direction: str) -> None:
    count = 300
    matrix = torch.full((1, count), 1e-30, dtype=torch.float64)
    matrix[0, 0] = 1.0
    ends = torch.ones(1, count, dtype=torch.float64)
    with adverse(direction):
        found = row_bounds(Box(ends, ends), matrix, rounding=ROUNDING)
    assert Fraction(float(found)) <= 1 + (count - 1) * Fraction(1e-30)
    tiny = torch.full((1, 10), 0.9 * 2.0**-537, dtype=torch.float64)
    with adverse(direction):
        found = row_bounds(Box(tiny, tiny), -tiny / 2, rounding=ROUNDING)
    assert Fraction(float(found)) <= -5 * Fraction(0.9 * 2.0**-537) ** 2
    box = Box(torch.tensor([[-1.0, 2.0]]).double(), torch.tensor([[3.0, 5.0]]).double())
    rows = torch.tensor([[1.0, -1.0], [-2.0, 1.0]], dtype=torch.float64)
    found = row_bounds(box, rows, rounding=ROUNDING)
    assert (found <= torch.tensor([-6.0, -4.0])).all() and (
        found > torch.tensor([-6.1, -4.1])
    ).all()


def test_what_two_boxes_have_in_common() -> None:
    first = Box(torch.tensor([[0.0, -3.0]]), torch.tensor([[4.0, 1.0]]))
    second = Box(torch.tensor([[-1.0, -2.0]]), torch.tensor([[2.0, 5.0]]))
    both = tighter(first, second)
    assert both.lower.tolist() == [[0.0, -2.0]] and both.upper.tolist() == [[2.0, 1.0]]


@EACH_DIRECTION
def test_constants_of_layers_that_cancel(direction: str) -> None:
    torch.manual_seed(2)
    for _ in range(2):
        biases, second = torch.rand(600).double() + 1, torch.rand(1, 600).double() + 1
        second[0, -1] -= float(second @ biases) / float(biases[-1])
        first = linear([[1e-9]] * 600, biases.tolist())
        graph = graph_of(first, linear(second.tolist()), inputs=1)
        box = box_of([1e-9], [2e-9])
        check_corners(graph, box, condensed(graph, box, direction))


def test_neurons_that_differ_by_a_constant() -> None:
    first = linear([[1.0], [1.0]], [0.0, 0.5])
    graph = graph_of(first, nn.ReLU(), linear([[1.0, -1.0]]), inputs=1)
    box = box_of([-1.0], [1.0])
    assert condensed(graph, box).neurons == 2
    check_corners(graph, box, condensed(graph, box))


def test_moved_values_keep_their_slack() -> None:
    """Padding has a value of its own, and inputs that hardly vary are as wide as before."""
    module = nn.Sequential(nn.Unflatten(1, (1, 1, 3)), nn.ConstantPad2d(1, 1.5), nn.Flatten())
    graph = graph_of(*module, inputs=3)
    box = box_of([0.0, 1.0, 1.0], [1.0, 1 + THIN, 1 + THIN])
    rows = condensed(graph, box)
    check_corners(graph, box, rows)
    found = box_bounder(graph, box, torch.ones(1, 15).double(), torch.zeros(1).double())
    at = torch.zeros(1, 1, dtype=torch.float64)
    exact = 12 * Fraction(1.5) + 2
    assert 0 <= exact - Fraction(float(found(at, at).lower)) < Fraction(1, 10**9)


def test_graph_bounds_with_offsets() -> None:
    graph = graph_of(linear([[1.0]]), nn.Sigmoid(), inputs=1)
    box, offset = box_of([0.0], [1.0]), torch.tensor([-3.0], dtype=torch.float64)
    bounder = box_bounder(graph, box, torch.ones(1, 1).double(), offset)
    assert isinstance(bounder, GraphBounder)
    assert -2.6 < float(bounder(*box.corners).lower) <= -2.5


def test_switches_of_large_weights_are_decided() -> None:
    """`relu(x) - 1e10 relu(x - 1)` is exactly zero where x is negative, on whatever box."""
    layers = [linear([[1.0], [1.0]], [0.0, -1.0]), linear([[1.0, -1e10], [1.0, 0.0]])]
    last = linear([[-1e10, 1e10]], [1.0])
    graph = graph_of(layers[0], nn.ReLU(), layers[1], nn.ReLU(), last, nn.ReLU(), inputs=1)
    box = box_of([-3.0], [3.0])
    check_corners(graph, box, condensed(graph, box))
    bounder = box_bounder(graph, box, torch.ones(1, 1).double(), torch.zeros(1).double())
    low, high = (torch.tensor([[x]], dtype=torch.float64) for x in (-3.0, -1.0))
    found = bounder(low, high)
    assert int(found.bent) == 0
    assert 0 <= 1 - Fraction(float(found.lower)) < Fraction(1, 1000)


@EACH_DIRECTION
@pytest.mark.parametrize(
    "layers",
    [
        (linear([[1.0], [1.0]]), nn.ReLU(), linear([[0.1, 0.2]], [-0.3])),  # they are twins
        (linear([[0.1]]), linear([[3.0]], [-0.3])),
    ],
)
def test_weights_that_are_no_copies(layers: tuple[nn.Module, ...], direction: str) -> None:
    graph = graph_of(*layers, nn.ReLU(), linear([[1.0]]), inputs=1)
    box = box_of([-1.0], [1.0])
    check_corners(graph, box, condensed(graph, box, direction))
