"""Small searches of many samples, in batches that they share."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tightrope.answer import Answer, Cause, Verdict, undecided
from tightrope.certification import cascade
from tightrope.certification.cascade import for_all, solve, walk
from tightrope.certification.problem import CHOICES, Choices, OpenProblem, robustness
from tightrope.certification.properties import Ball
from tightrope.certification.search import shared
from tightrope.certification.stages import STAGES, Stage, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.subproblems import Branches
from tightrope.limits import MEMORY_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")

INPUTS, CLASSES = 30, 4


def subject_of(*, seed: int = 0, activation: type[nn.Module] = nn.ReLU) -> Subject:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Unflatten(1, (1, 5, 6)),
        nn.Conv2d(1, 4, 3, 1, 1),
        nn.BatchNorm2d(4),
        activation(),
        nn.Flatten(),
        nn.Linear(120, 16),
        activation(),
        nn.Linear(16, CLASSES),
    )
    for parameter in module.parameters():
        parameter.requires_grad_(False).mul_(1.7)
    return Subject.of(module, (INPUTS,))


def samples(subject: Subject, eps: str, count: int = 24) -> list[OpenProblem]:
    """Return the problems of random samples at their own prediction."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, INPUTS, generator=generator)
    return [OpenProblem(p) for p in robustness(subject, Ball(x, Fraction(eps)), subject.predict(x))]


def searched(
    subject: Subject, problems: Sequence[OpenProblem], deadline: Deadline | None = None
) -> list[Answer]:
    light = STAGES["bab"].light
    assert light is not None
    return light(subject, problems, StageSettings(), deadline or Deadline())


@pytest.mark.parametrize(("seed", "eps"), [(0, "0.06"), (1, "0.06"), (3, "0.06")])
def test_answers_are_those_of_searches_alone(seed: int, eps: str) -> None:
    subject = subject_of(seed=seed)
    problems = samples(subject, eps)
    answers = searched(subject, problems)
    assert {a.verdict for a in answers} >= {Verdict.VERIFIED, Verdict.FALSIFIED}
    assert max(a.subproblems for a in answers if a) > CLASSES - 1  # some are split
    for opened, answer in zip(problems, answers, strict=True):
        point = answer.counterexample
        if point is not None:
            assert bool(opened.problem.inner.contains(point[None])[0])
            assert int(subject.predict(point[None])[0]) != opened.problem.label
        if answer.verdict is Verdict.VERIFIED:
            assert answer.bound is not None and answer.bound > 0
            alone = solve(subject, opened.problem, stages=("alpha", "bab"))
            assert alone.verdict is Verdict.VERIFIED


def test_neighbours_change_nothing() -> None:
    """Same verdicts and subproblems, bounds up to rounding, whoever shares the batches."""
    subject = subject_of()
    together = searched(subject, samples(subject, "0.06"))
    apart = [searched(subject, [one])[0] for one in samples(subject, "0.06")]
    pairs = searched(subject, samples(subject, "0.06")[5:7])
    for one, other in [*zip(together, apart, strict=True), *zip(pairs, apart[5:7], strict=True)]:
        assert (one.verdict, one.subproblems) == (other.verdict, other.subproblems)
        assert (one.bound is None) == (other.bound is None)
        if one.bound is not None and other.bound is not None:
            assert math.isclose(one.bound, other.bound, rel_tol=1e-3, abs_tol=1e-4)


def test_verdicts_depend_neither_on_batches_nor_on_sharing() -> None:
    """The whole cascade, without a limit that is ever reached."""
    subject = subject_of(seed=1)
    stages = {
        name: STAGES[name] for name in ("ibp", "crown-ibp", "crown", "attack", "alpha", "bab")
    }
    settings = StageSettings(steps=20, restarts=2, timeout=math.inf)

    def verdicts(problems: list[OpenProblem], chosen: Choices) -> list[Verdict]:
        found = dict(walk(subject, problems, stages, replace(settings, choices=chosen)))
        return [found[i].verdict for i in range(len(problems))]

    together = verdicts(samples(subject, "0.06"), CHOICES)
    apart = [verdicts([one], CHOICES)[0] for one in samples(subject, "0.06")]
    # Another rule is what only searches of their own know.
    alone = verdicts(samples(subject, "0.06"), Choices(branching="babsr"))
    assert together == apart == alone
    assert set(together) == {Verdict.VERIFIED, Verdict.FALSIFIED}


