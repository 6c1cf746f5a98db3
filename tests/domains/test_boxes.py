"""Bounds of a property on many boxes, against exact arithmetic: no tolerance."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from exact import exact_values, fractions
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_helpers import OPERATIONS, signed_rows
from lost_digits import cancelling
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.boxes.bounding import (
    BoxBounder,
    CompiledBounder,
    GraphBounder,
    RowBounds,
    box_bounder,
    smallest_values,
)
from tightrope.domains.boxes.condensing import condense
from tightrope.domains.linear.crown import CROWN, relax
from tightrope.graph import Graph, ops, trace
from tightrope.graph.maxpool import expand_max_pools
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")


def on_graph(graph: Graph, box: Box, matrix: Tensor, offset: Tensor) -> GraphBounder:
    return GraphBounder(graph, box, matrix, offset)


def parts_of(box: Box, varying: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the box itself and three parts of it, one with a width of zero somewhere."""
    generator = torch.Generator().manual_seed(seed)
    lower, upper = (t.flatten(1)[:, varying] for t in box.corners)
    cuts = torch.rand(2, 3, len(varying), generator=generator, dtype=torch.float64).sort(0).values
    cuts[1, 2, ::2] = cuts[0, 2, ::2]
    ends = [(lower + cut * (upper - lower)).clamp(lower, upper) for cut in cuts]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    return torch.cat((lower, low)), torch.cat((upper, high))


def check_rows(
    graph: Graph,
    whole: Box,
    bounder: BoxBounder,
    matrix: Tensor,
    offset: Tensor,
    *,
    seed: int,
    points: int = 2,
) -> RowBounds:
    """Compare the bounds on parts of a box with exact values of the rows at points of them."""
    low, high = parts_of(whole, bounder.varying, seed)
    found = bounder(low, high)
    for k in range(len(low)):
        lower, upper = (t.flatten(1).clone() for t in whole.corners)
        lower[:, bounder.varying], upper[:, bounder.varying] = low[k], high[k]
        part = Box(lower.view_as(whole.lower), upper.view_as(whole.upper))
        for point in points_in(part, points, seed=seed):
            values = exact_values(graph, point)[len(graph.nodes) - 1].reshape(-1)
            rows = fractions(matrix) @ values + fractions(offset)
            chosen = fractions(point.flatten()[bounder.varying])
            for r in range(len(rows)):
                if not math.isfinite(found.constant[k, r]):
                    continue
                line = fractions(found.slope[k, r]) @ chosen + Fraction(float(found.constant[k, r]))
                assert line <= rows[r]
                if math.isfinite(found.lower[k, r]):
                    assert Fraction(float(found.lower[k, r])) <= line
    return found


def check_random(op: type[ops.Op], data: st.DataObject) -> None:
    module = data.draw(networks(containing=op, classes=3)).double()
    graph = expand_max_pools(trace(module, module.input_shape).detach())
    box = data.draw(boxes(module.input_shape, batch=1))
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    matrix = signed_rows(graph.output_shape[0], generator, torch.float64)
    offset = torch.randn(len(matrix), generator=generator, dtype=torch.float64)
    for bounder in (
        box_bounder(graph, box, matrix, offset),
        on_graph(graph, box, matrix, offset),
    ):
        check_rows(graph, box, bounder, matrix, offset, seed=seed)


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_random_networks(op: type[ops.Op], data: st.DataObject) -> None:
    check_random(op, data)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=60)
@given(data=st.data())
def test_random_networks_at_length(op: type[ops.Op], data: st.DataObject) -> None:
    check_random(op, data)


@settings(max_examples=20)
@given(data=st.data())
def test_large_parts_that_cancel(data: st.DataObject) -> None:
    graph, box = data.draw(cancelling(torch.float64))
    count = graph.output_shape[0]
    matrix, offset = torch.eye(count, dtype=torch.float64), torch.zeros(count).double()
    bounder = box_bounder(graph, box[:1], matrix, offset)
    check_rows(graph, box[:1], bounder, matrix, offset, seed=0)


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> Graph:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return trace(nn.Sequential(*layers[:-1]).double().eval(), (sizes[0],)).detach()


def unit_rows(graph: Graph) -> tuple[Tensor, Tensor]:
    count = graph.output_shape[0]
    return torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_loop_is_as_tight_as_crown(seed: int) -> None:
    graph = dense(3, 12, 12, 12, 2, seed=seed)
    matrix, offset = unit_rows(graph)
    box = Box(torch.full((1, 3), -1.0).double(), torch.ones(1, 3).double())
    compiled, other = box_bounder(graph, box, matrix, offset), on_graph(graph, box, matrix, offset)
    assert isinstance(compiled, CompiledBounder)
    low, high = parts_of(box, compiled.varying, seed)
    ours, theirs = compiled(low, high).lower, other(low, high).lower
    width = (high - low).max(1).values[:, None]
    # It bounds every neuron by lines, where CROWN stops at a sign.
    assert (ours >= theirs - 1e-12 - 0.05 * width * theirs.abs()).all()
    # On a point, a bound is the value but for rounding.
    at = compiled(low, low)
    assert torch.allclose(at.lower, graph(low), atol=1e-11)


