"""CROWN, CROWN-IBP and alpha-CROWN: how tight they are, and that effort pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_helpers import (
    EPS,
    many_points,
    output_rows,
    signed_rows,
    small_box,
    small_network,
    wired,
)
from networks import networks
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.linear import crown
from tightrope.domains.linear.alpha import alpha_bounds, ancestors, forward, optimize_slopes
from tightrope.domains.linear.bounded import Relaxation, relaxed
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import ALPHA, CROWN, CROWN_IBP, Effort, relax
from tightrope.domains.linear.relaxations import unstable
from tightrope.domains.reduced.reduction import reduce
from tightrope.graph import Graph, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", ["dense", "conv", "residual"])
BENT = pytest.mark.parametrize("layer", [nn.ReLU(), nn.LeakyReLU(0.1)], ids=["relu", "leaky"])


def total_width(found: Relaxation) -> float:
    """Return the sum of the widths of everything that activations relax.

    (Stable neurons need no more than their sign, so their bounds may stay wide.)
    """
    nodes = found.graph.nodes
    total = 0.0
    for i in found.lines:
        box = found.boxes[nodes[i].inputs[0]]
        stable = isinstance(nodes[i].op, ops.Relu | ops.LeakyRelu) & ~unstable(box)
        total += float(torch.where(stable, 0.0, box.upper - box.lower).sum())
    return total


def toy() -> Graph:
    """`relu(x + y) - relu(x - y)` on [-1, 1]^2, computed by hand below."""
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    first.weight = nn.Parameter(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    last.weight = nn.Parameter(torch.tensor([[1.0, -1.0]]))
    return trace(nn.Sequential(first, nn.ReLU(), last).double(), (2,)).detach()


def test_by_hand() -> None:
    graph = toy()
    ones = torch.ones(1, 2, dtype=torch.float64)
    found = relax(graph, Box(-ones, ones), effort=CROWN)
    assert torch.equal(found.boxes[1].lower, -2 * ones)
    # Pre-activations lie in [-2, 2]: lower slope 0 (a tie), upper line h / 2 + 1. So the output
    # is at least 0 - (x - y) / 2 - 1 >= -2.
    rows = output_rows(found, torch.ones(1, 1, dtype=torch.float64))
    assert found.lower(2 + 1, rows).item() == pytest.approx(-2.0)
    # With a lower slope of 1/2: (x + y) / 2 - (x - y) / 2 - 1 = y - 1 >= -2; slope 1 gives -3.
    for slope, expected in ((0.5, -2.0), (1.0, -3.0), (0.0, -2.0)):
        slopes = {2: torch.full((1, 2), slope, dtype=torch.float64)}
        assert found.lower(3, rows, slopes=slopes).item() == pytest.approx(expected)


@KINDS
@BENT
def test_more_effort_is_tighter(kind: str, layer: nn.Module) -> None:
    graph = small_network(kind, layer)
    box = small_box(graph, 1.0)
    intervals = interval.bounds(graph, box, keep=range(len(graph.nodes)))[1]
    ibp, crown, alpha = (relax(graph, box, effort=e) for e in (CROWN_IBP, CROWN, ALPHA))
    for i, plain in intervals.items():
        for found in (ibp, crown, alpha):
            assert (found.boxes[i].lower >= plain.lower - 1e-12).all()
            assert (found.boxes[i].upper <= plain.upper + 1e-12).all()
    assert total_width(alpha) < total_width(crown) < total_width(ibp)
    rows = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    bounds = [f.lower(f.output, output_rows(f, rows)) for f in (ibp, crown, alpha)]
    assert bounds[0].sum() < bounds[1].sum() < bounds[2].sum()


@KINDS
@BENT
def test_optimised_slopes_are_never_worse(kind: str, layer: nn.Module) -> None:
    """For the same intermediate bounds; both on the network and on its reduction."""
    graph = small_network(kind, layer)
    found = relax(graph, small_box(graph, 0.4), effort=CROWN)
    matrix = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    rows = output_rows(found, matrix)
    default = found.lower(found.output, rows)
    last = default
    for iterations in (0, 1, 10):
        slopes = optimize_slopes(found, found.output, rows, iterations=iterations, rate=0.25)
        bound = found.lower(found.output, rows, slopes=slopes)
        assert (bound >= default - 1e-9).all()
        assert (bound >= last - 1e-9).all(), "a longer ascent begins like a shorter one"
        last = bound
        network = reduce(found, matrix, torch.zeros(len(matrix), dtype=torch.float64))
        also, _ = alpha_bounds(network, iterations=iterations, rate=0.25)
        assert (also >= default - 1e-4 * (1 + default.abs())).all()
        # The same ascent, but in float32.
        assert torch.allclose(also, bound, rtol=0.02, atol=0.02)
    assert (last > default + 1e-6).any()


@settings(max_examples=25)
@given(data=st.data())
def test_optimised_slopes_are_never_worse_on_random_networks(data: st.DataObject) -> None:
    module = data.draw(networks(classes=3, containing=ops.Relu))
    graph = trace(module, module.input_shape).detach()
    box = Box.ball(torch.rand(1, *module.input_shape, dtype=torch.float64), 0.3)
    found = relax(graph, box, effort=CROWN)
    rows = output_rows(found, signed_rows(3, torch.Generator().manual_seed(0), torch.float64))
    default = found.lower(found.output, rows)
    slopes = optimize_slopes(found, found.output, rows, iterations=4)
    better = found.lower(found.output, rows, slopes=slopes)
    assert (better >= default - 1e-9 * (1 + default.abs())).all()


@KINDS
@BENT
def test_gradients_of_slopes_equal_finite_differences(kind: str, layer: nn.Module) -> None:
    graph = small_network(kind, layer)
    found = relax(graph, small_box(graph, 0.4), effort=CROWN)
    rows = output_rows(found, signed_rows(3, torch.Generator().manual_seed(0), torch.float64))
    torch.manual_seed(0)
    start = optimize_slopes(found, found.output, rows, iterations=0)
    left = getattr(layer, "negative_slope", 0.0)
    slopes = {i: left + (1 - left) * (0.1 + 0.8 * torch.rand_like(t)) for i, t in start.items()}
    form = found.pull(found.output, rows, slopes=slopes)
    seen = forward(found, found.output, form, slopes)
    step, wrong, checked = 1e-6, 0, 0
    for i, values in slopes.items():
        gradient = (form.passed[i].values.clamp(min=0) * seen[i]).flatten(1)
        free = (found.lines[i].upper_intercept > 0).flatten()
        for k in free.nonzero()[:, 0][:8].tolist():
            sides = []
            for sign in (1.0, -1.0):
                moved = values.clone()
                moved.view(len(moved), -1)[:, k] += sign * step
                sides.append(found.lower(found.output, rows, slopes={**slopes, i: moved}))
            slope = (sides[0] - sides[1]) / (2 * step)
            wrong += int((~torch.isclose(slope, gradient[:, k], rtol=1e-4, atol=1e-6)).sum())
            checked += len(slope)
    assert checked > 20 and wrong <= checked // 50  # a kink may lie within a step


def test_rows_above_the_threshold_leave() -> None:
    graph = small_network("dense", nn.ReLU())
    found = relax(graph, small_box(graph, 0.4), effort=CROWN)
    rows = output_rows(found, signed_rows(3, torch.Generator().manual_seed(0), torch.float64))
    default = found.lower(found.output, rows)
    best = found.lower(
        found.output, rows, slopes=optimize_slopes(found, found.output, rows, iterations=12)
    )
    for threshold in (-1e9, float(default.median()), float(best.median()), 1e9):
        slopes = optimize_slopes(found, found.output, rows, iterations=12, threshold=threshold)
        bound = found.lower(found.output, rows, slopes=slopes)
        assert (bound >= default - 1e-9).all()
        # Whatever could get above the threshold did; the others went all the way.
        assert (bound[best <= threshold] >= best[best <= threshold] - 1e-9).all()
        assert (bound[best > threshold] > threshold).all()


@KINDS
def test_points_have_exact_bounds(kind: str) -> None:
    """On a box without width nothing is relaxed, and all efforts agree with the network."""
    graph = small_network(kind, nn.ReLU())
    box = small_box(graph, 0.0)
    for effort in (CROWN_IBP, CROWN, ALPHA):
        found = relax(graph, box, effort=effort, rounding=EPS)
        lower = found.lower(found.output, output_rows(found, torch.eye(3, dtype=torch.float64)))
        assert torch.allclose(lower, graph(box.lower)[0], atol=1e-9)


@KINDS
def test_efforts_that_are_too_expensive_fall_back(kind: str) -> None:
    graph = small_network(kind, nn.ReLU())
    box = small_box(graph, 0.3)
    crown = relax(graph, box, effort=CROWN)
    for effort in (Effort(5, work=0.0), Effort(5, memory=1)):
        found = relax(graph, box, effort=effort)
        for i, bounds in crown.boxes.items():
            assert torch.allclose(bounds.lower, found.boxes[i].lower, atol=1e-9)
            assert torch.allclose(bounds.upper, found.boxes[i].upper, atol=1e-9)


@pytest.mark.parametrize("rounding", [0.0, EPS])
def test_known_bounds_rebuild_the_relaxation(rounding: float) -> None:
    graph = small_network("residual", nn.ReLU())
    box = small_box(graph, 0.3, batch=3)
    found = relax(graph, box, effort=CROWN, rounding=rounding)
    matrix = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    bounds = found.lower(found.output, output_rows(found, matrix)).view(3, -1)
    for k in range(3):
        again = relaxed(graph, found.known(k), rounding=rounding)
        mine = again.lower(again.output, output_rows(again, matrix))
        assert torch.allclose(mine, bounds[k], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(2.0)], ids=str)
def test_other_activations(layer: nn.Module) -> None:
    graph = small_network("dense", layer)
    box = small_box(graph, 0.5)
    found = relax(graph, box, effort=ALPHA, rounding=EPS)
    ibp = relax(graph, box, effort=CROWN_IBP, rounding=EPS)
    assert total_width(found) <= total_width(ibp)
    points = many_points(box)
    matrix = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    lower = found.lower(found.output, output_rows(found, matrix))
    assert (graph(points) @ matrix.t() >= lower - 1e-12).all()


def test_shared_inputs_of_activations() -> None:
    """A node that several activations read, and one that is read twice by a join."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            h = self.second(y)
            return torch.relu(h) + torch.tanh(h) - h + torch.relu(-h)

    torch.manual_seed(0)
    graph = trace(Shared().double(), (2,)).detach()
    box = small_box(graph, 1.0)
    points = many_points(box, 400)
    matrix = signed_rows(3, torch.Generator().manual_seed(0), torch.float64)
    for effort in (CROWN_IBP, CROWN, ALPHA):
        found = relax(graph, box, effort=effort, rounding=EPS)
        lower = found.lower(found.output, output_rows(found, matrix))
        assert (graph(points) @ matrix.t() >= lower - 1e-12).all()
        assert (found.boxes[found.output].lower <= graph(points).amin(0) + 1e-12).all()


