"""Multi-neuron constraints in a search: when they are chosen, and what they do for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_reduced import Neuron, Row, reduced

from tightrope.certification.names import CUTS
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.search.branching import choose
from tightrope.certification.search.cutting import ROUNDS, CutSettings, Cutter
from tightrope.deadline import Deadline
from tightrope.domains.reduced.splits import Bounder

pytestmark = pytest.mark.usefixtures("one_thread")

# On the square, relu(x + y) + relu(x - y) is at most 2; each neuron for itself allows 3. Rows are
# an eighth of that: steps of multipliers are small. The third neuron has nothing to do with them.
LAYER = [
    Neuron([1.0, 1.0], lower=-2.0, upper=2.0),
    Neuron([1.0, -1.0], lower=-2.0, upper=2.0),
    Neuron([0.0, 1.0]),
]


def search(constant: float, cuts: str) -> BranchAndBound:
    network = reduced(
        [LAYER], [Row([0.0, 0.0], [-0.125, -0.125], constant / 8)], [-1.0] * 2, [1.0] * 2
    )
    settings = SearchSettings(cuts=cuts)
    return BranchAndBound(network, torch.tensor([0]), lambda *_: None, settings=settings)


def test_every_choice_has_its_rounds() -> None:
    assert set(ROUNDS) == set(CUTS)
    assert ROUNDS["off"] == () and 0 in ROUNDS["on"] and min(ROUNDS["auto"]) > 0


def test_constraints_prove_what_single_neurons_do_not() -> None:
    without, found = search(2.25, "off").run(math.inf), search(2.25, "on").run(math.inf)
    assert without and found
    assert without.subproblems > 2 and found.subproblems == 2  # the root, and again with them
    assert 0 < found.bound <= 0.25 / 8


@pytest.mark.parametrize("cuts", CUTS)
def test_constraints_prove_nothing_that_is_not_so(cuts: str) -> None:
    assert search(2.0 + 1e-9, cuts).run(math.inf)
    for constant in (2.0, 2.0 - 1e-9):
        assert not search(constant, cuts).run(math.inf)


def test_what_was_not_bounded_again_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(2.25, "on")
    whole.begin()
    pool = whole.pool
    assert pool is not None and len(pool) == 1
    chosen = whole.cutter.choose(pool.peek(1), Deadline())
    assert chosen is not None
    monkeypatch.setattr(whole.cutter, "choose", lambda *_: chosen)
    whole._cut(pool, -math.inf)
    assert len(pool) == 1 and pool.peek(1).gamma.shape == (1, len(chosen.constant))
    assert whole.run(math.inf)


def test_without_time_there_are_no_constraints() -> None:
    whole = search(2.25, "on")
    whole.begin()
    assert whole.pool is not None
    assert whole.cutter.choose(whole.pool.peek(1), Deadline(-math.inf)) is None


def test_the_most_used_ones_stay() -> None:
    whole = search(2.25, "on")
    whole.begin()
    assert whole.pool is not None
    few = Cutter(whole.network, settings=replace(CutSettings(), most=1))
    chosen = few.choose(whole.pool.peek(1), Deadline())
    assert chosen is not None and len(chosen.constant) == 1
    assert few.found is not None and len(few.found.constant) > 1
    bounder = Bounder(whole.network, chosen)
    bound, _ = bounder.improve(bounder.root(torch.tensor([0])), iterations=100)
    assert float(bound) > 0


def test_a_layer_without_pairs_has_no_constraints() -> None:
    network = reduced([LAYER[:1]], [Row([0.0, 0.0], [-1.0], 1.0)], [-1.0] * 2, [1.0] * 2)
    problems = Bounder(network.to(torch.float32)).root(torch.tensor([0]))
    assert Cutter(network).choose(problems, Deadline()) is None


def test_multipliers_of_constraints_do_not_hide_a_neuron() -> None:
    """The second neuron costs most; a constraint with a large multiplier balances that."""
    whole = search(2.25, "on")
    network = replace(
        whole.network,
        rows=replace(whole.network.rows, inner=-torch.tensor([[1.0, 2.0, 0.0]]).double()),
    )
    cuts = Cutter(network).choose(
        Bounder(network.to(torch.float32)).root(torch.tensor([0])), Deadline()
    )
    assert cuts is not None
    bounder = Bounder(network, cuts)
    problems = bounder.root(torch.tensor([0]))
    balance = torch.zeros(1, len(cuts.constant)).double()
    balance[0, int(cuts.on_outputs[:, 1].argmax())] = 100.0
    for gamma in (balance, torch.zeros_like(balance)):
        assert choose(bounder, replace(problems, gamma=gamma), rule="intercept").tolist() == [[1]]
