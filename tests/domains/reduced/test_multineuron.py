"""Multi-neuron constraints of layers: which rows are asked for, and that they hold and cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from tightrope.domains.reduced import hulls
from tightrope.domains.reduced.multineuron import Constraints, layer_constraints

pytestmark = pytest.mark.usefixtures("one_thread")


def groups_of(neurons: int, size: int = 3) -> Tensor:
    """Return all groups of so many neurons."""
    return torch.tensor(list(combinations(range(neurons), size))).reshape(-1, size)


class Layer:
    """The image of the box [-1, 1]^inputs under a linear map, with exact row bounds."""

    def __init__(self, neurons: int, inputs: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(neurons, inputs, generator=generator, dtype=torch.float64)
        self.bias = 0.3 * torch.randn(neurons, generator=generator, dtype=torch.float64)
        self.asked: list[Tensor] = []
        spread = self.weight.abs().sum(1) * (1 + 1e-12)
        self.lower, self.upper = self.bias - spread, self.bias + spread

    def bound_rows(self, rows: Tensor) -> Tensor:
        self.asked.append(rows)
        return ((rows @ self.weight).abs().sum(1) + rows @ self.bias) + 1e-12

    def sample(self, count: int) -> Tensor:
        x = (2 * torch.rand(count, self.weight.shape[1], dtype=torch.float64) - 1) * 3
        return x.clamp(-1, 1) @ self.weight.T + self.bias


def value(constraints: Constraints, h: Tensor) -> Tensor:
    on_outputs, on_inputs = constraints.on_outputs.T, constraints.on_inputs.T
    return h.relu() @ on_outputs + h @ on_inputs + constraints.constant


@pytest.mark.parametrize("neurons, size", [(2, 2), (3, 3), (5, 2), (5, 3), (7, 3)])
def test_layer_constraints_hold_and_cut(neurons: int, size: int) -> None:
    layer = Layer(neurons, 3, seed=neurons)
    groups = groups_of(neurons, size)
    constraints = layer_constraints(layer.lower, layer.upper, groups, layer.bound_rows, most=40)
    assert constraints is not None
    assert constraints.on_outputs.shape == (len(constraints), neurons)
    torch.manual_seed(0)
    h = layer.sample(20000)
    assert value(constraints, h).max() <= 0
    relaxed = layer.upper / (layer.upper - layer.lower) * (h - layer.lower)
    top = relaxed @ constraints.on_outputs.T + h @ constraints.on_inputs.T + constraints.constant
    assert top.max() > 0.05


def test_stable_infinite_and_huge_neurons_are_in_no_group() -> None:
    lower = torch.tensor([-1, 0, -1, -torch.inf, -1, torch.nan, -1e200, -1], dtype=torch.float64)
    upper = torch.tensor([1, 1, 0, 1, torch.inf, 1, 1e200, 2], dtype=torch.float64)
    asked: list[Tensor] = []

    def bound_rows(rows: Tensor) -> Tensor:
        asked.append(rows)
        return rows.abs().sum(1) / 2

    constraints = layer_constraints(lower, upper, groups_of(8, 2), bound_rows)
    assert constraints is not None
    (rows,) = asked
    assert rows.any(0).nonzero()[:, 0].tolist() == [0, 7]


def test_rows_are_asked_for_once() -> None:
    layer = Layer(6, 3, seed=1)
    layer_constraints(layer.lower, layer.upper, groups_of(6), layer.bound_rows, most=2)
    (rows,) = layer.asked
    assert len(rows.unique(dim=0)) == len(rows) == 15 * 4 + 20 * 8
    assert set(rows.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert (rows.abs().sum(1) > 1).all()


def test_no_constraints_without_groups_or_with_row_bounds_that_say_nothing() -> None:
    layer, groups = Layer(4, 3, seed=4), groups_of(4)
    assert layer_constraints(layer.lower.abs(), layer.upper + 9, groups, layer.bound_rows) is None
    assert layer_constraints(layer.lower, layer.upper, groups[:0], layer.bound_rows) is None
    assert not layer.asked

    def unknown(rows: Tensor) -> Tensor:
        return torch.full((len(rows),), torch.nan, dtype=torch.float64)

    assert layer_constraints(layer.lower, layer.upper, groups, unknown) is None
    every = {"smallest_cut": -np.inf}
    useless = layer_constraints(layer.lower, layer.upper, groups, unknown, **every)
    if useless is not None:
        assert value(useless, layer.sample(1000)).max() <= 0


def test_row_bounds_of_a_wrong_shape_are_an_error() -> None:
    layer = Layer(4, 3, seed=4)
    for wrong in (
        lambda rows: rows,
        lambda rows: rows[:, 0][:1],
        lambda rows: rows.sum(1, keepdim=True),
    ):
        with pytest.raises(ValueError, match="rows have bounds of shape"):
            layer_constraints(layer.lower, layer.upper, groups_of(4), wrong)


def test_float32_bounds() -> None:
    layer = Layer(4, 3, seed=5)
    lower, upper = layer.lower.float() - 1e-5, layer.upper.float() + 1e-5
    constraints = layer_constraints(
        lower, upper, groups_of(4), lambda rows: layer.bound_rows(rows.double())
    )
    assert constraints is not None
    assert constraints.constant.dtype == torch.float64
    assert value(constraints, layer.sample(2000)).max() <= 0


def test_facets_of_pairs_are_those_of_qhull() -> None:
    for lifted in np.random.default_rng(10).normal(size=(10, 12, 4)):
        tried, expected = hulls._by_trial(lifted), hulls._by_qhull(lifted, "Qx")
        assert tried is not None and expected is not None and len(tried) > 5
        apart = np.abs(tried[:, None] - expected).max(2)
        assert apart.min(0).max() < 1e-9 and apart.min(1).max() < 1e-9
    assert hulls._by_trial(np.eye(4, 4)) is None  # four points are flat
    flat = np.random.default_rng(11).normal(size=(12, 4)) * [1, 1, 1, 0]
    assert hulls._by_trial(flat) is None