def test_ancestors() -> None:
    graph = small_network("residual", nn.ReLU())
    last = len(graph.nodes) - 1
    assert ancestors(graph, last) == set(range(last + 1))
    assert ancestors(graph, 1) == {0, 1} and ancestors(graph, 0) == {0}


def test_rows_of_the_input() -> None:
    graph = small_network("dense", nn.ReLU())
    box = small_box(graph, 0.3)
    found = relax(graph, box, effort=CROWN)
    lower = found.lower(0, Coefficients(torch.eye(3, dtype=torch.float64), None))
    assert torch.allclose(lower, box.lower[0], atol=1e-12)


def test_a_maximum_reaches_the_larger_end() -> None:
    """`a + relu(b - a)` with a in [0, 1] and b in [-1, 2]: between 0 and 2, not 4."""
    graph = wired(
        (2,),
        (ops.Slice((slice(0, 1),)), (0,), (1,)),
        (ops.Slice((slice(1, 2),)), (0,), (1,)),
        (ops.Sub(), (2, 1), (1,)),
        (ops.Relu(), (3,), (1,)),
        (ops.Add(), (1, 4), (1,)),
    )
    lower, upper = torch.tensor([[[0.0, -1.0]], [[1.0, 2.0]]], dtype=torch.float64)
    for effort in (CROWN_IBP, CROWN):
        image = relax(graph, Box(lower, upper), effort=effort, rounding=EPS).boxes[5]
        assert -1e-12 < image.lower.item() <= 0 and 2 <= image.upper.item() < 2 + 1e-12


