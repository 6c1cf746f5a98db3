"""Searches at the edge: bounds that are exactly zero or not finite, and what may not be lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tightrope.answer import Answer, Cause, Verdict
from tightrope.box import Box
from tightrope.certification.problem import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.clipping import KEPT
from tightrope.certification.search.inputs import InputSearch, InputSettings
from tightrope.certification.search.on_graph import GraphSearch
from tightrope.certification.search.open_branches import OpenBranches
from tightrope.certification.search.roots import find_root, open_rows
from tightrope.certification.search.together import alike, decide_together
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.domains.boxes.bounding import RowBounds
from tightrope.domains.branches.subproblems import Branches
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.graph import trace
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = math.inf, math.nan


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the search over inputs ---------------------------------------------------------------------


class Told:
    """A bounder that says what it is told: a function of the boxes' ends."""

    def __init__(self, lower: Callable[[Tensor, Tensor], Tensor], inputs: int = 1) -> None:
        self.varying, self.lower, self.calls = torch.arange(inputs), lower, 0

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        self.calls += 1
        found = self.lower(lower, upper)
        slope = torch.zeros(*found.shape, lower.shape[1], dtype=torch.float64)
        blame = torch.ones_like(slope)
        constant = torch.full_like(found, -INF)
        return RowBounds(slope, constant, found, blame, torch.zeros(len(found), dtype=torch.long))


def unit_search(bounder: Told, group: list[int], limit: int = 200) -> InputSearch:
    box = Box(numbers(0.0)[None], numbers(1.0)[None])
    settings = InputSettings(limit=limit)
    return InputSearch(bounder, box, torch.tensor(group), lambda *_: None, settings=settings)


def told(*values: float) -> Told:
    return Told(lambda lower, upper: numbers(*values).repeat(len(lower), 1))


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN, -5e-324])
def test_boxes_are_proved_by_finite_bounds_above_zero(value: float) -> None:
    assert unit_search(told(value), [0]).run(INF).verdict is Verdict.UNKNOWN
    assert unit_search(told(1.0, value), [0, 1]).run(INF).verdict is Verdict.UNKNOWN
    assert unit_search(told(value, 1.0), [0, 0]).run(INF).verdict is Verdict.VERIFIED
    assert unit_search(told(5e-324), [0]).run(INF).verdict is Verdict.VERIFIED


def test_the_bound_is_that_of_the_worst_group_on_the_worst_box() -> None:
    first = unit_search(told(-1.0, -2.0, 3.0), [0, 1, 2]).begin()
    assert first.bound == -2.0
    split = Told(lambda lower, upper: torch.where(upper - lower > 0.3, -1.0, 3.0 + lower))
    done = unit_search(split, [0]).run(INF)
    assert done.verdict is Verdict.VERIFIED and done.bound is not None
    assert 2.99 < done.bound <= 3.0


def test_what_is_open_is_never_called_proved() -> None:
    """Only the right half can be proved."""
    half = Told(lambda lower, upper: torch.where(lower >= 0.5, 1.0, -1.0))
    found = unit_search(half, [0]).run(INF)
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.MEMORY
    assert found.bound == -1.0


def test_what_is_clipped_counts_as_little_as_it_may() -> None:
    """The row is x - 0.5 on [0, 1], and clipping leaves [0, 0.5], where a bound of 2 is told."""

    def bounds(lower: Tensor, upper: Tensor) -> RowBounds:
        slope, constant = torch.ones(len(lower), 1, 1).double(), torch.full((len(lower), 1), -0.5)
        least = torch.where(upper > 0.6, -0.5, 2.0)
        nothing = torch.zeros(len(lower), dtype=torch.long)
        return RowBounds(slope, constant.double(), least.double(), slope, nothing)

    bounder = told(1.0)
    search = unit_search(bounder, [0])
    search.bounder = Bounding(bounds)
    found = search.run(INF)
    assert found.verdict is Verdict.VERIFIED and found.bound is not None and found.bound <= KEPT


class Bounding:
    """A bounder of one input by a function."""

    varying = torch.arange(1)

    def __init__(self, function: Callable[[Tensor, Tensor], RowBounds]) -> None:
        self.function = function

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        return self.function(lower, upper)


def test_boxes_that_ran_out_of_time_stay_open() -> None:
    def late(lower: Tensor, upper: Tensor) -> Tensor:
        raise OutOfTimeError

    search = unit_search(Told(late), [0])
    found = search.run(INF)
    assert found.cause is Cause.TIME and len(search.pool) == 1


def test_stuck_boxes_are_not_forgotten() -> None:
    box = Box(numbers(0.0)[None], numbers(5e-324)[None])
    search = InputSearch(told(-1.0), box, torch.tensor([0]), lambda *_: None)
    found = search.run(INF)
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.TOO_CLOSE
    assert found.bound == -1.0


# --- the search on the graph --------------------------------------------------------------------


def absolute(margin: float) -> GraphSearch:
    """Return the search of |x| + |y| + margin > 0 around zero; no point is a counterexample."""
    first, last = nn.Linear(2, 4, bias=False), nn.Linear(4, 1)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        last.weight.fill_(1.0)
        last = last.double()
        last.bias.fill_(margin)
    module = nn.Sequential(first, nn.ReLU(), last).double()
    graph = trace(module, (2,)).detach()
    box = Box(numbers(-1.0, -1.0)[None], numbers(0.75, 0.75)[None])
    relaxation = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING)
    unsafe = Unsafe(torch.ones(1, 1).double(), torch.zeros(1).double(), torch.tensor([0]))
    return GraphSearch(relaxation, unsafe, lambda *_: None)


