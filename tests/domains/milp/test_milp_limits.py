"""Programs that end early, tighten bounds, or are refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from milp_networks import KINDS, encoded, feeding, setting, strict_bounds, value
from networks import points_in
from patterns import exact_minimum
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.milp import program as milp
from tightrope.domains.milp.encoding import Encoding
from tightrope.domains.milp.highs import Solver
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")


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
