"""Linear bounds hold, operation by operation; on random networks see `test_soundness`."""

from __future__ import annotations

import pytest
import torch
from enclosures import assert_inside, hard_points
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_helpers import (
    EFFORTS,
    EPS,
    assert_rows_below,
    output_rows,
    signed_rows,
    small_network,
)
from networks import boxes, networks, points_in, rounding_errors
from torch import nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.linear.alpha import optimize_slopes
from tightrope.domains.linear.bounded import relaxed
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import Effort, relax
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=40)
@given(data=st.data())
def test_bounds_lie_within_interval_bounds(data: st.DataObject) -> None:
    module = data.draw(networks())
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    effort = EFFORTS[data.draw(st.sampled_from(sorted(EFFORTS)))]
    _, plain = interval.bounds(graph, box, keep=range(len(graph.nodes)))
    found = relax(graph, box, effort=effort).boxes
    for i, error in rounding_errors(graph, box, torch.float64).items():
        assert (found[i].lower >= plain[i].lower - 4 * error).all()
        assert (found[i].upper <= plain[i].upper + 4 * error).all()


@settings(max_examples=30)
@given(data=st.data())
def test_rows_of_batches_do_not_mix(data: st.DataObject) -> None:
    """Boxes with other unstable neurons in the batch change nothing for rows of the output."""
    module = data.draw(networks(classes=3))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=3))
    together = relax(graph, box, effort=EFFORTS["crown"])
    errors = rounding_errors(graph, box, torch.float64)
    matrix = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    rows = together.lower(together.output, output_rows(together, matrix)).view(3, -1)
    for k in range(3):
        alone = relax(graph, box[k : k + 1], effort=EFFORTS["crown"])
        mine = alone.lower(alone.output, output_rows(alone, matrix))
        # A neuron next to zero may be stable in one and unstable in the other.
        size = errors[alone.output][k].flatten() @ matrix.abs().t()
        assert ((mine - rows[k]).abs() <= 64 * size).all()
        chosen = relaxed(graph, together.known(k))
        again = chosen.lower(chosen.output, output_rows(chosen, matrix))
        assert ((again - rows[k]).abs() <= 64 * size).all()


# --- operations one by one ----------------------------------------------------------------------

POOLS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 1, 1),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d(2, 3, 1, ceil_mode=True),
    nn.MaxPool2d((2, 3), (1, 2), (1, 0), dilation=(2, 1)),
    nn.MaxPool2d(2, 1, 1, dilation=3),
    nn.MaxPool2d((4, 1), (6, 1), (2, 0), ceil_mode=True),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    nn.AvgPool2d(3, 1, 1),
    nn.ConstantPad2d((1, 2, 0, 1), -0.7),
    nn.ConstantPad2d((-1, 0, 2, -1), 3.0),
]


@pytest.mark.parametrize("radius", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pools_and_pads(pool: nn.Module, radius: float) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3, 1, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), pool, nn.Flatten(), nn.ReLU()
    ).double()
    graph = trace(module, (1, 5, 6)).detach()
    box = Box.ball(torch.rand(2, 1, 5, 6, dtype=torch.float64), radius)
    found = relax(graph, box, effort=EFFORTS["crown"], rounding=EPS)
    points = points_in(box, 200)
    assert_inside(graph, found.boxes, points)
    matrix = signed_rows(graph.output_shape[0], torch.Generator().manual_seed(0), torch.float64)
    assert_rows_below(found, points, matrix, torch.tensor(1e-13, dtype=torch.float64))
    if radius == 0.0:  # nothing is relaxed on a point
        lower = found.lower(found.output, output_rows(found, matrix)).view(2, -1)
        exact = graph(box.lower) @ matrix.t()
        assert torch.allclose(lower, exact, rtol=1e-9, atol=1e-9)


def test_a_pool_whose_windows_stick_out_far() -> None:
    module = nn.Sequential(nn.MaxPool2d((8, 1), (5, 1), (4, 0), ceil_mode=True), nn.Flatten())
    graph = trace(module, (1, 2, 1)).detach()
    box = Box(torch.tensor([[[[-1.0], [-2.0]]]]), torch.tensor([[[[1.0], [2.0]]]]))
    found = relax(graph, box, effort=EFFORTS["crown"])
    assert_inside(graph, found.boxes, points_in(box, 20))
    matrix = torch.eye(graph.output_shape[0])
    assert_rows_below(found, points_in(box, 20), matrix, torch.tensor(0.0))


@pytest.mark.parametrize("ending", [nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.Identity()])
@pytest.mark.parametrize("kind", ["dense", "conv", "residual"])
def test_networks_that_end_in_anything(kind: str, ending: nn.Module) -> None:
    body = small_network(kind, nn.ReLU())
    tail = trace(nn.Sequential(ending), (3,))
    nodes = body.nodes
    if len(tail.nodes) > 1:
        last = tail.nodes[-1]
        nodes = (*nodes, type(last)(last.name, last.op, (len(nodes) - 1,), last.shape))
    graph = Graph(nodes)
    torch.manual_seed(0)
    box = Box.ball(torch.rand(2, *graph.input_shape, dtype=torch.float64), 0.2)
    matrix = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    for effort in EFFORTS.values():
        found = relax(graph, box, effort=effort, rounding=EPS)
        assert_rows_below(found, hard_points(graph, box), matrix, torch.tensor(1e-12))
        rows = output_rows(found, matrix)
        slopes = optimize_slopes(found, found.output, rows, iterations=3)
        better = found.lower(found.output, rows, slopes=slopes)
        assert (better >= found.lower(found.output, rows) - 1e-9).all()


def test_an_output_that_ignores_the_input() -> None:
    layer = nn.Linear(2, 2).double()
    with torch.no_grad():
        layer.weight.zero_()
    graph = trace(nn.Sequential(layer, nn.ReLU(), nn.Linear(2, 1).double()), (2,)).detach()
    box = Box.ball(torch.rand(1, 2, dtype=torch.float64), 0.5)
    found = relax(graph, box, effort=EFFORTS["alpha"], rounding=EPS)
    lower = found.lower(1, Coefficients(torch.eye(2, dtype=torch.float64), None))
    assert torch.allclose(lower, layer.bias.detach(), atol=1e-12)
    assert torch.allclose(found.boxes[3].lower, graph(box.lower), atol=1e-12)


def test_overflow_is_no_bound() -> None:
    """Numbers beyond the range give infinite or undefined bounds, never finite wrong ones."""
    layers = [nn.Linear(2, 2).double() for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.tensor([[1e200, -1e200], [1e200, 1e200]]))
            layer.bias.zero_()
    module = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    graph = trace(module, (2,)).detach()
    box = Box(torch.tensor([[-1.0, -1.0]]).double(), torch.tensor([[1.0, 1.0]]).double())
    for effort in EFFORTS.values():
        found = relax(graph, box, effort=effort, rounding=EPS)
        rows = output_rows(found, torch.eye(2, dtype=torch.float64))
        assert not torch.isfinite(found.lower(found.output, rows)).any()


def test_chunks_of_rows_change_nothing() -> None:
    graph = small_network("residual", nn.ReLU())
    box = Box.ball(torch.rand(2, *graph.input_shape, dtype=torch.float64), 0.1)
    for iterations in (0, 2):
        whole = relax(graph, box, effort=Effort(iterations))
        parts = relax(graph, box, effort=Effort(iterations, memory=20_000))
        for i, bounds in whole.boxes.items():
            assert torch.allclose(bounds.lower, parts.boxes[i].lower, atol=1e-6)
            assert torch.allclose(bounds.upper, parts.boxes[i].upper, atol=1e-6)
