"""Exact optimisation agrees with trying every activation pattern; its bounds are sound."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import magnitudes, networks, points_in
from patterns import exact_minimum, patterns
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval, milp
from tightrope.domains.milp.encoding import Encoding
from tightrope.domains.milp.highs import Objective, Solver
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = torch.finfo(torch.float64).eps
ACTIVATIONS = (ops.Relu, ops.LeakyRelu, ops.MaxPool)
PIECEWISE_LINEAR = frozenset(ops.ALL_OPS) - {ops.Input, ops.Sigmoid, ops.Tanh}


class Residual(nn.Module):
    """A residual block with a ReLU in the branch and one behind the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x - self.second(torch.relu(self.first(x))))


def dense() -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.Sequential(*layers), (3,)


def conv() -> tuple[nn.Module, tuple[int, ...]]:
    norm = nn.BatchNorm2d(2)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    image = (nn.Conv2d(1, 2, 2, stride=2, padding=1), norm, nn.AvgPool2d(2), nn.ReLU())
    head = (nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.Sequential(*image, *head), (1, 3, 3)


def residual() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(2, 4), Residual(4), nn.Linear(4, 3)), (2,)


def leaky() -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3), nn.LeakyReLU(2.0))
    return nn.Sequential(*layers, nn.Linear(3, 3)), (3,)


def pooled() -> tuple[nn.Module, tuple[int, ...]]:
    image = (nn.Conv2d(1, 1, 2), nn.MaxPool2d(2, stride=1, padding=1, ceil_mode=True))
    head = (nn.Flatten(), nn.Linear(9, 2), nn.ReLU(), nn.Linear(2, 3))
    return nn.Sequential(*image, *head), (1, 3, 3)


KINDS = {"dense": dense, "conv": conv, "residual": residual, "leaky": leaky, "pooled": pooled}


def setting(kind: str, seed: int, radius: float = 0.4) -> tuple[Graph, Box, Tensor]:
    """Return a random network, one box and one row."""
    torch.manual_seed(seed)
    module, shape = KINDS[kind]()
    graph = trace(module.double().eval(), shape).detach()
    for op in (node.op for node in graph.nodes if isinstance(node.op, ops.Linear)):
        op.weight.mul_(2.0)
    box = Box.ball(torch.rand(1, *shape, dtype=torch.float64), radius)
    return graph, box, torch.randn(3, dtype=torch.float64)


def feeding(graph: Graph) -> list[int]:
    return [node.inputs[0] for node in graph.nodes if isinstance(node.op, ACTIVATIONS)]


def strict_bounds(graph: Graph, box: Box) -> dict[int, Box]:
    return interval.bounds(graph, box, keep=feeding(graph), rounding=EPS)[1]


def encoded(graph: Graph, box: Box, *, relaxed: bool = False) -> Encoding:
    return Encoding(graph, box, strict_bounds(graph, box), relaxed=relaxed)


def value(graph: Graph, point: Tensor, row: Tensor) -> float:
    return (graph(point[None]).flatten() @ row).item()


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
def test_worst_margin_is_the_least_over_the_classes(kind: str, seed: int) -> None:
    graph, box, _ = setting(kind, seed)
    identity = torch.eye(3, dtype=torch.float64)
    for label in range(3):
        others = [i for i in range(3) if i != label]
        rows = [identity[label] - identity[i] for i in others]
        exact = min(exact_minimum(graph, box, row)[0] for row in rows)
        found = milp.worst_margin(encoded(graph, box), label)
        assert found.finished and found.point is not None
        assert found.lower == pytest.approx(exact, abs=1e-6)
        outputs = graph(found.point[None])[0]
        margin = (outputs[label] - outputs[others]).min().item()
        assert margin == pytest.approx(found.upper, abs=1e-12)
        assert found.upper == pytest.approx(exact, abs=1e-6)


def test_worst_margin_stops_where_told() -> None:
    graph, box, _ = setting("dense", 0)
    exact = milp.worst_margin(encoded(graph, box), 0)
    above = milp.worst_margin(encoded(graph, box), 0, stop_above=exact.lower - 0.5)
    assert above.finished and exact.lower - 0.5 < above.lower <= exact.upper
    below = milp.worst_margin(encoded(graph, box), 0, stop_below=exact.upper + 0.5)
    assert below.finished and exact.lower - 1e-6 <= below.upper < exact.upper + 0.5
    assert below.lower <= exact.upper
    none = milp.worst_margin(encoded(graph, box), 0, seconds=0.0)
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


