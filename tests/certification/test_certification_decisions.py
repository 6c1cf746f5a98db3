"""What turns bounds into verdicts: strict inequalities, finite numbers, and nothing forgotten.

The bounds come from functions that say what they are told to, zero for example, which no
computed bound is by chance.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from handmade import blind_spot, network, records
from torch import Tensor, nn

from tightrope.answer import Answer, Cause
from tightrope.box import Box
from tightrope.certification import complete, refutation, stages
from tightrope.certification.cascade import solve
from tightrope.certification.complete import NOT_BOUNDED, bound_nodes, mixed_integer_program
from tightrope.certification.problem import Choices, OpenProblem, Problem, robustness
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.search import branch_and_bound as search
from tightrope.certification.search import on_pieces, optimum
from tightrope.certification.search.branch_and_bound import BranchAndBound
from tightrope.certification.search.optimum import _shifted, enclose
from tightrope.certification.stages import STAGES, Stage, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.milp.program import Optimum
from tightrope.domains.reduced.reduction import reduce
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")

# What may be said of a row, and whether it is then positive everywhere.
SAID = pytest.mark.parametrize(
    ("bound", "proved"),
    [
        (5e-324, True),
        *((bound, False) for bound in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf)),
    ],
)


def said(*bounds: float) -> Tensor:
    return torch.tensor(bounds, dtype=torch.float64)


RELUS = Choices("relu")


def constant(bound: float, leaf: float | None = None):  # type: ignore[no-untyped-def]
    """Return a function that says this of every subproblem, or something else of leaves.

    Only fully split subproblems come with weights of rows.
    """

    def strict_bounds(network, problems, weights=None, cuts=None, regions=None) -> Tensor:  # type: ignore[no-untyped-def]
        answer = bound if weights is None or leaf is None else leaf
        return said(*[answer] * len(problems))

    return strict_bounds


def robust() -> tuple[Subject, Problem]:
    """Return a problem that is easily verified."""
    x = torch.tensor([[0.875, 1.0]])
    subject = Subject.of(blind_spot(), (2,))
    (problem,) = robustness(subject, Ball(x, Fraction(1, 10)), torch.tensor([0]))
    return subject, problem


def touching(*, splits: bool = True, outputs: int = 1) -> tuple[Subject, Problem]:
    """Return `|x| + |y|` on [-1, 1]^2: at least zero, and zero at one point, which is a tie.

    Written as `relu(x) + relu(-x) + ...`; without `splits` the box shrinks to that point.
    """
    module = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, outputs)).double()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        module[2].weight.fill_(1.0)
        module[2].bias.zero_()
    subject = Subject.of(module, (2,))
    corner = torch.full((1, 2), 1.0 if splits else 0.0, dtype=torch.float64)
    unsafe = Unsafe(
        torch.eye(outputs, dtype=torch.float64),
        torch.zeros(outputs, dtype=torch.float64),
        torch.arange(outputs),
    )
    box = Box(-corner, corner)
    return subject, Problem(box, box, unsafe, lambda point: False)


def decide_late(method, subject: Subject, problem: Problem) -> Answer:  # type: ignore[no-untyped-def]
    """Bound the network in time, and have none left for anything else."""
    opened = OpenProblem(problem)
    late = partial(method, subject, opened, choices=RELUS)
    assert late(deadline=Deadline.after(-1.0)).reason == f"time: {NOT_BOUNDED}"
    complete.root(subject, opened, Deadline(), RELUS)
    return late(deadline=Deadline.after(-1.0))


# --- the search -----------------------------------------------------------------------------------


def run(
    subject: Subject, problem: Problem, deadline: float = math.inf, refute=lambda *_: None
) -> Answer:  # type: ignore[no-untyped-def]
    relaxation = bound_nodes(subject, OpenProblem(problem))
    reduced = reduce(relaxation, problem.unsafe.matrix, problem.unsafe.offset)
    return BranchAndBound(reduced, problem.unsafe.group, refute).run(deadline)


@SAID
def test_rows_are_proved_by_finite_bounds_above_zero(
    bound: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "strict_bounds", constant(bound))
    found = run(*robust())
    assert bool(found) is proved
    assert not proved or found.bound == bound


@SAID
def test_leaves_are_proved_by_finite_bounds_above_zero(
    bound: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "strict_bounds", constant(-1.0, leaf=bound))
    found = run(*touching())
    assert bool(found) is proved
    assert bool(found.reason) is not proved


def test_a_minimum_of_zero_is_not_proved() -> None:
    """Neither with splits to make, nor without, nor if no counterexample comes of it."""
    for problem in (touching(), touching(splits=False), touching(outputs=2)):
        found = run(*problem)
        assert not found and found.counterexample is None
        assert found.cause is Cause.TOO_CLOSE
        assert not complete.branch_and_bound(
            problem[0], OpenProblem(problem[1]), Deadline.after(20.0), RELUS
        )
        assert solve(*problem, timeout=1.0).verdict == "unknown"


def test_leaves_that_cannot_be_solved_are_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("not finite")

    monkeypatch.setattr(search, "solve_leaf", fail)
    found = run(*touching())
    assert not found and "lowest bound -inf" in found.reason


def test_leaves_that_time_does_not_allow_are_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock passes the deadline among the leaves; each of them could be proved."""
    monkeypatch.setattr(search, "strict_bounds", constant(-1.0, leaf=1.0))
    never = SimpleNamespace(monotonic=lambda: -1.0)
    monkeypatch.setattr("tightrope.deadline.time", never)  # nothing but the search is late
    for allowed in range(60):
        clock = itertools.count()
        monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda c=clock: next(c)))
        found = run(*touching(), deadline=allowed)
        if bool(found):
            break
        assert found.cause is Cause.TIME and " subproblems open of " in found.reason
    assert bool(found) and allowed > 5, "with enough time everything is proved"


