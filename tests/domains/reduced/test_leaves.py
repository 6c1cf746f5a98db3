"""Fully split subproblems: their optimum, their proof, and empty ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from linear_helpers import EPS, many_points, small_box, small_network
from patterns import exact_minimum
from reduced_problems import MATRIX, OFFSET, neuron_values
from small_reduced import Neuron, Row, reduced, subproblem
from torch import Tensor, nn

from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import CROWN, relax
from tightrope.domains.reduced import leaves
from tightrope.domains.reduced.leaves import Leaf, solve_leaf
from tightrope.domains.reduced.reduction import Reduced, reduce
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder, Subproblems

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = pytest.mark.parametrize(("activation", "seed"), [("relu", 0), ("relu", 1), ("leaky", 2)])


def prepared(activation: str, seed: int) -> tuple[Relaxation, Reduced]:
    """Return a small network with at most six unstable neurons."""
    layer = nn.ReLU() if activation == "relu" else nn.LeakyReLU(0.2)
    graph = small_network("dense", layer, seed=seed)
    for radius in (2.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1):
        found = relax(graph, small_box(graph, radius, seed=seed), effort=CROWN, rounding=EPS)
        network = reduce(found, MATRIX, OFFSET)
        if network.size <= 6:
            break
    assert 2 <= network.size <= 6
    return found, network


def all_leaves(network: Reduced, row: int) -> list[Subproblems]:
    root = Bounder(network).root(torch.tensor([row]))
    signs = torch.tensor(list(product((1, -1), repeat=network.size)), dtype=torch.int8)
    return [replace(root, sign=sign[None]) for sign in signs]


def proved(network: Reduced, leaf: Leaf, rows: Tensor) -> float:
    weights = torch.zeros(1, len(network.rows), dtype=torch.float64)
    weights[0, rows] = leaf.weights
    return float(strict_bounds(network, leaf.problem, weights)[0])


@CASES
def test_the_lowest_leaf_is_the_minimum(activation: str, seed: int) -> None:
    found, network = prepared(activation, seed)
    for row in (seed % 3, 2):
        rows = torch.tensor([row])
        leaves = [solve_leaf(network, p, rows) for p in all_leaves(network, row)]
        expected, _ = exact_minimum(found.graph, found.box, MATRIX[row], OFFSET[row].item())
        lowest = min((leaf for leaf in leaves if leaf.point is not None), key=lambda k: k.value)
        assert abs(lowest.value - expected) < 1e-6
        assert lowest.point is not None and network.box.contains(lowest.point[None]).all()
        value = found.graph(lowest.point[None]) @ MATRIX[row] + OFFSET[row]
        assert abs(float(value) - expected) < 1e-6
        for leaf in leaves:
            bound = proved(network, leaf, rows)
            if leaf.point is not None:  # the proof is as good as the optimum, but never better
                assert leaf.value - 1e-5 <= bound <= leaf.value + 1e-6
            elif leaf.value == float("inf"):
                assert bound > 0
            else:
                assert leaf.value != leaf.value, "an undecided leaf is not a number"


@CASES
def test_empty_leaves_are_proved_empty(activation: str, seed: int) -> None:
    """Far more sign patterns exist than occur; nothing that a point lies in is called empty."""
    found, network = prepared(activation, seed)
    h = neuron_values(found, network, many_points(found.box, 2000))
    occurring = {tuple(s) for s in torch.where(h >= 0, 1, -1).tolist()}
    rows, empty = torch.arange(3), 0
    for problem in all_leaves(network, 0):
        leaf = solve_leaf(network, problem, rows)
        if tuple(problem.sign[0].tolist()) in occurring:
            assert leaf.point is not None
        if leaf.point is None:
            empty += 1
            assert leaf.value == float("inf") and proved(network, leaf, rows) > 0
    assert empty > 0, "no empty leaf to test"


@CASES
def test_several_rows(activation: str, seed: int) -> None:
    """The minimum of the largest row, proved by a combination of the rows."""
    found, network = prepared(activation, seed)
    points = many_points(found.box, 2000)
    values = found.graph(points) @ MATRIX.t() + OFFSET
    signs = torch.where(neuron_values(found, network, points) >= 0, 1, -1)
    rows = torch.tensor([0, 2])
    for problem in all_leaves(network, 0):
        leaf = solve_leaf(network, problem, rows)
        if leaf.point is None:
            continue
        assert (leaf.weights >= 0).all() and abs(float(leaf.weights.sum()) - 1) < 1e-9
        outputs = found.graph(leaf.point[None])[0] @ MATRIX.t() + OFFSET
        assert abs(float(outputs[rows].max()) - leaf.value) < 1e-6
        inside = (signs == problem.sign[0]).all(1)
        if inside.any():
            assert leaf.value <= float(values[inside][:, rows].amax(1).min()) + 1e-6
        assert leaf.value - 1e-5 <= proved(network, leaf, rows) <= leaf.value + 1e-6


def test_other_multipliers_are_forgotten() -> None:
    """Those of cuts were found for another problem; with them the proof would fall short."""
    _, network = prepared("relu", 0)
    problem = replace(all_leaves(network, 0)[0], gamma=torch.ones(1, 4, dtype=torch.float64))
    leaf = solve_leaf(network, problem, torch.tensor([0]))
    assert not leaf.problem.gamma.any() and leaf.problem.gamma.shape == (1, 4)


def test_float32_problems_keep_the_digits_of_their_multipliers() -> None:
    _, network = prepared("relu", 1)
    for problem in all_leaves(network, 0):
        rough = replace(problem, alpha=problem.alpha.float(), beta=problem.beta.float())
        leaf = solve_leaf(network, rough, torch.tensor([0]))
        assert leaf.problem.beta.dtype == torch.float64


# --- a solver that is wrong ---------------------------------------------------------------------


def small_leaf() -> tuple[Reduced, Subproblems]:
    """Return `x >= 0` on [-1, 1] with the rows `x` and `relu(x) - 1`."""
    layers = [[Neuron([1.0], sign=1)]]
    rows = [Row([1.0]), Row([0.0], [1.0], constant=-1.0)]
    return reduced(layers, rows, [-1.0], [1.0]), subproblem(layers)


def answer(
    marginals: list[float], *, x: float = 0.0, status: int = 0, fun: float = 0.0
) -> SimpleNamespace:
    """Return what a solver says: marginals of rows and splits, and the optimum."""
    duals = SimpleNamespace(marginals=np.array(marginals))
    return SimpleNamespace(status=status, fun=fun, x=np.array([x, fun]), ineqlin=duals)


def lie(monkeypatch: pytest.MonkeyPatch, *answers: SimpleNamespace) -> Leaf:
    """Solve the small leaf with a solver that gives these answers."""
    told = iter(answers)
    monkeypatch.setattr(leaves, "_smallest_maximum", lambda *_: next(told))
    return solve_leaf(*small_leaf(), torch.arange(2))


def test_multipliers_of_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative weights of rows, or of splits, would prove something else."""
    leaf = lie(monkeypatch, answer([0.5, -3.0, 0.25]))
    assert leaf.weights.tolist() == [0.0, 1.0]
    assert leaf.problem.beta.tolist() == [[0.0]]