def test_samples_whose_time_is_up_leave_the_others() -> None:
    subject = subject_of()
    problems = samples(subject, "0.06")
    usual = searched(subject, problems)
    late = next(i for i, a in enumerate(usual) if a and a.subproblems > CLASSES - 1)
    again = samples(subject, "0.06")
    again[late].limit = 1e-9
    answers = searched(subject, again)
    assert answers[late].verdict is Verdict.UNKNOWN and answers[late].cause is Cause.TIME
    assert answers[late].bound is not None and answers[late].bound <= 0
    kept = [i for i in range(len(answers)) if i != late]
    assert [answers[i].verdict for i in kept] == [usual[i].verdict for i in kept]


def test_without_time_nothing_is_decided() -> None:
    subject = subject_of()
    for answer in searched(subject, samples(subject, "0.01"), Deadline(time.monotonic() - 1)):
        assert answer.verdict is Verdict.UNKNOWN and answer.cause is Cause.TIME


def test_what_was_decided_before_the_end_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of()
    usual = searched(subject, samples(subject, "0.06"))
    rounds: list[int] = []
    split = shared.SharedSearch._round

    def once(self: Any, left: Any) -> Any:
        rounds.append(len(left.bound))
        if len(rounds) > 1:
            raise shared.OutOfTimeError
        return split(self, left)

    monkeypatch.setattr(shared.SharedSearch, "_round", once)
    answers = searched(subject, samples(subject, "0.06"))
    assert sum(map(bool, answers)) > 0
    late = [a for a in answers if a.cause is Cause.TIME]
    assert late
    for answer, before in zip(answers, usual, strict=True):
        assert answer.verdict in (before.verdict, Verdict.UNKNOWN)


def test_parts_fit_into_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of()
    usual, most = (
        searched(subject, samples(subject, "0.06")),
        shared.together(subject, shared.DEFAULTS.most),
    )
    sizes: list[int] = []
    begin = shared.SharedSearch.__init__

    def counted(self: Any, subject: Subject, problems: Sequence[OpenProblem]) -> None:
        sizes.append(len(problems))
        begin(self, subject, problems)

    monkeypatch.setattr(shared.SharedSearch, "__init__", counted)
    monkeypatch.setenv(MEMORY_BYTES.variable, "4_000_000")
    answers = searched(subject, samples(subject, "0.06"))
    assert max(sizes) == shared.together(subject, shared.DEFAULTS.most) < 24 <= most
    assert [a.verdict for a in answers] == [a.verdict for a in usual]


def test_seconds_are_shared_out_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 16.0))
    monkeypatch.setattr(cascade.time, "perf_counter", lambda: next(clock))

    def look(_: Subject, problems: Sequence[OpenProblem], *__: object) -> list[Answer]:
        for opened, rows in zip(problems, (1, 3, 2), strict=True):
            opened.rows = rows
        return [undecided()] * len(problems)

    subject = subject_of()
    problems = samples(subject, "0.06", 3)
    list(walk(subject, problems, {"crown": Stage(look)}, StageSettings()))
    assert [opened.times["crown"] for opened in problems] == [1.0, 3.0, 2.0]


def test_searches_say_how_much_each_sample_took() -> None:
    subject = subject_of()
    problems = samples(subject, "0.06")
    answers = searched(subject, problems)
    for opened, answer in zip(problems, answers, strict=True):
        assert opened.rows >= CLASSES - 1
        assert not answer or opened.rows == answer.subproblems