def test_all_of_a_groups_rows_may_prove_it_but_each_group_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject, problem = touching(splits=False, outputs=3)
    unsafe = Unsafe(problem.unsafe.matrix, problem.unsafe.offset + 1, torch.tensor([0, 0, 1]))
    relaxation = bound_nodes(subject, OpenProblem(problem))
    reduced = reduce(relaxation, unsafe.matrix, unsafe.offset)
    for good, proved in (([0, 2], True), ([1, 2], True), ([0, 1], False), ([2], False)):
        rows = said(-1.0, -1.0, -1.0)
        rows[good] = 1.0
        monkeypatch.setattr(
            search,
            "strict_bounds",
            lambda network, problems, *_, rows=rows, **__: rows[problems.row],
        )
        found = BranchAndBound(reduced, unsafe.group, lambda *_: None).run(math.inf)
        assert bool(found) is proved, good


def test_a_point_is_no_proof() -> None:
    point = torch.zeros(2, dtype=torch.float64)
    found = run(*touching(), refute=lambda *_: point)
    assert found.counterexample is point and not found


def test_what_is_open_has_no_bound() -> None:
    answer = decide_late(complete.branch_and_bound, *touching())
    assert not answer and answer.bound is None


def test_other_bends_are_not_taken_for_relus() -> None:
    """tanh taken for a ReLU would be proved nonnegative."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
        module[0].bias.zero_()
        module[2].bias.fill_(0.5)
    subject = Subject.of(module, (1,))
    box = Box(-torch.ones(1, 1).double(), torch.ones(1, 1).double())
    one = torch.ones(1, 1, dtype=torch.float64)
    unsafe = Unsafe(one, 0 * one[0], torch.zeros(1).long())
    problem = Problem(box, box, unsafe, lambda point: False)
    answer = complete.branch_and_bound(subject, OpenProblem(problem), Deadline.after(2.0), RELUS)
    assert not answer and answer.subproblems > 1


# --- mixed-integer programs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lower", "proved"),
    [(0.5 + 1e-9, True), (0.5, False), (0.25, False), (-1.0, False), (math.nan, False)],
)
def test_programs_prove_what_exceeds_the_allowance(
    lower: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete.milp, "safety", lambda *_: 0.5)
    monkeypatch.setattr(
        complete.milp, "minimize", lambda *_, **__: Optimum(lower, math.inf, None, True)
    )
    answer = mixed_integer_program(robust()[0], OpenProblem(robust()[1]), Deadline.after(10.0))
    assert bool(answer) is proved
    assert bool(answer.reason) is not proved


# --- one problem from beginning to end, without ReLUs ---------------------------------------------


def curved(shift: float = 0.0) -> Subject:
    """Return `tanh(x) + shift`."""

    class Curved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) + shift

    return Subject(trace(Curved(), (1,)), Curved())


def row_problem(offset: float, groups: list[int]) -> Problem:
    """Return `output + offset` once for each of the groups, on [-1, 1]."""
    box = Box(-torch.ones(1, 1).double(), torch.ones(1, 1).double())
    count = len(groups)
    matrix = torch.ones(count, 1, dtype=torch.float64)
    unsafe = Unsafe(matrix, torch.full((count,), offset).double(), torch.tensor(groups))
    return Problem(box, box, unsafe, lambda point: False)


def by_lines(subject: Subject, problem: Problem) -> Answer:
    """Decide a problem by optimised lines alone."""
    return solve(subject, problem, timeout=10.0, stages=("alpha",), choices=RELUS)


@SAID
def test_linear_bounds_prove_if_they_are_finite_and_above_zero(
    bound: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_pieces, "optimized_rows", lambda *_: (said(bound), {}))
    monkeypatch.setattr(refutation.Refuter, "search", lambda self, **_: None)
    found = by_lines(curved(), row_problem(0.0, [0]))
    assert (found.verdict == "verified") is proved


@pytest.mark.parametrize(
    ("rows", "offset", "proved"),
    [
        ([1.0, -1.0, 1.0], 0.0, True),  # one row of each group is enough,
        ([-1.0, 1.0, 1.0], 0.0, True),
        ([1.0, 1.0, -1.0], 0.0, False),  # but it takes one of each
        ([1.0, math.nan, 1.0], 0.0, False),
        ([1.0, 1.0, 1.0], -1.0, False),
        ([-0.5, -0.5, -0.5], 1.0, True),
    ],
)
def test_each_group_needs_a_row_above_zero(
    rows: list[float], offset: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_pieces, "optimized_rows", lambda *_: (said(*rows), {}))
    monkeypatch.setattr(refutation.Refuter, "search", lambda self, **_: None)
    found = by_lines(curved(), row_problem(offset, [0, 0, 1]))
    assert (found.verdict == "verified") is proved


def test_the_bound_that_is_reported_is_rounded_down() -> None:
    """The least value is 2^60 + 199 and a bit; the nearest number is 2^60 + 256."""
    found = by_lines(curved(200.0), row_problem(2.0**60, [0]))
    assert found.verdict == "verified" and found.bound is not None
    assert 2.0**59 < found.bound <= 2.0**60


# --- stages ---------------------------------------------------------------------------------------


def linear() -> tuple[Subject, list[OpenProblem]]:
    net = network(([[1.0]], [0.0]), ([[1.0], [0.0]], [0.0, 0.0]))
    subject, ball = Subject.of(net, (1,)), Ball(torch.tensor([[0.5]]), Fraction(1, 10))
    return subject, [OpenProblem(p) for p in robustness(subject, ball, torch.tensor([0]))]


@SAID
def test_intervals_prove_if_they_are_finite_and_above_zero(
    bound: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.interval, "margins", lambda *_, **__: (said(0.0, bound)[None], {}))
    findings = STAGES["ibp"].examine(*linear(), StageSettings(), Deadline())
    assert bool(findings[0]) is proved


@SAID
@pytest.mark.parametrize("stage", ["crown-ibp", "alpha"])
def test_lines_prove_if_they_are_finite_and_above_zero(
    stage: str, bound: float, proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "strict_bounds", constant(bound))
    monkeypatch.setattr(stages.Relaxation, "lower", lambda *_: said(bound))
    settings = StageSettings(choices=RELUS)
    findings = STAGES[stage].examine(*linear(), settings, Deadline())
    assert bool(findings[0]) is proved


# The float32 next to the decimal 0.6 is a little more than that.
@pytest.mark.parametrize("point", [0.7, 0.6, 0.3, math.nan])
def test_points_outside_of_the_ball_refute_nothing(
    point: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, problems = linear()
    points = torch.tensor([[point]])
    monkeypatch.setattr(stages, "strong_attack", lambda *_, **__: points)
    monkeypatch.setattr(subject, "run", lambda x: torch.tensor([[0.0, 1.0]]).expand(len(x), 2))
    examine = partial(STAGES["attack"].examine, subject, problems, StageSettings(), Deadline())
    assert examine()[0].counterexample is None
    points.fill_(0.55)
    assert examine()[0].counterexample is not None


# --- the exact margin -----------------------------------------------------------------------------


def test_shifted_rows_cover_the_rounding_of_the_shift() -> None:
    subject, problem = touching()
    relaxation = bound_nodes(subject, OpenProblem(problem))
    reduced = reduce(relaxation, problem.unsafe.matrix, problem.unsafe.offset)
    rows = replace(reduced.rows, constant=said(1.0), slack=said(0.0))
    for goal in (0.5, 2.0**-70, -(2.0**-70), 2.0**60):
        shifted = _shifted(replace(reduced, rows=rows), goal)
        off = Fraction(shifted.constant.item()) - (1 - Fraction(goal))
        assert abs(off) <= Fraction(shifted.slack.item())


# --- how it is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["solve", "stages", "margin"])
def test_all_of_it_runs_in_full_precision(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def look(*_: object, **__: object) -> None:
        seen.append(torch.backends.cudnn.allow_tf32)
        raise InterruptedError

    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, True
    try:
        with pytest.raises(InterruptedError):
            if entry == "stages":
                monkeypatch.setitem(STAGES, "ibp", Stage(look))
                records(blind_spot(), torch.tensor([[0.875, 1.0]]), [0], "1/10", stages=("ibp",))
            else:
                module, run = (complete, solve) if entry == "solve" else (optimum, enclose)
                monkeypatch.setattr(module, "bound_nodes", look)
                monkeypatch.setattr(complete, "splits_inputs", lambda *_: False)
                run(*touching())
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert seen == [False]