def test_multipliers_that_are_all_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = lie(monkeypatch, answer([0.0, 0.0, -1.0]))
    assert leaf.weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("x", [-1.5, 1.5])
def test_a_point_outside_of_the_box(monkeypatch: pytest.MonkeyPatch, x: float) -> None:
    leaf = lie(monkeypatch, answer([-1.0, 0.0, 0.0], x=x))
    assert leaf.point is not None and leaf.point.tolist() == [max(-1.0, min(1.0, x))]


@pytest.mark.parametrize("status", [1, 2, 3, 4])
def test_a_search_without_an_optimum(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    failed = answer([-1.0, 0.0, 0.0], status=status)
    leaf = lie(monkeypatch, failed, failed)
    assert leaf.point is None and leaf.value != leaf.value


@pytest.mark.parametrize("violation", [0.0, -0.5])
def test_a_leaf_that_is_not_empty_after_all(
    monkeypatch: pytest.MonkeyPatch, violation: float
) -> None:
    infeasible = answer([-1.0, 0.0, 0.0], status=2)
    leaf = lie(monkeypatch, infeasible, answer([-1.0], fun=violation))
    assert leaf.point is None and leaf.value != leaf.value


def test_an_empty_leaf_with_large_rows() -> None:
    """The splits exclude each other by 1, and have to outweigh -100 relu(x) on [1, 2]."""
    layers = [[Neuron([1.0], upper=2.0, sign=1), Neuron([1.0], upper=2.0, sign=-1)]]
    network = reduced(layers, [Row([0.0], [-100.0])], [1.0], [2.0])
    leaf = solve_leaf(network, subproblem(layers), torch.tensor([0]))
    assert leaf.value == float("inf") and proved(network, leaf, torch.tensor([0])) > 0
