"""Boxes within boxes: parts of a box that inherit what is known of the whole one."""

from __future__ import annotations

import pytest
import torch
from effort import mostly_slow
from test_certification_exact import agree
from test_certification_on_pieces import above, grid, smooth_network

from tightrope.answer import Answer, Cause, Verdict
from tightrope.box import Box
from tightrope.certification.complete import bound_nodes, branch_and_bound
from tightrope.certification.problem import OpenProblem, Problem
from tightrope.certification.search import inputs, nested
from tightrope.certification.search.branch_and_bound import SearchSettings
from tightrope.certification.search.nested import NestedSearch
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.linear.crown import CROWN_IBP

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-6


def make(subject: Subject, problem: Problem, settings: SearchSettings) -> NestedSearch:
    relaxation = bound_nodes(subject, OpenProblem(problem), CROWN_IBP)
    return NestedSearch(relaxation, problem.unsafe, problem.refuter(subject), settings=settings)


def search(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
    """Decide a problem by halving its box, with the loosest bounds at the root."""
    return make(subject, opened.problem, SearchSettings()).run(deadline.end)


def hurried_search(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
    """Give up soon: many inputs, or a minimum close to zero, need very many boxes."""
    return search(subject, opened, Deadline.after(1.0))


@pytest.mark.parametrize("part", mostly_slow(range(20), 2))
def test_answers_are_those_of_enumeration(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested, "PATIENCE", 0.0)  # nearly all is left to halving
    seeds = range(70_000 + 2 * part, 70_002 + 2 * part)
    counts = agree(hurried_search, seeds, most=32, tiny=float("inf"))
    assert counts["verified"] >= 2 and counts["falsified"] >= 2


@pytest.mark.parametrize("part", mostly_slow(range(20), 2))
def test_answers_with_searches_by_signs_are_those_of_enumeration(part: int) -> None:
    counts = agree(search, range(71_000 + 4 * part, 71_004 + 4 * part), most=32, tiny=CLOSE)
    assert counts["verified"] >= 4 and counts["falsified"] >= 4


@pytest.mark.parametrize("kind", ["tanh", "gelu"])
def test_networks_of_any_activation_are_halved(kind: str) -> None:
    module = smooth_network(kind, 0)
    with torch.no_grad():
        outputs = module(grid())
    least, spread = float(outputs.min()), float(outputs.max() - outputs.min())
    for value, verdict in (
        (least - 0.1 * spread, "verified"),
        (least + 0.05 * spread, "falsified"),
    ):
        subject, problem = above(value, module)
        found = make(subject, problem, SearchSettings()).run(Deadline.after(60.0).end)
        assert found.verdict == verdict
        if found.bound is not None:
            assert 0 < found.bound <= least - value + 1e-9


def test_bounds_are_below_the_minimum() -> None:
    """What is said of a search that ran out of time holds, too."""
    module = smooth_network("tanh", 1)
    with torch.no_grad():
        least = float(module(grid()).min())
    subject, problem = above(least - 1e-4, module)
    unrefuted = Problem(problem.outer, problem.inner, problem.unsafe, lambda point: False)
    boxes = make(subject, unrefuted, SearchSettings())
    root = boxes.begin()
    assert root.bound is not None and root.bound <= 1e-4
    found = boxes.run(Deadline.after(1.0).end)
    assert found.verdict is Verdict.VERIFIED or found.cause is Cause.TIME
    assert found.bound is None or root.bound <= found.bound <= 1e-4 + 1e-9


def test_points_that_cannot_be_halved_stay_open() -> None:
    module = smooth_network("tanh", 0)
    subject, problem = above(0.0, module)
    point = torch.zeros(1, 2, dtype=torch.float64)
    value = float(module(point).detach())
    subject, problem = above(value, module)
    thin = Problem(Box(point, point), Box(point, point), problem.unsafe, lambda p: False)
    found = make(subject, thin, SearchSettings()).run(Deadline.after(60.0).end)
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.TOO_CLOSE


def test_large_networks_with_few_inputs_are_searched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the size of a network says so, `auto` and `input` take this search, `relu` does not."""
    monkeypatch.setattr(inputs, "MOST_NEURONS", 3)
    made: list[NestedSearch] = []
    begin = NestedSearch.begin

    def noted(self: NestedSearch) -> Answer:
        made.append(self)
        return begin(self)

    monkeypatch.setattr(NestedSearch, "begin", noted)
    module = smooth_network("tanh", 0)
    with torch.no_grad():
        least = float(module(grid()).min())
    subject, problem = above(least - 0.1, module)
    assert branch_and_bound(subject, OpenProblem(problem), Deadline.after(60.0))
    assert len(made) == 1