def test_corners_between_numbers_are_enclosed() -> None:
    center = torch.ones(1, 1, dtype=torch.float64)
    graph = wired((1,), (ops.Relu(), (0,), (1,)))
    box = relax(graph, Box.around(center, center * EPS / 8), rounding=EPS).boxes[0]
    assert box.lower.item() < 1 < box.upper.item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_linear_bounds_that_are_not_numbers_are_no_bounds(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = small_network("dense", nn.ReLU())
    box = small_box(graph, 1.0)
    intervals = relax(graph, box, effort=CROWN_IBP, rounding=EPS)
    monkeypatch.setattr(crown, "few_inputs", lambda *given: None)
    monkeypatch.setattr(
        crown._Tightening,
        "_lower_bounds",
        lambda self, sign, owner, place, _: torch.full((len(place),), bad, dtype=torch.float64),
    )
    found = relax(graph, box, effort=CROWN, rounding=EPS)
    for i, bounds in intervals.boxes.items():
        assert torch.equal(found.boxes[i].lower, bounds.lower)
        assert torch.equal(found.boxes[i].upper, bounds.upper)


@pytest.mark.parametrize("effort", [CROWN, ALPHA], ids=["crown", "alpha"])
def test_affine_layers_in_a_row_are_exact(effort: Effort) -> None:
    """`x + y` and `x - y`, added and subtracted again: 2 x and 2 y, which intervals do not see."""
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for layer in layers:
        layer.weight = nn.Parameter(signs)
    last = nn.Linear(2, 1)
    graph = trace(nn.Sequential(*layers, nn.ReLU(), last).double(), (2,)).detach()
    ones = torch.ones(1, 2, dtype=torch.float64)
    found = relax(graph, Box(-ones, ones), effort=effort, rounding=EPS)
    assert torch.equal(interval.bounds(graph, Box(-ones, ones), keep=[2])[1][2].upper, 4 * ones)
    for end in found.boxes[2].corners:
        assert torch.allclose(end.abs(), 2 * ones, atol=1e-12) and (end.abs() >= 2).all()