# --- ending early -----------------------------------------------------------------------------


def hard() -> tuple[Graph, Box, Tensor]:
    """Return a problem whose relaxation is loose and that takes a search."""
    torch.manual_seed(1)
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    graph = trace(nn.Sequential(*layers).double(), (8,)).detach()
    box = Box.ball(torch.rand(1, 8, dtype=torch.float64), 0.5)
    return graph, box, torch.ones(1, dtype=torch.float64)


def test_stop_above_ends_with_a_bound_above() -> None:
    graph, box, row = hard()
    whole = milp.minimize(encoded(graph, box), row)
    relaxed = milp.minimize(encoded(graph, box, relaxed=True), row)
    threshold = (whole.lower + relaxed.lower) / 2
    assert whole.finished and relaxed.lower < threshold < whole.lower
    found = milp.minimize(encoded(graph, box), row, stop_above=threshold)
    assert found.finished and threshold < found.lower < whole.lower - 1e-6
    assert found.upper >= whole.upper - 1e-6
    unreached = milp.minimize(encoded(graph, box), row, stop_above=whole.upper + 1.0)
    assert unreached.finished and unreached.lower == pytest.approx(whole.lower, abs=1e-6)


def test_stop_below_ends_with_a_point_below() -> None:
    graph, box, row = hard()
    whole = milp.minimize(encoded(graph, box), row)
    threshold = whole.upper + 0.05
    found = milp.minimize(encoded(graph, box), row, stop_below=threshold)
    assert found.finished and found.upper < threshold and found.point is not None
    assert value(graph, found.point, row) < threshold
    assert found.lower < whole.lower - 1e-6  # the search did not go on to the optimum
    unreached = milp.minimize(encoded(graph, box), row, stop_below=whole.lower - 1.0)
    assert unreached.finished and unreached.upper == pytest.approx(whole.upper, abs=1e-6)


