"""Multi-neuron constraints of layers: which groups, which rows, and that they hold and cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tightrope.domains.reduced.multineuron import (
    Constraints,
    GroupSettings,
    choose_groups,
    layer_constraints,
)
from tightrope.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_FACETS = GroupSettings(most_per_group=None, smallest_cut=-np.inf, smallest_area=0.0)


# --- groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, groups", [(0, 0), (1, 0), (10, 10), (20, 45), (30, 140), (50, 326)]
)
def test_number_of_groups(count: int, groups: int) -> None:
    area = torch.linspace(1, 2, count, dtype=torch.float64)
    assert len(choose_groups(-area, area)) == groups


@given(st.integers(0, 14), st.integers(2, 3), st.integers(3, 9), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_groups_share_few_neurons(count: int, size: int, partition: int, overlap: int) -> None:
    generator = torch.Generator().manual_seed(count)
    lower = -torch.rand(count, generator=generator)
    chosen = choose_groups(
        lower, -lower, size=size, partition=partition, overlap=overlap, smallest_area=0
    )
    order = torch.argsort(lower).tolist()
    expected: list[tuple[int, ...]] = []
    for start in range(0, count, partition):
        part = order[start : start + partition]
        taken: list[set[int]] = []
        for group in combinations(part, min(size, max(2, len(part)))):
            if all(len(other & set(group)) <= overlap for other in taken):
                taken.append(set(group))
        expected += [tuple(sorted(group)) for group in taken]
    assert chosen == expected


def test_stable_infinite_and_small_neurons_are_in_no_group() -> None:
    lower = torch.tensor([-1, 0, -1, -torch.inf, -1, torch.nan, -1e-3, -1e200, -1, -1])
    upper = torch.tensor([1, 1, 0, 1, torch.inf, 1, 1, 1e200, 2, 3]).to(lower)
    assert choose_groups(lower, upper) == [(0, 8, 9)]
    assert choose_groups(lower.double(), upper.double(), limit=2) == [(8, 9)]
    assert choose_groups(lower, upper, size=2) == [(8, 9), (0, 9), (0, 8)]
    # However small an area may be, a stable neuron has none.
    everything = {"smallest_area": 0.0, "size": 2, "overlap": 0}
    assert choose_groups(lower, upper, **everything) == [(8, 9), (0, 6)]


# --- layers ---------------------------------------------------------------------------------


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
    on_outputs, on_inputs = (t.to_dense() for t in (constraints.on_outputs, constraints.on_inputs))
    return h.relu() @ on_outputs.T + h @ on_inputs.T + constraints.constant


@pytest.mark.parametrize("neurons", [2, 3, 5, 7])
def test_layer_constraints_hold_and_cut(neurons: int) -> None:
    layer = Layer(neurons, 3, seed=neurons)
    constraints = layer_constraints(
        layer.lower, layer.upper, layer.bound_rows, GroupSettings(partition=5, rows_at_once=7)
    )
    assert constraints is not None
    assert constraints.on_outputs.shape == (len(constraints), neurons)
    torch.manual_seed(0)
    h = layer.sample(20000)
    assert value(constraints, h).max() <= 0
    relaxed = layer.upper / (layer.upper - layer.lower) * (h - layer.lower)
    top = relaxed @ constraints.on_outputs.T + h @ constraints.on_inputs.T + constraints.constant
    assert top.max() > 0.05


def test_bounds_of_another_shape_are_refused() -> None:
    layer = Layer(3, 3, seed=1)
    for wrong in (lambda rows: rows[:, 0][:1], lambda rows: rows.sum(1, keepdim=True)):
        with pytest.raises(ValueError, match="rows have bounds of shape"):
            layer_constraints(layer.lower, layer.upper, wrong)


def test_rows_are_asked_for_once_and_in_chunks() -> None:
    layer = Layer(6, 3, seed=1)
    settings = GroupSettings(overlap=2, rows_at_once=50, most_per_group=2)
    layer_constraints(layer.lower, layer.upper, layer.bound_rows, settings)
    assert max(len(rows) for rows in layer.asked) <= 50
    rows = torch.cat(layer.asked)
    assert len(rows.unique(dim=0)) == len(rows) == 15 * 4 + 20 * 8
    assert set(rows.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert (rows.abs().sum(1) > 1).all()


def test_sparse_and_dense_constraints_are_the_same() -> None:
    layer = Layer(6, 3, seed=2)
    arguments = (layer.lower, layer.upper, layer.bound_rows)
    dense = layer_constraints(*arguments, GroupSettings(partition=4))
    sparse = layer_constraints(*arguments, GroupSettings(partition=4, sparse=True))
    assert dense is not None and sparse is not None
    assert sparse.on_outputs.layout is torch.sparse_csr
    assert torch.equal(sparse.on_outputs.to_dense(), dense.on_outputs)
    assert torch.equal(sparse.on_inputs.to_dense(), dense.on_inputs)
    assert torch.equal(sparse.constant, dense.constant)


def test_a_fraction_of_the_constraints_can_be_kept() -> None:
    layer = Layer(6, 3, seed=3)
    arguments = (layer.lower, layer.upper, layer.bound_rows)
    every = layer_constraints(*arguments, GroupSettings(most_per_group=None))
    third = layer_constraints(*arguments, GroupSettings(most_per_group=None, keep=1 / 3))
    assert every is not None and third is not None
    assert len(third) == -(-len(every) // 3)
    assert layer_constraints(*arguments, GroupSettings(keep=0.0)) is None


def test_no_constraints_without_groups_or_with_row_bounds_that_say_nothing() -> None:
    layer = Layer(4, 3, seed=4)
    assert layer_constraints(layer.lower.abs(), layer.upper + 9, layer.bound_rows) is None
    assert not layer.asked

    def unknown(rows: Tensor) -> Tensor:
        return torch.full((len(rows),), torch.nan, dtype=torch.float64)

    assert layer_constraints(layer.lower, layer.upper, unknown) is None
    useless = layer_constraints(layer.lower, layer.upper, unknown, ALL_FACETS)
    if useless is not None:
        assert value(useless, layer.sample(1000)).max() <= 0


def test_row_bounds_of_a_wrong_shape_are_an_error() -> None:
    layer = Layer(4, 3, seed=4)
    with pytest.raises(ValueError, match="shape"):
        layer_constraints(layer.lower, layer.upper, lambda rows: rows)


def test_float32_bounds() -> None:
    layer = Layer(4, 3, seed=5)
    lower, upper = layer.lower.float() - 1e-5, layer.upper.float() + 1e-5
    constraints = layer_constraints(lower, upper, lambda rows: layer.bound_rows(rows.double()))
    assert constraints is not None
    assert constraints.constant.dtype == torch.float64
    assert value(constraints, layer.sample(2000)).max() <= 0


@pytest.mark.parametrize(
    "setting", [{"size": 4}, {"partition": 2}, {"overlap": 3}, {"keep": 1.5}, {"rows_at_once": 0}]
)
def test_wrong_settings_are_explained(setting: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(setting))} is .*must be"):
        GroupSettings(**setting)
