"""Multi-neuron constraints of a reduced network hold at every point, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from adverse import DIRECTIONS, adverse
from exact import fractions
from small_reduced import Neuron, Row, exact_value, floats, reduced
from torch import Tensor

from tightrope.domains.reduced.cuts import _combined, network_cuts
from tightrope.domains.reduced.reduction import Reduced, Rows
from tightrope.domains.reduced.splits import Cuts

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 2.0**-100  # lost in any sum with 1


def outputs_of(layer: Sequence[Neuron], before: list[Fraction], x: Sequence[float]) -> tuple:
    h = [exact_value(neuron, before, x) for neuron in layer]
    return h, [max(Fraction(0), value) for value in h]


# Neurons of two inputs that cannot all be large, and neurons of those.
FRONT = [
    Neuron([1.0, 0.5], lower=-1.5, upper=1.5),
    Neuron([-1.0, 0.5], lower=-1.5, upper=1.5),
    Neuron([0.0, -1.0], constant=0.1, lower=-0.9, upper=1.1),
]
BACK = [
    Neuron([0.0, 0.25], [1.0, -1.0, 0.5], lower=-1.75, upper=2.3),
    Neuron([0.5, 0.0], [-1.0, 1.0, 0.0], constant=0.2, lower=-1.8, upper=2.2),
]


def small() -> tuple[Reduced, Cuts]:
    """Return a network of two layers with constraints on all pairs."""
    network = reduced([FRONT, BACK], [Row([0.0, 0.0], [1.0])], [-1.0, -1.0], [1.0, 1.0])
    cuts = network_cuts(network, torch.ones(1, 5), per_pair=None)
    assert cuts is not None
    return network, cuts


def values_at(x: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the neurons' inputs and outputs at a point, exactly."""
    front, front_outputs = outputs_of(FRONT, [], x)
    back, back_outputs = outputs_of(BACK, front_outputs, x)
    return np.array(front + back), np.array(front_outputs + back_outputs)


POINTS = list(product((-1.0, -0.5, 0.0, 0.3, 0.5, 1.0), repeat=2))


def test_constraints_hold_and_cut() -> None:
    network, cuts = small()
    assert cuts.on_outputs[:, :3].any() and cuts.on_outputs[:, 3:].any()
    on_outputs, on_inputs = fractions(cuts.on_outputs), fractions(cuts.on_inputs)
    constant, closest = fractions(cuts.constant), []
    for x in POINTS:
        h, y = values_at(x)
        values = on_outputs @ y + on_inputs @ h + constant
        assert np.all(values <= 0)
        closest.append(values.max())
    assert max(closest) > -Fraction(1, 10**6), "they touch what they enclose"
    # And no box of single neurons implies them: all at the top of their triangles is excluded.
    tops = network.lines.upper_intercept  # at h = 0
    assert (cuts.on_outputs @ tops + cuts.constant).max() > 0.05


def wide(outer: Tensor, constant: Tensor, slack: Tensor) -> list[Neuron]:
    rows = zip(outer.tolist(), constant.tolist(), slack.tolist(), strict=True)
    return [Neuron([a], constant=c, slack=s, lower=-2.0, upper=2.0) for a, c, s in rows]


@pytest.mark.parametrize("part", ["inner", "outer", "constant"])
def test_combinations_of_many_neurons(part: str) -> None:
    """200 neurons are added up, of which the first weighs 1; each of the sums is rounded."""
    numbers, nothing = floats([1.0, *[TINY] * 199]), torch.zeros(200, dtype=torch.float64)
    front = [Neuron([1.0], upper=1.0)]
    outer = numbers if part == "outer" else nothing
    back = wide(outer, numbers if part == "constant" else nothing, nothing)
    if part == "inner":
        back = [replace(n, inner=[a]) for n, a in zip(back, numbers.tolist(), strict=True)]
    ones = torch.ones(1, 200, dtype=torch.float64)
    for direction in DIRECTIONS:
        network = reduced([front, back], [Row([0.0])], [1.0], [1.0])
        with adverse(direction):
            row = _combined(network, network.layers[1], ones)
        said = sum(Fraction(getattr(row, name).item()) for name in ("inner", "outer", "constant"))
        exact = sum(map(Fraction, numbers.tolist()))
        assert abs(said - exact) <= Fraction(row.slack.item()), direction


def test_combinations_carry_the_slack_of_their_neurons() -> None:
    slack = floats([0.5, 0.25])
    back = wide(floats([1.0, 1.0]), floats([0.0, 0.0]), slack)
    network = reduced([[Neuron([1.0])], back], [Row([0.0])], [1.0], [1.0])
    row: Rows = _combined(network, network.layers[1], floats([1.0, -1.0])[None])
    assert 0.75 <= row.slack.item() < 0.75 + 1e-9
    assert row.outer.item() == 0.0 and row.inner.tolist() == [[0.0]]


def test_a_network_without_groups_has_no_constraints() -> None:
    network = reduced([[Neuron([1.0])]], [Row([0.0])], [-1.0], [1.0])
    assert network_cuts(network, torch.ones(1, 1)) is None
    back = replace(BACK[0], inner=[1.0])
    alone = reduced([FRONT[:1], [back]], [Row([0.0, 0.0])], [-1.0, -1.0], [1.0, 1.0])
    assert network_cuts(alone, torch.ones(1, 2)) is None


def test_pairs_are_those_that_cost_most_and_share_most() -> None:
    """Two pairs see the same input, the third pair one each; one of the two costs nothing."""
    ends = {"lower": -1.5, "upper": 1.5}
    shared = [Neuron([1.0, a, 0.0, 0.0], **ends) for a in (0.5, -0.5)]
    other = [Neuron([0.0, 0.0, a, b], **ends) for a, b in ((1.5, 0.0), (0.0, 1.5))]
    network = reduced([[*shared, *other]], [Row([0.0] * 4)], [-1.0] * 4, [1.0] * 4)

    def paired(cost: list[float], pairs: int) -> set[tuple[int, ...]]:
        cuts = network_cuts(network, torch.tensor([cost]), pairs=pairs)
        if cuts is None:
            return set()
        used = cuts.on_outputs.bool() | cuts.on_inputs.bool()
        return {tuple(row.nonzero()[:, 0].tolist()) for row in used}

    assert paired([1.0] * 4, 6) == {(0, 1)}  # no others have anything in common
    assert paired([1.0, 0.0, 1.0, 1.0], 6) == set()
    both = network.neurons.outer + network.neurons.outer.flip(0)  # now the third pair does, too
    network = replace(network, neurons=replace(network.neurons, outer=both / 2))
    assert paired([1.0, 1.0, 5.0, 5.0], 1) == {(2, 3)}