@pytest.mark.parametrize("margin", [0.0, -0.1, -1e-12])
def test_minima_that_are_not_positive_are_not_proved(margin: float) -> None:
    found = absolute(margin).run(INF)
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.TOO_CLOSE
    assert found.bound is None or found.bound <= margin


def test_a_positive_minimum_is_proved() -> None:
    found = absolute(0.01).run(INF)
    assert found.verdict is Verdict.VERIFIED and found.bound is not None
    assert 0 < found.bound <= 0.01


class Strict:
    """A bounder that only says what strict bounds are."""

    def __init__(self, *values: float) -> None:
        self.values = numbers(*values)

    def strict(self, problems: Branches) -> Tensor:
        return self.values[problems.row]


def branches(count: int) -> Branches:
    blank = torch.zeros(count, 0)
    return Branches(torch.arange(count), blank, blank.int(), blank.to(torch.int8), blank)


def test_subproblems_are_proved_by_finite_strict_bounds_above_zero() -> None:
    search = absolute(0.0)
    values = (0.0, -0.0, INF, NAN, -INF, -1.0, 5e-324, 2.0, 3.0)
    search.bounder = Strict(*values)  # type: ignore[assignment]
    bound = torch.ones(len(values))
    bound[-1] = -1.0  # what does not look proved is not tried
    proved = search._prove(bound, branches(len(values)))
    assert proved.nonzero()[:, 0].tolist() == [6, 7]
    assert search.lowest == 5e-324
    assert (bound[:6] <= 0).all() and not bound.isnan().any()


def test_subproblems_that_ran_out_of_time_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    search = absolute(0.0)
    assert not search.begin(Deadline())
    assert search.pool is not None
    before = len(search.pool)

    def late(*_: object, **__: object) -> Answer:
        raise OutOfTimeError

    monkeypatch.setattr(search.bounder, "improve", late)
    found = search.run(INF)
    assert found.cause is Cause.TIME and found.bound is None and len(search.pool) == before > 0


def test_the_pool_gives_back_what_was_put_in() -> None:
    problems = branches(5)
    problems = replace(problems, alpha=torch.rand(5, 3), row=torch.zeros(5, dtype=torch.long))
    for memory in (0, 10, 1 << 20):
        pool = OpenBranches(problems[:1], memory=memory)
        pool.add(problems, numbers(3.0, 1.0, 2.0, 5.0, 4.0), torch.arange(5)[:, None])
        assert len(pool) == 5 and pool.lowest == 1.0
        taken = [pool.take(2)[2].flatten().tolist() for _ in range(3)]
        assert taken == [[1, 2], [0, 4], [3]] and len(pool) == 0


def test_parts_of_the_first_box_are_searched() -> None:
    search = unit_search(told(-1.0), [0])
    assert not search.begin()
    found = search.run(INF)
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.MEMORY


def test_roots_are_strict() -> None:
    """They are on the safe side of the exact value by no more than rounding errors."""
    search = absolute(0.5)
    box = Box(numbers(0.25, 0.25)[None], numbers(0.5, 0.5)[None])
    relaxation = relax(search.relaxation.graph, box, effort=CROWN_IBP, rounding=ROUNDING)
    root = find_root(relaxation, search.unsafe, deadline=Deadline())
    assert 0 <= 1.0 - float(root.bounds) < 1e-12


def test_leaves_and_others_in_one_batch() -> None:
    """Beside a leaf, of which nothing is left to split, the others are split all the same."""
    search = absolute(0.0)
    search.begin(Deadline())
    assert search.pool is not None
    problems, bound, candidates = search.pool.take(1)
    search.pool.add(problems, bound, torch.full_like(candidates, -1))
    search.pool.add(problems, bound, candidates)
    search._round()
    assert search.stuck == 1 and len(search.pool) == 2


def many(fails: bool, margins: list[float]) -> tuple[Subject, list[Problem]]:
    """Return problems `x + margin > 0` on [0, 1]."""
    layer = nn.Linear(1, 1).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
    box = Box(numbers(0.0)[None], numbers(1.0)[None])
    problems = [
        Problem(
            box,
            box,
            Unsafe(torch.ones(1, 1).double(), numbers(m), torch.tensor([0])),
            lambda _: fails,
        )
        for m in margins
    ]
    return Subject.of(nn.Sequential(layer), (1,)), problems


def test_points_of_many_problems_are_run_alone() -> None:
    """What looks like a counterexample is one only if the network fails at it."""
    margins = [1.0, 1.0, -0.5, 1.0]
    found = decide_together(*many(False, margins), Deadline.after(1.0))
    assert found is not None and found[0].verdict is not Verdict.FALSIFIED
    found = decide_together(*many(True, margins), Deadline())
    assert found is not None and found[0].verdict is Verdict.FALSIFIED and found[1] == 2


@pytest.mark.parametrize("place", range(4))
def test_one_of_many_problems_is_open(place: int) -> None:
    margins = [1.0] * 4
    margins[place] = -0.5
    found = decide_together(*many(False, margins), Deadline.after(1.0))
    assert found is not None and found[0].verdict is Verdict.UNKNOWN
    done = decide_together(*many(False, [1.0] * 4), Deadline())
    assert done is not None and done[0].verdict is Verdict.VERIFIED


def test_rows_of_zero_stay_open() -> None:
    assert open_rows(numbers(0.0, 1.0), torch.tensor([0, 1])).tolist() == [0]
    assert open_rows(numbers(-0.0, INF), torch.tensor([0, 1])).tolist() == [0, 1]


def test_problems_of_other_groups_are_not_alike() -> None:
    _, problems = many(False, [1.0] * 4)
    assert alike(problems)
    unsafe = problems[0].unsafe
    other = Unsafe(unsafe.matrix, unsafe.offset, unsafe.group + 1)
    assert not alike([*problems, replace(problems[0], unsafe=other)])
