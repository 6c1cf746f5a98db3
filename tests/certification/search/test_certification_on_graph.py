"""Branch and bound on the network itself, as large networks need it, against exact answers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from effort import mostly_slow
from instances import draw_instance
from test_certification_exact import Method, agree, check, targets
from torch import Tensor, nn

from tightrope.answer import Answer, Cause
from tightrope.box import Box
from tightrope.certification import complete
from tightrope.certification.complete import bound_nodes, branch_and_bound
from tightrope.certification.problem import OpenProblem, Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.on_graph import GraphSearch, GraphSettings
from tightrope.certification.search.open_branches import OpenBranches
from tightrope.certification.search.roots import RootSettings, find_root, open_rows
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")

# Fully split leaves are not solved by linear programs here: minima this close may stay unknown.
CLOSE = 1e-4
QUICK = RootSettings(row_iterations=10, neurons=4, rounds=1)


def search_with(settings: GraphSettings, *, known: bool = True) -> Method:
    def search(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
        """Decide a problem without ever reducing the network."""
        relaxation = bound_nodes(subject, opened) if known else intervals(subject, opened.problem)
        refuter = opened.problem.refuter(subject)
        search = GraphSearch(relaxation, opened.problem.unsafe, refuter, settings=settings)
        return search.run(deadline.end)

    return search


def intervals(subject: Subject, problem: Problem) -> Relaxation:
    return relax(subject.exact, problem.outer, effort=CROWN_IBP, rounding=ROUNDING)


@pytest.mark.parametrize("part", mostly_slow(range(20), 2))
def test_answers_are_those_of_enumeration(part: int) -> None:
    search = search_with(GraphSettings(iterations=10, root=QUICK))
    counts = agree(
        search, range(20_000 + 4 * part, 20_004 + 4 * part), most=32, single=True, tiny=CLOSE
    )
    assert counts["verified"] >= 6 and counts["falsified"] >= 6


@pytest.mark.parametrize("part", mostly_slow(range(20), 2))
def test_answers_from_poor_bounds_are_right(part: int) -> None:
    """From intervals, with a look at three candidates, and several rows in a group.

    Of a group the search proves one row, so that it may end without an answer.
    """
    search = search_with(GraphSettings(iterations=1, candidates=3, root=QUICK), known=False)
    decided = 0
    for seed in range(30_000 + 4 * part, 30_004 + 4 * part):
        instance = draw_instance(seed, most=32)
        for target in targets(instance, seed)[::2]:
            problem = instance.problem(target - instance.minima)
            answer = search(instance.subject, OpenProblem(problem), Deadline.after(60.0))
            decided += check(instance, problem, target, answer) != "unknown"
    assert decided >= 14


def test_a_network_that_cannot_be_reduced_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "reduction_fits", lambda relaxation: False)
    monkeypatch.setattr(complete, "reduce", None)
    counts = agree(branch_and_bound, range(21_000, 21_003), most=32, single=True, tiny=CLOSE)
    assert counts["verified"] >= 5 and counts["falsified"] >= 5


# --- a network that takes a while ---------------------------------------------------------------


def hard_problem() -> tuple[Subject, Problem]:
    """Return a problem that nothing can decide: it does not hold, but no point may say so."""
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 40), nn.ReLU(), nn.Linear(40, 2)),
    )
    subject = Subject.of(module, (1, 8, 8))
    center = torch.rand(1, 1, 8, 8)
    box = Box(center - 0.1, center + 0.1)
    with torch.no_grad():
        margin = module(center)[0] @ torch.tensor([1.0, -1.0])
    matrix = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    unsafe = Unsafe(matrix, -margin.double()[None], torch.zeros(1, dtype=torch.long))
    outer = Box(*(t.double() for t in box.corners))
    return subject, Problem(outer, box, unsafe, lambda point: False)


def test_the_deadline_ends_the_search_with_what_is_known() -> None:
    subject, problem = hard_problem()
    search = GraphSearch(intervals(subject, problem), problem.unsafe, problem.refuter(subject))
    start = time.monotonic()
    found = search.run(start + 1.5)
    assert time.monotonic() - start < 10.0
    assert found.cause is Cause.TIME and not found and found.counterexample is None
    assert found.subproblems > 2 and "lowest bound -" in found.details
    assert search.pool is not None and len(search.pool) > 0


def test_splitting_raises_the_lowest_bound() -> None:
    subject, problem = hard_problem()
    search = GraphSearch(intervals(subject, problem), problem.unsafe, problem.refuter(subject))
    first = search.begin(Deadline()).bound
    search.run(time.monotonic() + 1.5)
    assert search.pool is not None and first is not None
    assert first < search.pool.lowest < 0


def test_better_bounds_of_neurons_raise_the_root() -> None:
    subject, problem = hard_problem()
    relaxation = intervals(subject, problem)
    without, with_them = (
        find_root(relaxation, problem.unsafe, deadline=Deadline(), settings=RootSettings(rounds=n))
        for n in (0, 2)
    )
    assert with_them.bounds[0] > without.bounds[0]
    # A deadline that has passed leaves the first bounds.
    late = find_root(relaxation, problem.unsafe, deadline=Deadline(0.0))
    assert torch.equal(late.bounds, without.bounds)


def test_the_pool_holds_as_many_slopes_as_memory_allows() -> None:
    subject, problem = hard_problem()
    bounder = GraphBounder(
        intervals(subject, problem), problem.unsafe.matrix, problem.unsafe.offset
    )
    root = bounder.root(torch.zeros(1, dtype=torch.long))
    room = 2 * bounder.size * 2  # for two, in half precision
    pool = OpenBranches(root, memory=room)
    problems = root[torch.zeros(5, dtype=torch.long)].split(torch.arange(5), 1)
    problems = replace(problems, alpha=torch.full_like(problems.alpha, 0.75))
    bound = torch.tensor([-1.0, -5.0, -2.0, -4.0, -3.0])
    pool.add(problems, bound, torch.arange(5)[:, None])
    assert len(pool) == 5 and pool.lowest == -5.0 and pool.held == room
    assert pool.peek(2).neuron.flatten().tolist() == [1, 3]
    taken, lowest, candidates = pool.take(3)
    assert lowest.tolist() == [-5.0, -4.0, -3.0] and candidates.flatten().tolist() == [1, 3, 4]
    # The second one came with its own slopes, the others begin anew.
    assert bool((taken.alpha[0] == 0.75).all())
    assert torch.equal(taken.alpha[1:], root.alpha.expand(2, -1))
    assert len(pool) == 2 and pool.held == room // 2


def test_a_search_with_room_for_no_slopes_goes_on() -> None:
    search = search_with(GraphSettings(iterations=10, slopes=0, batch=1, root=QUICK))
    counts = agree(search, range(22_000, 22_002), most=32, single=True, tiny=CLOSE)
    assert counts["verified"] >= 3 and counts["falsified"] >= 3


@pytest.mark.parametrize(
    ("bounds", "group", "left"),
    [
        ([-1.0, -2.0, 0.5], [0, 1, 2], [0, 1]),
        ([-1.0, -0.5, -3.0, 1.0], [0, 0, 1, 1], [1]),
        ([torch.nan, torch.inf, -torch.inf], [0, 1, 2], [0, 1, 2]),
        ([1.0, 2.0], [0, 1], []),
    ],
)
def test_open_rows(bounds: list[float], group: list[int], left: list[int]) -> None:
    rows: Tensor = open_rows(torch.tensor(bounds).double(), torch.tensor(group))
    assert rows.tolist() == left