@pytest.mark.parametrize("seconds", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("relaxed", [True, False])
def test_time_limits_leave_valid_bounds(seconds: float, relaxed: bool) -> None:
    graph, box, row = hard()
    least = graph(points_in(box, 200)).min().item()
    output, _ = interval.bounds(graph, box)
    found = milp.minimize(encoded(graph, box, relaxed=relaxed), row, seconds=seconds)
    assert output.lower.item() - 1e-9 <= found.lower <= least
    assert found.lower <= found.upper
    assert not (seconds == 0.0 and found.finished)


def test_the_number_of_threads_may_change() -> None:
    graph, box, row = setting("dense", 0)
    results = [milp.minimize(encoded(graph, box), row, threads=n) for n in (1, 2, 1)]
    assert all(result.finished for result in results)
    assert results[0].lower == pytest.approx(results[1].lower, abs=1e-6)


# --- tightening -------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tightened_bounds_hold_and_are_no_looser(kind: str, integer: bool) -> None:
    graph, box, row = setting(kind, 7)
    given_bounds = strict_bounds(graph, box)
    copy = {i: Box(b.lower.clone(), b.upper.clone()) for i, b in given_bounds.items()}
    bounds = milp.tighten(graph, box, copy, integer=integer)
    assert all(torch.equal(copy[i].lower, given_bounds[i].lower) for i in copy)
    assert all(torch.equal(copy[i].upper, given_bounds[i].upper) for i in copy)
    assert set(bounds) == set(given_bounds)
    values = graph.propagate(evaluate.RULES, points_in(box, 400), keep=list(bounds))
    for i in set(feeding(graph)):
        assert (bounds[i].lower >= given_bounds[i].lower).all()
        assert (bounds[i].upper <= given_bounds[i].upper).all()
        assert (values[i] >= bounds[i].lower).all() and (values[i] <= bounds[i].upper).all()
    exact, _ = exact_minimum(graph, box, row)
    found = milp.minimize(Encoding(graph, box, bounds), row)
    assert found.lower == pytest.approx(exact, abs=1e-5)


def test_integer_tightening_reaches_the_true_bounds() -> None:
    graph, box, _ = setting("dense", 0, radius=0.6)
    bounds = strict_bounds(graph, box)
    linear = milp.tighten(graph, box, bounds)
    exact = milp.tighten(graph, box, bounds, integer=True)
    second = feeding(graph)[1]
    assert (linear[second].radius < bounds[second].radius - 1e-3).any()
    assert (exact[second].radius < linear[second].radius - 1e-3).any()
    prefix = Graph(graph.nodes[: second + 1])
    unstable = (exact[second].lower < 0) & (exact[second].upper > 0)
    assert unstable.any()
    for k in unstable[0].nonzero()[:, 0].tolist():
        row = torch.eye(4, dtype=torch.float64)[k]
        true, _ = exact_minimum(prefix, box, row)
        assert exact[second].lower[0, k].item() == pytest.approx(true, abs=1e-5)
        assert exact[second].lower[0, k].item() <= true


def test_tightening_within_no_time_keeps_what_was_given() -> None:
    graph, box, _ = setting("residual", 1)
    bounds = strict_bounds(graph, box)
    same = milp.tighten(graph, box, bounds, seconds_per_neuron=0.0, integer=True)
    values = graph.propagate(evaluate.RULES, points_in(box, 100), keep=list(same))
    for i in set(feeding(graph)):
        assert (same[i].lower >= bounds[i].lower).all() and (same[i].upper <= bounds[i].upper).all()
        assert (values[i] >= same[i].lower).all() and (values[i] <= same[i].upper).all()


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bounds_that_are_not_finite_are_refused(bad: float) -> None:
    graph, box, _ = setting("dense", 0)
    bounds = strict_bounds(graph, box)
    position = feeding(graph)[0]
    broken = bounds[position].upper.clone()
    broken[0, 0] = bad
    with pytest.raises(UserError, match=f"bounds of node {position} are not finite"):
        Encoding(graph, box, {**bounds, position: Box(bounds[position].lower, broken)})
    with pytest.raises(UserError, match="bounds of the input are not finite"):
        Encoding(graph, Box(box.lower, box.upper * bad), bounds)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("layer", [0, -1])
def test_weights_that_are_not_finite_are_refused(bad: float, layer: int) -> None:
    graph, box, _ = setting("dense", 0)
    bounds = strict_bounds(graph, box)
    weights = [node.op.weight for node in graph.nodes if isinstance(node.op, ops.Linear)]
    weights[layer][0, 0] = bad
    with pytest.raises(UserError, match="not finite on the box"):
        Encoding(graph, box, bounds)


def test_rows_that_are_not_finite_prove_nothing() -> None:
    graph, box, row = setting("dense", 0)
    found = milp.minimize(encoded(graph, box), row * math.nan, stop_above=0.0, stop_below=0.0)
    assert found.lower == -math.inf and found.upper == math.inf and not found.finished


def test_other_bad_bounds_are_refused() -> None:
    graph, box, _ = setting("dense", 0)
    bounds = strict_bounds(graph, box)
    position = feeding(graph)[0]
    with pytest.raises(UserError, match="above its upper bound"):
        Encoding(graph, Box(box.upper, box.lower), bounds)
    with pytest.raises(UserError, match="one sample at a time"):
        Encoding(graph, box.repeat(2), bounds)
    with pytest.raises(UserError, match=f"no bounds of node {position}"):
        Encoding(graph, box, {})


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.Tanh()])
def test_what_is_not_piecewise_linear_is_refused(layer: nn.Module) -> None:
    graph = trace(nn.Sequential(nn.Linear(2, 2), layer).double(), (2,))
    with pytest.raises(UserError, match="not piecewise linear"):
        Encoding(graph, Box(torch.zeros(1, 2), torch.ones(1, 2)), {})


@pytest.mark.parametrize("package", ["highspy", "scipy.sparse"])
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    graph, box, row = setting("dense", 0)
    monkeypatch.setitem(sys.modules, package, None)
    name = package.split(".")[0]
    with pytest.raises(UserError, match=rf"needs {name}.*pip install 'tightrope\[milp\]'"):
        milp.minimize(encoded(graph, box), row)


def test_integer_programs_are_not_presolved() -> None:
    """With presolve, HiGHS has been seen to prove optima that a point of the box beats."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    graph = trace(module, (3,)).detach()
    lower = torch.zeros(1, 3, dtype=torch.float64)
    box = Box(lower, lower + 1)
    bounds = interval.bounds(graph, box, keep=range(len(graph.nodes)))[1]
    solver = Solver(Encoding(graph, box, bounds), threads=1)
    for relaxed, presolve in ((False, "off"), (True, "choose")):
        assert solver._new(relaxed=relaxed).getOptionValue("presolve")[1] == presolve
