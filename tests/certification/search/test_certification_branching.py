"""Which neurons the search splits: open ones that bend, and both ways."""

from __future__ import annotations

import pytest
import torch
from small_reduced import Neuron, Row, reduced, subproblem

from tightrope.certification.search.branching import RULES, children, choose
from tightrope.domains.reduced.splits import Bounder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("rule", RULES)
def test_split_neurons_and_flat_ones_are_not_split_again(rule: str) -> None:
    """The first neuron would matter most, but it is split; the second is never above zero."""
    neurons = [
        Neuron([1.0], sign=1, lower=-8.0, upper=8.0, constant=1.0),
        Neuron([1.0], lower=-8.0, upper=1e-30, constant=1.0),
        Neuron([1.0], constant=0.5),
        Neuron([1.0], constant=0.25),
    ]
    network = reduced([neurons], [Row([0.0], [-9.0, -9.0, -1.0, -1.0])], [-1.0], [1.0])
    chosen = choose(Bounder(network), subproblem([neurons]), rule=rule, levels=2)
    assert sorted(chosen[0].tolist()) == [2, 3]


def test_children_have_all_signs() -> None:
    layers = [[Neuron([1.0]), Neuron([1.0], sign=-1), Neuron([1.0])]]
    found = children(subproblem(layers), torch.tensor([[0, 2]]))
    assert sorted(found.sign.tolist()) == [[-1, -1, -1], [-1, -1, 1], [1, -1, -1], [1, -1, 1]]
