"""Exact optimisation agrees with trying every activation pattern; its bounds are sound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from milp_networks import KINDS, encoded, setting, value
from networks import magnitudes, networks
from patterns import exact_minimum, patterns
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.milp import program as milp
from tightrope.domains.milp.encoding import Encoding
from tightrope.domains.milp.expressions import NOT_PIECEWISE_LINEAR
from tightrope.domains.milp.highs import Objective, Solver
from tightrope.graph import Graph, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")
PIECEWISE_LINEAR = frozenset(ops.ALL_OPS) - {ops.Input, *NOT_PIECEWISE_LINEAR}


def check_equal(graph: Graph, box: Box, row: Tensor, scale: float = 1.0) -> None:
    """Check the exact optimum and the relaxation against enumeration."""
    exact, _ = exact_minimum(graph, box, row, 0.25)
    encoding = encoded(graph, box)
    found = milp.minimize(encoding, row, 0.25)
    tolerance = 1e-6 * (1 + scale)
    assert found.finished
    assert found.point is not None and box.contains(found.point[None]).all()
    assert found.upper == pytest.approx(value(graph, found.point, row) + 0.25, abs=1e-12)
    assert found.lower - milp.safety(encoding, row) <= exact
    assert abs(found.lower - exact) <= tolerance and abs(found.upper - exact) <= tolerance
    relaxed = milp.minimize(encoded(graph, box, relaxed=True), row, 0.25)
    assert relaxed.finished and relaxed.lower <= exact  # proved, so without any tolerance
    assert relaxed.upper >= exact - tolerance
    output, _ = interval.bounds(graph, box)
    loosest = torch.minimum(row * output.lower.flatten(), row * output.upper.flatten()).sum() + 0.25
    assert relaxed.lower >= loosest.item() - tolerance


# --- optima -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_optimum_equals_enumeration(kind: str, seed: int) -> None:
    check_equal(*setting(kind, seed))


def check_drawn_network(data: st.DataObject) -> None:
    module = data.draw(networks(allowed=PIECEWISE_LINEAR, longest=5))
    graph = trace(module, module.input_shape).detach()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.rand(1, *module.input_shape, generator=generator, dtype=torch.float64)
    radius = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    flat = torch.rand(x.shape, generator=generator) < 0.3  # some inputs are fixed
    box = Box.ball(x, data.draw(st.sampled_from([0.05, 0.5])) * radius.masked_fill(flat, 0.0))
    assume(patterns(graph, box) <= 64)
    width = graph.nodes[-1].shape[0]
    row = torch.randn(width, generator=generator, dtype=torch.float64)
    scale = magnitudes(graph, box)[len(graph.nodes) - 1].flatten() @ row.abs()
    assume(scale < 1e5)
    check_equal(graph, box, row, scale.item())


@settings(max_examples=30)
@given(data=st.data())
def test_drawn_networks_equal_enumeration(data: st.DataObject) -> None:
    check_drawn_network(data)


@pytest.mark.slow
@settings(max_examples=600)
@given(data=st.data())
def test_drawn_networks_equal_enumeration_at_length(data: st.DataObject) -> None:
    check_drawn_network(data)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("kind", ["dense", "residual"])
def test_the_worst_margin_is_the_least_over_the_classes(kind: str, seed: int) -> None:
    graph, box, _ = setting(kind, seed)
    identity = torch.eye(3, dtype=torch.float64)
    for label in range(3):
        others = [i for i in range(3) if i != label]
        rows = [identity[label] - identity[i] for i in others]
        exact = min(exact_minimum(graph, box, row)[0] for row in rows)
        found = milp.minimize_margin(encoded(graph, box), label)
        assert found.finished and found.point is not None
        assert found.lower == pytest.approx(exact, abs=1e-6)
        outputs = graph(found.point[None])[0]
        margin = (outputs[label] - outputs[others]).min().item()
        assert margin == pytest.approx(found.upper, abs=1e-12)
        assert found.upper == pytest.approx(exact, abs=1e-6)


def test_the_worst_margin_stops_where_told() -> None:
    graph, box, _ = setting("dense", 0)
    exact = milp.minimize_margin(encoded(graph, box), 0)
    above = milp.minimize_margin(encoded(graph, box), 0, stop_above=exact.lower - 0.5)
    assert above.finished and exact.lower - 0.5 < above.lower <= exact.upper
    below = milp.minimize_margin(encoded(graph, box), 0, stop_below=exact.upper + 0.5)
    assert below.finished and exact.lower - 1e-6 <= below.upper < exact.upper + 0.5
    assert below.lower <= exact.upper
    none = milp.minimize_margin(encoded(graph, box), 0, seconds=0.0)
    assert not none.finished and -math.inf < none.lower <= exact.upper


class AgainstInput(nn.Module):
    """relu(x) - x / 2: zero at zero, whose triangle on [-1, 3] goes up to 3/4 there."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) - x / 2


