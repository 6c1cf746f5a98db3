"""Improving the bounds of subproblems."""

from __future__ import annotations

import pytest
import torch
from small_reduced import Neuron, Row, reduced, subproblem

from tightrope.domains.reduced.splits import Bounder

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_bound_at_the_threshold_is_improved() -> None:
    """`relu(x) - x/2` on [-1, 1] is bounded by -1/2 with slope 0, and by more with any other."""
    layers = [[Neuron([1.0])]]
    bounder = Bounder(reduced(layers, [Row([-0.5], [1.0])], [-1.0], [1.0]))
    start = subproblem(layers)
    assert bounder.look(start).bound.item() == -0.5
    bound, better = bounder.improve(start, iterations=3, threshold=-0.5)
    assert bound.item() > -0.5 and better.alpha.item() > 0
    above, same = bounder.improve(start, iterations=3, threshold=-0.6)
    assert above.item() == -0.5 and torch.equal(same.alpha, start.alpha)
