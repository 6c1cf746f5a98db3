"""The reduced network is the network: values, bounds, gradients."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import exact_values, fractions
from linear_helpers import EPS, many_points, small_box, small_network
from reduced_problems import (
    BENT,
    MATRIX,
    NETWORKS,
    OFFSET,
    neuron_values,
    random_problems,
    reduced,
    sampled_signs,
    simple_cuts,
    with_gamma,
)
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import Effort, relax
from tightrope.domains.reduced.reduction import reduce, reducible
from tightrope.domains.reduced.splits import Bounder
from tightrope.graph import ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")


# --- values -------------------------------------------------------------------------------------


@NETWORKS
@BENT
def test_the_matrices_reproduce_the_network(kind: str, activation: str) -> None:
    found, network = reduced(kind, activation)
    points = many_points(found.box)
    h = neuron_values(found, network, points)
    y, x = h.clamp(min=0), points.flatten(1)
    neurons, rows = network.neurons, network.rows
    computed = y @ neurons.inner.t() + x @ neurons.outer.t() + neurons.constant
    assert torch.allclose(computed, h, rtol=1e-9, atol=1e-9)
    expected = found.graph(points) @ MATRIX.t() + OFFSET
    computed = y @ rows.inner.t() + x @ rows.outer.t() + rows.constant
    assert torch.allclose(computed, expected, rtol=1e-9, atol=1e-9)
    assert (h >= network.lower - 1e-9).all() and (h <= network.upper + 1e-9).all()
    assert (network.lower < 0).all() and (network.upper > 0).all()


@NETWORKS
@BENT
def test_layers_come_in_order(kind: str, activation: str) -> None:
    """Neurons see earlier layers only."""
    _, network = reduced(kind, activation)
    stop = 0
    for layer in network.layers:
        assert layer.span.start == stop
        stop = layer.span.stop
        assert not network.neurons.inner[layer.span, layer.span.start :].any()
    assert stop == network.size == network.neurons.inner.shape[1]


@NETWORKS
@BENT
def test_slack_covers_the_rounding_errors_exactly(kind: str, activation: str) -> None:
    """In fractions: what the matrices say is within `slack` of the network's exact values."""
    found, network = reduced(kind, activation, rounding=EPS)
    graph, left = found.graph, Fraction(0.2 if activation == "leaky" else 0.0)
    assert left in (0, Fraction(0.2))
    neurons, rows = network.neurons, network.rows
    for point in many_points(found.box, 2)[:2]:
        values = exact_values(graph, point)
        h = np.concatenate(
            [
                values[graph.nodes[layer.position].inputs[0]].reshape(-1)[layer.places.numpy()]
                for layer in network.layers
            ]
        )
        y, x = np.maximum(h, Fraction(0)), fractions(point).reshape(-1)
        for part, exact in (
            (neurons, h),
            (rows, fractions(MATRIX) @ values[found.output] + fractions(OFFSET)),
        ):
            said = fractions(part.inner) @ y + fractions(part.outer) @ x + fractions(part.constant)
            assert np.all(abs(said - exact) <= fractions(part.slack))
            assert (part.slack < 1e-9).all()