def test_triangle_has_its_known_extremes() -> None:
    graph = trace(AgainstInput(), (1,)).detach()
    box = Box(torch.tensor([[-1.0]]).double(), torch.tensor([[3.0]]).double())
    row = torch.ones(1).double()
    for sign, exact, relaxed in [(1.0, 0.0, 0.0), (-1.0, -1.5, -1.5)]:
        assert milp.minimize(encoded(graph, box), sign * row).upper == pytest.approx(exact)
        found = milp.minimize(encoded(graph, box, relaxed=True), sign * row)
        assert found.lower == pytest.approx(relaxed) and found.lower <= relaxed
    # At the single point 0 with loose bounds the relaxation is all that is left of them.
    wide = {0: Box(torch.tensor([[-2.0]]).double(), torch.tensor([[6.0]]).double())}
    point = Box(torch.zeros(1, 1).double(), torch.zeros(1, 1).double())
    found = milp.minimize(Encoding(graph, point, wide, relaxed=True), -row)
    assert found.lower == pytest.approx(-1.5)  # the chord from (-2, 0) to (6, 6) at zero
    assert found.upper == 0.0 and milp.minimize(Encoding(graph, point, wide), -row).lower >= -1e-6


def test_networks_without_unstable_neurons_are_linear_programs() -> None:
    graph, box, row = setting("dense", 1, radius=0.0)
    encoding = encoded(graph, box)
    assert encoding.is_linear and milp.safety(encoding, row) == 0.0
    found = milp.minimize(encoding, row)
    exact = value(graph, box.lower[0], row)
    assert found.finished and found.upper == pytest.approx(exact, abs=1e-14)
    assert exact - 1e-12 <= found.lower <= found.upper


# --- proofs and tolerances --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_dual_values_prove_a_bound(kind: str) -> None:
    """The bound of a linear program holds whatever the solver returns."""
    graph, box, row = setting(kind, 5)
    exact, _ = exact_minimum(graph, box, row)
    solver = Solver(encoded(graph, box, relaxed=True), 1)
    objective = Objective.of(solver.encoding, row.numpy(), 0.0)
    count = len(solver.rows.lower)
    assert count > 0
    random = np.random.default_rng(0)
    for scale in (0.0, 0.1, 1.0, 1e6):
        assert solver._dual_bound(objective, scale * random.standard_normal(count)) <= exact
    strange = np.full(count, np.nan)
    strange[::2] = np.inf
    assert solver._dual_bound(objective, strange) <= exact


def test_safety_grows_with_the_weights() -> None:
    """A switch hidden behind large numbers is not verified: the allowance exceeds the margin."""
    graph, box, row = setting("dense", 0)
    small = milp.safety(encoded(graph, box), row)
    for op in (node.op for node in graph.nodes if isinstance(node.op, ops.Linear)):
        op.weight.mul_(1e4)
    assert 1e-8 < small < 1e-4 and milp.safety(encoded(graph, box), row) > 1.0


def test_coefficients_that_the_solver_drops_are_allowed_for() -> None:
    module = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU()).double()
    graph = trace(module, (2,)).detach()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 5e-13]], dtype=torch.float64))
    low = torch.tensor([[-1.0, -1e9]], dtype=torch.float64)
    box = Box(low, -low)
    row = -torch.ones(1).double()
    exact = -(1.0 + 5e-4)
    assert milp.minimize(encoded(graph, box, relaxed=True), row).lower <= exact
    encoding = encoded(graph, box)
    assert milp.minimize(encoding, row).lower - milp.safety(encoding, row) <= exact


def test_models_that_the_solver_refuses_leave_interval_bounds() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()).double()
    module[0].weight.data.fill_(1e18)
    graph = trace(module, (1,)).detach()
    box = Box(-torch.ones(1, 1).double(), torch.ones(1, 1).double())
    found = milp.minimize(encoded(graph, box), torch.ones(1).double())
    assert not found.finished and found.point is None
    assert -math.inf < found.lower <= 0.0 and found.upper == math.inf