def test_what_is_light_comes_first() -> None:
    def names(*stages: str, shares: bool = True) -> list[tuple[str, bool]]:
        chosen = {name: STAGES[name] for name in stages}
        return [(n, e is STAGES[n].light) for n, e in for_all(chosen, shares)]

    plain = [("ibp", False), ("attack", False)]
    assert names("ibp", "attack") == names("ibp", "attack", "alpha") == plain
    assert names("ibp", "attack", "bab", shares=False) == plain
    light = [("ibp", False), ("attack", True), ("bab", True), ("attack", False)]
    assert names("ibp", "attack", "alpha", "bab") == light
    assert names("bab", "attack") == [("bab", True)]


def test_only_what_suits_shares_batches() -> None:
    subject = subject_of()
    problems = samples(subject, "0.06", 2)
    assert shared.suits(subject, problems, CHOICES)
    for choices in (Choices("input"), Choices(branching="kfsb"), Choices(cuts="on")):
        assert not shared.suits(subject, problems, choices)
    unlabelled = [OpenProblem(replace(problems[0].problem, label=None))]
    assert not shared.suits(subject, unlabelled, CHOICES)
    smooth = subject_of(activation=nn.Sigmoid)
    assert not shared.suits(smooth, samples(smooth, "0.06", 2), CHOICES)


def test_no_point_outside_of_the_box_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(network: Any, box: Any, goal: Any, *, steps: int, start: Tensor) -> Tensor:
        assert bool(box.contains(start).all())
        return start + 10.0

    subject = subject_of()
    monkeypatch.setattr(shared, "attack_goal", far)
    answers = searched(subject, samples(subject, "0.06"))
    assert all(a.verdict is not Verdict.FALSIFIED for a in answers)


def test_only_strict_bounds_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: GraphBounder, problems: Branches) -> Tensor:
        return torch.full((len(problems),), -1e-12, dtype=torch.float64)

    subject = subject_of()
    monkeypatch.setattr(GraphBounder, "strict", nothing)
    answers = searched(subject, samples(subject, "0.01"))
    assert all(a.verdict is not Verdict.VERIFIED for a in answers)


def test_what_has_a_counterexample_is_never_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where no attack finds it."""
    subject = subject_of()
    wrong = [
        i
        for i, a in enumerate(searched(subject, samples(subject, "0.06")))
        if a.counterexample is not None
    ]
    monkeypatch.setattr(
        shared, "confirmed", lambda subject, box, labels, points: [None] * len(points)
    )
    answers = searched(subject, [samples(subject, "0.06")[i] for i in wrong])
    assert len(wrong) > 5 and all(a.verdict is Verdict.UNKNOWN for a in answers)


@pytest.mark.parametrize("some_bend", [False, True])
def test_a_tie_is_left_open_where_no_neuron_bends(some_bend: bool) -> None:
    """Two classes are equal everywhere: nothing to split, no proof, and no class is wrong."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(INPUTS, 6), nn.ReLU(), nn.Linear(6, 2)).requires_grad_(False)
    first, last = module[0], module[2]
    last.weight[1], last.bias[1] = last.weight[0], last.bias[0]
    x = torch.rand(2, INPUTS)
    first.bias.copy_(0.5 - first.weight @ x[0])  # far from zero at the first sample
    if some_bend:
        first.bias[0] = -first.weight[0] @ x[1]
    subject = Subject.of(module, (INPUTS,))
    labels = torch.zeros(2, dtype=torch.long)
    problems = [OpenProblem(p) for p in robustness(subject, Ball(x, Fraction("1e-4")), labels)]
    crown = STAGES["crown"].examine(subject, problems, StageSettings(), Deadline())
    for answer in [*crown, *searched(subject, problems)]:
        assert answer.verdict is Verdict.UNKNOWN
        assert answer.bound is not None and answer.bound <= 0