def test_small_memory_changes_nothing() -> None:
    found, network = reduced("residual", "relu")
    parts = reduce(found, MATRIX, OFFSET, memory=10_000)
    for a, b in zip(vars(network.neurons).values(), vars(parts.neurons).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_network_without_unstable_neurons() -> None:
    graph = small_network("dense", nn.ReLU())
    found = relax(graph, small_box(graph, 0.0), effort=Effort(0))
    network = reduce(found, MATRIX, OFFSET)
    assert network.size == 0 and not network.layers
    bounder = Bounder(network)
    bound, problems = bounder.improve(bounder.root(torch.arange(3)), iterations=2)
    expected = graph(found.box.lower)[0] @ MATRIX.t() + OFFSET
    assert torch.allclose(bound, expected, atol=1e-12) and len(problems) == 3


def test_what_can_be_reduced() -> None:
    for layer, fine in (
        (nn.ReLU(), True),
        (nn.LeakyReLU(0.5), True),
        (nn.LeakyReLU(1.0), False),
        (nn.Tanh(), False),
        (nn.Sigmoid(), False),
    ):
        assert reducible(trace(nn.Sequential(nn.Linear(2, 2), layer), (2,))) is fine
    pool = trace(nn.Sequential(nn.MaxPool2d(2)), (1, 2, 2))
    assert not reducible(pool)


class DeadEnd(nn.Module):
    """A branch whose values are multiplied by zero, and one unstable layer behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return torch.relu(self.second(y)) + 0.0 * torch.relu(y[:, :3] - 0.1)


def test_an_output_that_is_an_activation() -> None:
    torch.manual_seed(0)
    graph = trace(DeadEnd().double(), (2,)).detach()
    found = relax(graph, small_box(graph, 2.0), effort=Effort(0))
    network = reduce(found, MATRIX, OFFSET)
    points = many_points(found.box)
    y = neuron_values(found, network, points).clamp(min=0)
    rows = network.rows
    computed = y @ rows.inner.t() + points @ rows.outer.t() + rows.constant
    assert torch.allclose(computed, graph(points) @ MATRIX.t() + OFFSET, atol=1e-10)


# --- bounds -------------------------------------------------------------------------------------


@NETWORKS
@BENT
def test_the_root_has_the_bound_of_the_relaxation(kind: str, activation: str) -> None:
    found, network = reduced(kind, activation)
    bounder = Bounder(network)
    root = bounder.root(torch.arange(3))
    rows = Coefficients(MATRIX.view(3, *found.graph.output_shape), None)
    expected = found.lower(found.output, rows) + OFFSET
    assert torch.allclose(bounder.look(root).bound, expected, rtol=1e-9, atol=1e-9)


@NETWORKS
@BENT
def test_bounds_with_random_slopes_agree(kind: str, activation: str) -> None:
    found, network = reduced(kind, activation)
    problems = random_problems(network, 3, splits=0.0, seed=1)
    problems = replace(problems, row=torch.arange(3))
    slopes = {}
    for layer in network.layers:
        node = found.graph.nodes[layer.position]
        whole = torch.zeros(3, torch.Size(node.shape).numel(), dtype=torch.float64)
        alpha = problems.alpha[:, layer.span]
        whole[:, layer.places] = layer.left + (1 - layer.left) * alpha
        slopes[layer.position] = whole.view(3, *node.shape)
    rows = Coefficients(MATRIX.view(3, *found.graph.output_shape), None)
    expected = found.lower(found.output, rows, slopes=slopes) + OFFSET
    assert torch.allclose(Bounder(network).look(problems).bound, expected, rtol=1e-9, atol=1e-9)


@NETWORKS
@BENT
@pytest.mark.parametrize("splits", [0.1, 0.5, 1.0])
def test_bounds_hold_inside_the_splits(kind: str, activation: str, splits: float) -> None:
    """Each subproblem is made around a point that satisfies its splits."""
    found, network = reduced(kind, activation)
    points = many_points(found.box, 300)
    h = neuron_values(found, network, points)
    values = found.graph(points) @ MATRIX.t() + OFFSET
    problems = random_problems(network, len(points), splits=0.0, seed=0)
    problems = replace(problems, sign=sampled_signs(h, network, splits, 1))
    bound = Bounder(network).look(problems).bound
    own = values.gather(1, problems.row[:, None])[:, 0]
    assert (bound <= own + 1e-9).all()
    for i in range(0, len(points), 40):  # and all other points with those signs
        sign = problems.sign[i]
        inside = ((sign * h) >= 0).all(1)
        assert inside[i] and (bound[i] <= values[inside, problems.row[i]] + 1e-9).all()


@NETWORKS
@BENT
def test_bounds_with_cuts_hold(kind: str, activation: str) -> None:
    found, network = reduced(kind, activation)
    points = many_points(found.box, 200)
    h = neuron_values(found, network, points)
    values = found.graph(points) @ MATRIX.t() + OFFSET
    cuts = simple_cuts(network)
    satisfied = h.clamp(min=0) @ cuts.on_outputs.t() + h @ cuts.on_inputs.t() + cuts.constant
    assert (satisfied <= 1e-9).all()
    problems = random_problems(network, len(points), splits=0.0, seed=0)
    problems = replace(problems, sign=sampled_signs(h, network, 0.3, 1))
    bound = Bounder(network, cuts).look(with_gamma(problems, cuts)).bound
    assert (bound <= values.gather(1, problems.row[:, None])[:, 0] + 1e-9).all()


@NETWORKS
def test_minimizers_attain_the_bound_of_linear_parts(kind: str) -> None:
    _, network = reduced(kind, "relu")
    bounder = Bounder(network)
    view = bounder.look(bounder.root(torch.arange(3)))
    point = bounder.minimizer(view)
    assert torch.allclose(network.box.project(point), point, atol=1e-12)
    _, y = bounder.push(view)
    rows = network.rows
    attained = (y * rows.inner).sum(1) + (point * rows.outer).sum(1) + rows.constant
    assert torch.allclose(attained, view.bound, atol=1e-9)


def test_boxes_of_the_input_may_be_flat() -> None:
    graph = small_network("conv", nn.ReLU())
    wide = small_box(graph, 0.5)
    upper = wide.upper.clone()
    upper[:, 0] = wide.lower[:, 0]
    found = relax(graph, Box(wide.lower, upper), effort=Effort(0))
    network = reduce(found, MATRIX, OFFSET)
    bounder = Bounder(network)
    bound, _ = bounder.improve(bounder.root(torch.arange(3)), iterations=3)
    values = graph(many_points(found.box)) @ MATRIX.t() + OFFSET
    assert (bound <= values.amin(0) + 1e-9).all()


def test_positions_of_layers_are_activations() -> None:
    found, network = reduced("residual", "leaky")
    for layer in network.layers:
        node = found.graph.nodes[layer.position]
        assert isinstance(node.op, ops.LeakyRelu) and layer.left == 0.2
        assert (layer.places < torch.Size(node.shape).numel()).all()
