"""Regions in a search: exact answers when it begins again with them, and when they are made."""

from __future__ import annotations

import pytest
import torch
from effort import mostly_slow
from instances import draw_instance
from test_certification_exact import agree

from tightrope.answer import Answer, Cause
from tightrope.certification.complete import bound_nodes
from tightrope.certification.problem import OpenProblem, Problem
from tightrope.certification.refutation import Refuter
from tightrope.certification.search import patience
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.search.patience import COUNT, MOST_WORK, RECENT, TRIAL, Patience
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.reduced.reduction import reduce

pytestmark = pytest.mark.usefixtures("one_thread")


class Impatient(Patience):
    """Begins with a trial near the root, likes it, and makes one region at a time."""

    def trial_is_due(self, count: int, open_ones: float) -> bool:
        """Return whether there was none."""
        return not self.made

    def most(self, allowed: int) -> int:
        """Return how many regions a round may make."""
        return 1

    def _adapt(self, share: float) -> None:
        self.eager, self.depth = True, 1


begun: list[int] = []


def eager_search(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
    """Branch and bound with poor bounds that begins again with regions near the root."""
    problem, unsafe = opened.problem, opened.problem.unsafe
    reduced = reduce(bound_nodes(subject, opened), unsafe.matrix, unsafe.offset)
    refuter = Refuter(subject, problem.inner, unsafe, problem.fails, climbers=2, steps=3)
    poor = SearchSettings(
        root_iterations=1, iterations=1, patient_iterations=1, smallest_batch=2, cuts="off"
    )
    search = BranchAndBound(reduced, unsafe.group, refuter, settings=poor)
    search.patience = Impatient(reduced.size, 0.0)
    found = search.run(deadline.end)
    begun.append(search.patience.made)
    return found


@pytest.mark.parametrize("part", mostly_slow(range(20), 3))
def test_searches_that_begin_again_are_exact(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightrope.certification.search.branch_and_bound.TRIAL", 1)
    monkeypatch.setattr("tightrope.domains.reduced.regions.ITERATIONS", 0)
    begun.clear()
    counts = agree(eager_search, range(30_000 + 5 * part, 30_005 + 5 * part), most=512)
    assert sum(counts.values()) == 50
    assert counts["verified"] >= 8 and counts["falsified"] >= 8 and counts["unknown"] <= 6
    assert sum(made > 0 for made in begun) >= 3


@pytest.mark.parametrize("seed", [30_004, 30_007, 30_008, 30_014])
def test_nothing_is_lost_on_the_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no point is ever accepted, a negative minimum must keep something open."""
    monkeypatch.setattr("tightrope.certification.search.branch_and_bound.TRIAL", 1)
    monkeypatch.setattr("tightrope.domains.reduced.regions.ITERATIONS", 0)
    begun.clear()
    instance = draw_instance(seed, most=512)
    for shift in (-1e-3, -0.03, -0.1):
        target = torch.full_like(instance.minima, 1.0)
        target[0] = shift
        seen = instance.problem(target - instance.minima)
        blind = Problem(seen.outer, seen.inner, seen.unsafe, lambda point: False)
        found = eager_search(instance.subject, OpenProblem(blind), Deadline.after(60.0))
        assert found.cause is Cause.TOO_CLOSE
    assert sum(begun) >= 3


def test_regions_that_close_most_are_made_earlier_and_others_later() -> None:
    one = Patience(100, MOST_WORK, per_child=1e-3)
    one.note_regions(TRIAL, TRIAL // 4, 1.0)
    assert one.eager and one.depth == 1 and one.is_due(0)
    one.note_regions(RECENT, RECENT, 1.0)
    assert one.eager and one.depth == 3  # a region takes as long as 2^6 children
    for _ in range(4):
        one.note_regions(RECENT, RECENT, 1.0)
    assert not one.eager and one.depth >= one.patient_depth
    depth = one.depth
    one.note_children(10_000, 10.0)
    assert one.is_due(COUNT) and not one.is_due(COUNT - 1)
    one.note_regions(RECENT, 1, 1.0)
    assert one.eager and one.depth == depth - 1


def test_a_trial_waits_until_children_took_longer() -> None:
    one = Patience(100, 2 * MOST_WORK)
    assert not one.trial_is_due(10**6, 100.0)
    one.note_children(10, 0.01)
    expected = TRIAL * patience.PER_NEURON * 100 * 1e-3
    assert not one.trial_is_due(10**6, 100.0)
    one.on_children = patience.WAIT * expected
    assert one.trial_is_due(0, TRIAL + 1.0)
    assert not one.trial_is_due(0, TRIAL), "there is not much to be lost"
    one.note_regions(TRIAL, TRIAL, 1.0)
    assert not one.trial_is_due(0, 100.0) and not one.eager
    assert not one.is_due(10**6), "a region takes too much work"


@pytest.mark.parametrize("most", [1, 3, 10, 50])
def test_what_is_chosen_is_spread(most: int) -> None:
    wanted = torch.arange(40) % 4 == 1
    chosen = patience.spread(wanted, most)
    assert int(chosen.sum()) == min(most, 10) and not (chosen & ~wanted).any()
    assert chosen.nonzero()[0] == 1 and (most == 1 or chosen.nonzero()[-1] == 37)
    assert not patience.spread(torch.zeros(3, dtype=torch.bool), most).any()
