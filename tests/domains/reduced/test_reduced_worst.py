"""The matrices of a reduced network are off by no more than their slack, in exact arithmetic.

As in the other tests of this kind, each network has one source of error that dominates, in
floating-point arithmetic at its worst (`adverse`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from adverse import DIRECTIONS, adverse
from exact import Exact, exact_values, fractions
from linear_helpers import EPS, wired
from small_reduced import Neuron, Row, reduced
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.crown import CROWN_IBP, best_bounds, relax
from tightrope.domains.reduced.reduction import Reduced, Reducer, Rows, reduce, reducible
from tightrope.graph import Graph, ops

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 2.0**-100  # lost in any sum with 1
THIRD = 1 / 3  # a little less than a third


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


def activations(graph: Graph, network: Reduced, values: dict[int, Exact]) -> Exact:
    """Return the exact pre-activations of the unstable neurons."""
    parts = [
        values[graph.nodes[layer.position].inputs[0]].flatten()[layer.places.numpy()]
        for layer in network.layers
    ]
    return np.concatenate([fractions(zeros(0)), *parts])


def assert_within_slack(
    graph: Graph, box: tuple[Tensor, Tensor], matrix: Tensor, points: Sequence[Tensor]
) -> None:
    """Check the matrices of neurons and rows at points of a box."""
    for direction in DIRECTIONS:
        with adverse(direction):
            corners = Box(box[0][None], box[1][None])
            found = relax(graph, corners, effort=CROWN_IBP, rounding=EPS)
            network = reduce(found, matrix, zeros(len(matrix)))
        for x in points:
            values = exact_values(graph, x)
            h = activations(graph, network, values)
            outputs = fractions(matrix) @ values[found.output].flatten()
            for rows, exact in ((network.neurons, h), (network.rows, outputs)):
                said = fractions(rows.inner) @ np.maximum(h, Fraction(0))
                said = said + fractions(rows.outer) @ fractions(x.flatten())
                off = said + fractions(rows.constant) - exact
                assert np.all(abs(off) <= fractions(rows.slack)), direction


def test_coefficients_that_add_up() -> None:
    """200 neurons are added up into one, of which the first weighs 1."""
    first = ops.Linear(floats(1.0, *[TINY] * 199)[:, None], None)
    ones = torch.ones(1, 200, dtype=torch.float64)
    graph = wired(
        (1,),
        (first, (0,), (200,)),
        (ops.Linear(ones, None), (1,), (1,)),
        (ops.Relu(), (2,), (1,)),
        (ops.Linear(floats(1.0)[None], None), (3,), (1,)),
    )
    box = (floats(-1.0), floats(1.0))
    assert_within_slack(graph, box, floats(1.0)[None], [floats(1.0), floats(-1.0)])


@pytest.mark.parametrize("slope", [0.01, 0.03, 0.001])
def test_the_bend_of_leaky_relu(slope: float) -> None:
    """`slope h + (1 - slope) relu(h)`: the second coefficient is rounded.

    Seen from another activation, as a row of the output would be given some slack anyway.
    """
    graph = wired((1,), (ops.LeakyRelu(slope), (0,), (1,)), (ops.Relu(), (1,), (1,)))
    box = (floats(-1e-6), floats(1.0))
    assert_within_slack(graph, box, floats(1.0)[None], [floats(1.0), floats(-1e-6)])


def exact_row(row: Sequence[Fraction], outputs: Sequence[float]) -> Fraction:
    return sum((a * Fraction(y) for a, y in zip(row, outputs, strict=True)), Fraction(0))


# Rows that float64 cannot hold, and outputs at which nothing else is left of them.
ROWS = {
    "rounded": ([Fraction(1, 3), -Fraction(THIRD)], [-1.0, -1.0]),
    "opposite": ([-Fraction(1, 3), Fraction(THIRD)], [1.0, 1.0]),
    "underflow": ([Fraction(1, 10**400), Fraction(0)], [-1e300, -1e300]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("activation", [None, ops.Tanh()])
def test_rows_that_were_rounded(name: str, activation: ops.Op | None) -> None:
    """The bound holds for the row as it was written; with other bends than ReLUs as well."""
    row, x = ROWS[name]
    steps = [(ops.Concat(1), (0, 0), (2,))]
    if activation is not None:  # a third output that no row looks at
        steps = [(activation, (0,), (1,)), (ops.Concat(1), (0, 0, 1), (3,))]
        row = [*row, Fraction(0)]
    graph = wired((1,), *steps)
    matrix = floats(*(float(entry) for entry in row))[None]
    point = floats(x[0])[None]
    found = relax(graph, Box(point, point), effort=CROWN_IBP, rounding=EPS)
    outputs = [*x, 0.0][: len(row)]
    bound = best_bounds(found, matrix)
    assert Fraction(bound.item()) <= exact_row(row, outputs)
    if activation is None:
        network = reduce(found, matrix, zeros(1))
        said = float(network.rows.outer[0] @ point[0] + network.rows.constant[0])
        assert Fraction(said) - Fraction(network.rows.slack.item()) <= exact_row(row, outputs)


def equal(a: Rows, b: Rows) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_rows_that_are_remembered_are_those_that_were_asked_for() -> None:
    """Rows pulled before a layer was known come with zeros for it, and other rows anew."""
    first = ops.Linear(torch.eye(4, dtype=torch.float64) + 0.5, floats(0.5, -0.5, 0.25, 0.0))
    graph = wired((4,), (first, (0,), (4,)), (ops.Relu(), (1,), (4,)), (first, (2,), (4,)))
    corner = torch.ones(1, 4, dtype=torch.float64)
    found = relax(graph, Box(-corner, corner), effort=CROWN_IBP, rounding=EPS)
    reducer = Reducer(found)
    places = torch.tensor([0, 2])
    before = reducer.pull_units(1, places)
    assert before.inner.shape == (2, 0)
    assert equal(
        reducer.pull_units(1, torch.tensor([1, 3])), Reducer(found).pull_units(1, places + 1)
    )
    reducer.pull_units(1, torch.arange(4))
    reducer.catch_up()
    again = reducer.pull_units(1, places)
    assert again.inner.shape == (2, 4) and not again.inner.any()
    assert equal(replace(again, inner=before.inner), before)


def test_negated_rows() -> None:
    rows = Rows(floats(1.0)[None], floats(2.0)[None], floats(3.0), floats(4.0))
    assert [t.item() for t in vars(-rows).values()] == [-1.0, -2.0, -3.0, 4.0]


def test_the_size_of_the_terms() -> None:
    neurons = [[Neuron([2.0, -3.0], constant=-5.0, slack=7.0, lower=-4.0, upper=6.0)]]
    network = reduced(neurons, [Row([0.0, 1.0], [-8.0])], [-1.0, -2.0], [1.0, 0.5])
    assert network.reach.tolist() == [6.0]
    assert network.magnitude.tolist() == [2 + 6 + 5 + 7]
    assert network.magnitude_of(network.rows).tolist() == [8 * 6 + 2]


def test_steep_slopes_are_not_reduced() -> None:
    for slope, answer in ((0.0, True), (0.99, True), (1.0, False), (2.5, False)):
        assert reducible(wired((1,), (ops.LeakyRelu(slope), (0,), (1,)))) is answer