def test_a_box_without_width_and_inputs_that_do_not_vary() -> None:
    graph = dense(4, 10, 2)
    matrix, offset = unit_rows(graph)
    point = torch.randn(1, 4, dtype=torch.float64)
    bounder = box_bounder(graph, Box(point, point), matrix, offset)
    assert len(bounder.varying) == 0
    found = bounder(point[:, :0], point[:, :0])
    assert torch.allclose(found.lower, graph(point), atol=1e-11)
    assert (found.lower <= graph(point)).all()
    thin = torch.nextafter(point, torch.full_like(point, torch.inf))
    wide = Box(point, torch.where(torch.arange(4) < 2, point + 1.0, thin))
    bounder = box_bounder(graph, wide, matrix, offset)
    assert bounder.varying.tolist() == [0, 1]
    check_rows(graph, wide, bounder, matrix, offset, seed=1)


@pytest.mark.parametrize("size", [1e-200, 1e150, 1e200, 1e308])
def test_huge_and_tiny_numbers_prove_nothing_wrong(size: float) -> None:
    graph = dense(2, 6, 6, 1)
    graph = graph.map_tensors(lambda t: t * size if t.dim() == 2 else t)
    matrix, offset = unit_rows(graph)
    box = Box(torch.full((1, 2), -1.0).double(), torch.ones(1, 2).double())
    bounder = box_bounder(graph, box, matrix, offset)
    check_rows(graph, box, bounder, matrix, offset, seed=2)
    nothing = box_bounder(graph.map_tensors(lambda t: t * torch.nan), box, matrix, offset)
    assert not (nothing(box.lower, box.upper).lower > -torch.inf).any()


def test_opposite_neurons_are_one() -> None:
    """`relu(z) - relu(-z)` is z, `relu(z) + relu(-z)` its absolute value."""
    first, last = nn.Linear(2, 4).double(), nn.Linear(4, 2).double()
    with torch.no_grad():
        first.weight[2:], first.bias[2:] = -first.weight[:2], -first.bias[:2]
        last.weight.copy_(torch.tensor([[1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]))
        last.bias.zero_()
    graph = trace(nn.Sequential(first, nn.ReLU(), last), (2,)).detach()
    matrix, offset = unit_rows(graph)
    box = Box(torch.full((1, 2), -9.0).double(), torch.full((1, 2), 9.0).double())
    known = relax(graph, box, effort=CROWN, rounding=ROUNDING).boxes
    rows = condense(graph, known, matrix, offset, rounding=ROUNDING)
    assert rows is not None and rows.neurons == 2
    bounder = CompiledBounder(rows)
    found = check_rows(graph, box, bounder, matrix, offset, seed=3, points=6)
    exact = (first.weight[0].abs().sum() * -9 + first.bias[0]).detach()
    assert abs(float(found.lower[0, 0] - exact)) < 1e-12


@pytest.mark.parametrize("corner", [(-9.0, -9.0), (-9.0, 8.0), (8.0, -9.0), (8.0, 8.0)])
def test_leaky_twins(corner: tuple[float, float]) -> None:
    """Far from their bend, where bounds are tight, and on the box that they were condensed for."""
    first, last = nn.Linear(2, 4).double(), nn.Linear(4, 2).double()
    with torch.no_grad():
        first.weight[:2], first.bias[:2] = torch.tensor([[1.0, 2.0], [-3.0, 1.0]]), 0.5
        first.weight[2:], first.bias[2:] = -first.weight[:2], -first.bias[:2]
        first.weight[3], first.bias[3] = first.weight[1], first.bias[1]
        last.weight.copy_(torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, -1.0, 1.0, 1.0]]))
        last.bias.zero_()
    graph = trace(nn.Sequential(first, nn.LeakyReLU(0.25), last), (2,)).detach()
    matrix, offset = unit_rows(graph)
    box = Box(torch.full((1, 2), -9.0).double(), torch.full((1, 2), 9.0).double())
    bounder = box_bounder(graph, box, matrix, offset)
    assert isinstance(bounder, CompiledBounder) and bounder.network.neurons == 2
    check_rows(graph, box, bounder, matrix, offset, seed=4, points=9)
    lower = torch.tensor([corner]).double()
    found = check_rows(graph, Box(lower, lower + 1), bounder, matrix, offset, seed=4)
    values = graph(torch.stack([lower[0] + torch.tensor(c) for c in np.ndindex(2, 2)]))
    smallest = (values @ matrix.T + offset).amin(0)
    assert (found.lower[0] > smallest - 1e-9).all()


def test_forms_that_do_not_fit_prove_nothing() -> None:
    graph = dense(2, 20, 20, 1)
    matrix, offset = unit_rows(graph)
    box = Box(torch.full((1, 2), -9.0).double(), torch.full((1, 2), 9.0).double())
    bounder = box_bounder(graph, box, matrix, offset)
    assert isinstance(bounder, CompiledBounder)
    bounder.capacity = 50
    found = bounder(box.lower, box.upper)
    assert (found.lower == -torch.inf).all() and (found.slope == 0).all()
    assert (found.constant == -torch.inf).all()


def test_smallest_values_are_below_all_values() -> None:
    generator = torch.Generator().manual_seed(0)
    slope, constant = (torch.randn(*s, generator=generator).double() for s in ((5, 2, 3), (5, 2)))
    lower = torch.randn(5, 3, generator=generator).double()
    upper = lower + torch.rand(5, 3, generator=generator).double()
    found = smallest_values(slope, constant, lower, upper)
    for b, r in np.ndindex(5, 2):
        corner = torch.where(slope[b, r] > 0, lower[b], upper[b])
        exact = fractions(slope[b, r]) @ fractions(corner) + Fraction(float(constant[b, r]))
        assert Fraction(float(found[b, r])) <= exact
        assert exact - Fraction(float(found[b, r])) < 1e-13
