"""Multi-neuron constraints in a search: when they are chosen, and what they do for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_reduced import Neuron, Row, reduced

from tightrope.certification.names import CUTS
from tightrope.certification.search import cutting
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.search.branching import choose
from tightrope.certification.search.cutting import DUE, FEWEST, Cutter
from tightrope.certification.search.patience import TRIAL, Patience
from tightrope.deadline import Deadline
from tightrope.domains.reduced.cuts import network_cuts
from tightrope.domains.reduced.splits import Bounder, Subproblems

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


def test_every_choice_has_its_times() -> None:
    assert set(DUE) == set(CUTS)
    assert DUE["off"] == () and DUE["on"][0] == 0 and DUE["auto"][0] > 0
    cutter = Cutter(search(2.25, "on").network, "auto")
    first, second = DUE["auto"][:2]
    patience = Patience(3, work=math.inf)
    assert not cutter.is_due(first - 1, FEWEST, patience)
    assert cutter.is_due(first, FEWEST, patience) and not cutter.is_due(first, FEWEST - 1, patience)
    cutter.find(Bounder(cutter.network.to(torch.float32)), roots(), first, Deadline())
    assert not cutter.is_due(second - 1, FEWEST, patience)
    assert cutter.is_due(second, FEWEST, patience)


def test_regions_come_first_unless_constraints_are_asked_for() -> None:
    network = search(2.25, "on").network
    for mode, waits in (("auto", True), ("on", False)):
        cutter, patience = Cutter(network, mode), Patience(3, work=0.0)
        assert cutter.is_due(DUE["auto"][-1], FEWEST, patience) is not waits
        patience.note_regions(TRIAL, TRIAL, 1.0)  # nothing was closed
        assert cutter.is_due(DUE["auto"][-1], FEWEST, patience)
        patience.eager = True
        assert not cutter.is_due(DUE["auto"][-1], FEWEST, patience)


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


def roots() -> Subproblems:
    """Return the root of the search, bounded."""
    whole = search(2.25, "on")
    whole.begin()
    assert whole.pool is not None and len(whole.pool) == 1
    return whole.pool.peek(1)


def test_what_was_not_bounded_again_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(2.25, "on")
    whole.begin()
    pool = whole.pool
    assert pool is not None and len(pool) == 1
    better = whole.cutter.find(whole.bounder, pool.peek(1), 1, Deadline())
    assert better is not None and better.cuts is not None
    monkeypatch.setattr(whole.cutter, "find", lambda *_: better)
    whole._cut(pool, -math.inf)
    assert len(pool) == 1 and pool.peek(1).gamma.shape == (1, len(better.cuts.constant))
    assert whole.run(math.inf)


def test_without_time_there_are_no_constraints() -> None:
    cutter = Cutter(search(2.25, "on").network, "on")
    bounder = Bounder(cutter.network.to(torch.float32))
    assert cutter.find(bounder, roots(), 0, Deadline(-math.inf)) is None
    assert cutter.cuts is None


def test_the_most_used_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MOST", 1)
    cutter = Cutter(search(2.25, "on").network, "on")
    better = cutter.find(Bounder(cutter.network.to(torch.float32)), roots(), 0, Deadline())
    assert better is not None and cutter.cuts is not None and len(cutter.cuts.constant) == 1
    every = network_cuts(cutter.network, torch.ones(1, 3))
    assert every is not None and len(every.constant) > 1
    bounder = Bounder(cutter.network, cutter.cuts)
    bound, _ = bounder.improve(bounder.root(torch.tensor([0])), iterations=100)
    assert float(bound) > 0


def test_more_constraints_come_behind_those_known() -> None:
    cutter = Cutter(search(2.25, "on").network, "on")
    bounder, counts = Bounder(cutter.network.to(torch.float32)), []
    problems = roots()
    for _ in range(2):
        found = cutter.find(bounder, problems, 0, Deadline())
        if found is None:
            break
        assert cutter.cuts is not None and found.cuts is not None
        assert torch.equal(found.cuts.constant, cutter.cuts.constant.float())
        if bounder.cuts is not None:
            assert torch.equal(found.cuts.constant[: counts[-1]], bounder.cuts.constant)
        counts.append(len(found.cuts.constant))
        bounder, problems = found, cutting.with_room(problems, found)
        assert problems.gamma.shape == (1, counts[-1])
    assert counts and counts == sorted(counts)


def test_constraints_that_lift_nothing_are_not_kept() -> None:
    """Those of two neurons that the row does not ask for cost time only."""
    network = search(2.25, "on").network
    rows = replace(network.rows, inner=-torch.tensor([[0.0, 0.0, 0.125]]).double())
    for used, kept in ((network, True), (replace(network, rows=rows), False)):
        cutter = Cutter(used, "auto")
        bounder = Bounder(used.to(torch.float32))
        problems = bounder.root(torch.tensor([0]))
        assert (cutter.find(bounder, problems, 2000, Deadline()) is not None) is kept


def test_a_layer_without_pairs_has_no_constraints() -> None:
    network = reduced([LAYER[:1]], [Row([0.0, 0.0], [-1.0], 1.0)], [-1.0] * 2, [1.0] * 2)
    bounder = Bounder(network.to(torch.float32))
    problems = bounder.root(torch.tensor([0]))
    assert Cutter(network, "on").find(bounder, problems, 0, Deadline()) is None


def test_multipliers_of_constraints_do_not_hide_a_neuron() -> None:
    """The second neuron costs most; a constraint with a large multiplier balances that."""
    whole = search(2.25, "on")
    inner = -torch.tensor([[1.0, 2.0, 0.0]]).double()
    network = replace(whole.network, rows=replace(whole.network.rows, inner=inner))
    cuts = network_cuts(network, torch.ones(1, 3))
    assert cuts is not None
    bounder = Bounder(network, cuts)
    problems = bounder.root(torch.tensor([0]))
    balance = torch.zeros(1, len(cuts.constant)).double()
    balance[0, int(cuts.on_outputs[:, 1].argmax())] = 100.0
    for gamma in (balance, torch.zeros_like(balance)):
        assert choose(bounder, replace(problems, gamma=gamma), rule="intercept").tolist() == [[1]]
