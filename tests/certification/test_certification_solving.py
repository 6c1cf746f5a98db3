"""One problem from beginning to end, as `solve` and `tr.verify` decide it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from handmade import blind_spot, network
from instances import draw_instance
from torch import Tensor, nn

from tightrope.answer import Answer, Cause, Verdict, falsified, undecided, verified
from tightrope.box import Box
from tightrope.certification import complete, verifying
from tightrope.certification.cascade import solve, walk
from tightrope.certification.complete import NOT_BOUNDED, branch_and_bound, mixed_integer_program
from tightrope.certification.problem import Choices, OpenProblem, Problem, robustness
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.refutation import Refuter
from tightrope.certification.stages import Stage, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.certification.verifying import verify
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.errors import UserError
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


def hard_problem() -> tuple[nn.Sequential, Tensor]:
    """Return a robust network that takes long to prove, and an input."""
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50)),
        *(nn.ReLU(), nn.Linear(50, 2)),
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
        outputs = module(torch.rand(10_000, 16))
        margins = outputs[:, 0] - outputs[:, 1]
        module[6].bias[0] += 2 * margins.amax() - 3 * margins.amin()
    return module, torch.full((16,), 0.5)


@pytest.fixture
def patient_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the network be bounded however late it is: only the search runs out of time."""
    monkeypatch.setattr(complete, "until", lambda deadline: nullcontext())


# --- answers --------------------------------------------------------------------------------------


def test_each_way_to_an_answer() -> None:
    net, x = blind_spot(), torch.tensor([0.875, 1.0])
    found = verify(net, x, 0, eps="1/10")
    assert found and (found.verdict, found.stage) == ("verified", "crown-ibp")
    # The margin is x - 1/2, of which cancelling terms leave no doubt to linear bounds.
    assert found.bound == pytest.approx(0.275, abs=1e-6) and found.bound <= 0.2750001
    assert found.counterexample is None and not found.reason and found.seconds > 0
    found = verify(net, torch.tensor([0.5625, 0.0]), 0, eps="1/10")
    assert not found and (found.verdict, found.stage) == ("falsified", "quick")
    assert found.counterexample is not None and found.bound is None
    found = verify(net, torch.tensor([0.25, 0.0]), 0, eps="1/10")
    assert (found.verdict, found.stage) == ("falsified", "natural")
    assert torch.equal(found.counterexample, torch.tensor([0.25, 0.0]))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_verified_is_true(verdict: Verdict) -> None:
    assert bool(Answer(verdict, "bab", 0.0)) == (verdict is Verdict.VERIFIED)


def test_branching_is_counted() -> None:
    """On the unit square `|x - y| + |x + y - 1|` is at most 1; lines alone say 2."""
    net = network(
        ([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]], [0.0, 0.0, -1.0, 1.0]),
        ([[-1.0, -1.0, -1.0, -1.0], [0.0] * 4], [1 + 2.0**-7, 0.0]),
    )
    found = verify(net, torch.tensor([0.5, 0.5]), 0, eps="1/2")
    assert (found.verdict, found.stage) == ("verified", "bab")
    assert found.domains > 1 and 0 < (found.bound or 0) <= 2.0**-7


def test_out_of_time_is_unknown() -> None:
    module, x = hard_problem()
    found = verify(module, x, 0, eps="1/2", timeout=0.3)
    assert found.verdict == "unknown" and not found
    assert found.reason.startswith("time: ")
    assert found.counterexample is None


def test_a_search_without_time_says_how_far_it_came(patient_bounds: None) -> None:
    module, x = hard_problem()
    subject = Subject.of(module, (16,))
    (problem,) = robustness(subject, Ball(x[None], Fraction(1, 2)), torch.tensor([0]))
    answer = branch_and_bound(subject, OpenProblem(problem), Deadline.after(-1.0), Choices("relu"))
    assert answer.reason.startswith("time: lowest bound") and "unstable neurons" in answer.reason


@pytest.mark.parametrize("method", [branch_and_bound, mixed_integer_program])
def test_a_deadline_in_the_past_gives_no_verdict(method) -> None:  # type: ignore[no-untyped-def]
    module, x = hard_problem()
    subject = Subject.of(module, (16,))
    (problem,) = robustness(subject, Ball(x[None], Fraction(1, 2)), torch.tensor([0]))
    answer = method(subject, OpenProblem(problem), Deadline.after(-1.0))
    assert not answer and answer.counterexample is None
    assert answer.reason == f"time: {NOT_BOUNDED}"


def test_attacks_end_with_their_time() -> None:
    """The clock is looked at before each evaluation; nothing depends on how fast they are."""
    module, x = hard_problem()
    subject = Subject.of(module, tuple(x.shape))
    (problem,) = robustness(subject, Ball(x[None], Fraction(1, 10)), torch.tensor([0]))
    refuter = Refuter(subject, problem.inner, problem.unsafe, problem.fails)
    looks = []

    class Passing(Deadline):
        def check(self) -> None:
            looks.append(1)
            if len(looks) > 5:
                raise OutOfTimeError

    assert refuter.search(steps=10**6, restarts=10**6, deadline=Passing()) is None
    assert len(looks) == 6


def test_unfinished_searches_claim_no_bound(patient_bounds: None) -> None:
    for seed in range(200, 212):
        instance = draw_instance(seed, most=128)
        problem = instance.problem(1e-3 - instance.minima)
        for split in ("relu", "input"):
            answer = branch_and_bound(
                instance.subject, OpenProblem(problem), Deadline.after(-1.0), Choices(split)
            )
            # What float32 says of open subproblems proves nothing; boxes are bounded strictly.
            if not answer and answer.bound is not None:
                assert split == "input" and answer.bound <= 1e-3
            assert answer.counterexample is None


# --- repeatable, and without traces ---------------------------------------------------------------


def test_the_same_seed_gives_the_same_answer() -> None:
    torch.manual_seed(5)
    module, x = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)), torch.rand(6)
    label = int(module(x[None]).argmax())
    first, second = (verify(module, x, label, eps="1/2", seed=3) for _ in range(2))
    torch.manual_seed(77)
    third = verify(module, x, label, eps="1/2", seed=3)
    assert first.verdict == second.verdict == third.verdict == "falsified"
    assert torch.equal(first.counterexample, second.counterexample)
    assert torch.equal(first.counterexample, third.counterexample)


def test_neither_random_numbers_nor_the_module_change() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).train()
    module[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    for label in (0, 1):
        verify(module, torch.full((3,), 0.5), label, eps="1/10")
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.training for layer in module] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_dropout_and_batch_statistics_are_those_of_inference() -> None:
    module = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Dropout(0.9), nn.Linear(2, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module[2].bias.copy_(torch.tensor([1.0, 0.0]))
    assert verify(module.train(), torch.tensor([0.5]), 0, eps="1/10").verdict == "verified"


def test_solve_and_verify_are_the_same() -> None:
    net, x = blind_spot(), torch.tensor([0.875, 1.0])
    subject = Subject.of(net, (2,))
    (problem,) = robustness(subject, Ball(x[None], Fraction(1, 10)), torch.tensor([0]))
    alone = solve(subject, problem)
    for network_form in (net, trace(net, (2,))):
        found = verify(network_form, x.clone().requires_grad_(), torch.tensor(0), eps=0.1)
        assert (found.verdict, found.bound) == (alone.verdict, alone.bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_precision(dtype: torch.dtype) -> None:
    net, x = blind_spot().to(dtype), torch.tensor([0.875, 1.0], dtype=dtype)
    assert verify(net, x, 0, eps="1/10").verdict == "verified"
    found = verify(net, x, 0, eps="1/2")
    assert found.verdict == "falsified" and found.counterexample is not None
    assert found.counterexample.dtype == dtype


# --- refusals -------------------------------------------------------------------------------------

X = torch.full((2,), 0.5)
REFUSED = {
    "label": (X, {"label": 2}, "label must be one of 0 to 1, got 2"),
    "negative label": (X, {"label": -1}, "label must be one of 0 to 1"),
    "eps": (X, {"eps": 0}, "eps must lie in"),
    "large eps": (X, {"eps": "3/2"}, "eps must lie in"),
    "word": (X, {"eps": "small"}, "eps must be a number"),
    "timeout": (X, {"timeout": 0}, "timeout must be a positive number"),
    "endless": (X, {"timeout": float("inf")}, "timeout must be a positive number"),
    "nan": (torch.tensor([0.5, float("nan")]), {}, "x must lie in"),
    "range": (torch.tensor([0.5, 1.5]), {}, "x must lie in"),
    "precision": (X.double(), {}, "x must be torch.float32"),
    "integers": (torch.tensor([0, 1]), {}, "x must be of a floating-point type"),
    "shape": (torch.full((3,), 0.5), {}, "shape"),
    "batch": (X.view(1, 1, 2), {}, "batch dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    x, options, message = REFUSED[name]
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(UserError, match=message) as caught:
        verify(net, x, **{"label": 0, "eps": 0.1, **options})
    assert "\n" not in str(caught.value)


def test_a_graph_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match="x has shape"):
        verify(trace(nn.Linear(3, 2), (3,)), X, 0, eps=0.1)


def test_one_class_is_no_classification() -> None:
    with pytest.raises(UserError, match="at least two classes"):
        verify(nn.Linear(2, 1), X, 0, eps=0.1)


# --- several input boxes ------------------------------------------------------------------------

VERIFIED, FALSIFIED, UNKNOWN = verified(0.5), falsified(torch.zeros(1)), undecided(Cause.TIME)


def decide_boxes(answers: Sequence[Answer], seconds: float = math.inf) -> tuple[Answer, int | None]:
    """Return what boxes come to together, by what is said of each, and the one it is about."""
    cases: Any = [SimpleNamespace(number=i, unsafe=()) for i in range(len(answers))]
    said: Any = lambda subject, network, case, *rest: answers[case.number]  # noqa: E731
    nothing: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "_decide_case", said)
        found, case = verifying._decide_cases(
            *(nothing, nothing, SimpleNamespace(cases=cases), Deadline.after(seconds)),
            *(0, Choices("relu")),
        )
    return found, None if case is None else cast("Any", case).number


EVERY = list(itertools.product((VERIFIED, FALSIFIED, UNKNOWN), repeat=3))


@pytest.mark.parametrize("answers", EVERY)
def test_boxes_are_verified_if_all_of_them_are(answers: tuple[Answer, ...]) -> None:
    found, number = decide_boxes(answers)
    if FALSIFIED in answers:
        assert found.verdict is Verdict.FALSIFIED and number == answers.index(FALSIFIED)
    elif UNKNOWN in answers:
        assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.TIME
        assert found.bound is None and number is None
    else:
        assert found.verdict is Verdict.VERIFIED and found.bound == 0.5


def test_boxes_that_nobody_looked_at_are_not_verified() -> None:
    found, _ = decide_boxes([VERIFIED] * 3, seconds=-1.0)
    assert found.verdict is Verdict.UNKNOWN and found.details == verifying.NO_TIME


# --- randomness ---------------------------------------------------------------------------------


def test_what_is_known_already_does_not_change_what_follows() -> None:
    def draw(*_: object) -> list[Answer]:
        return [falsified(torch.rand(1))]

    def points(skip: tuple[int, ...]) -> dict[int, float]:
        torch.manual_seed(0)
        unlabelled = cast("Any", SimpleNamespace(label=None))
        problems: Any = [OpenProblem(unlabelled) for _ in range(4)]
        stages = {"attack": Stage(draw, single=True)}
        subject, settings = cast("Any", None), StageSettings()
        return {
            i: float(cast("Tensor", answer.counterexample))
            for i, answer in walk(subject, problems, stages, settings, skip)
        }

    whole = points(())
    assert len(set(whole.values())) == 4
    assert points((0, 2)) == {i: whole[i] for i in (1, 3)}


@pytest.mark.parametrize("stage", ["ibp", "crown", "alpha", "bab", "milp"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_bound_of_an_open_problem_is_one_of_all_groups(
    stage: str, order: tuple[int, int]
) -> None:
    """|x| - 1/2 and |x| - 2 are both negative at zero, and no point may say so."""
    hidden = ([[1.0, 0.0], [-1.0, 0.0]], [0.0, 0.0])
    module = network(hidden, ([[1.0, 1.0], [0.0, 0.0]], [0.0, 0.0]))
    corners = (torch.tensor([[low, low]], dtype=torch.float64) for low in (-1.0, 1.0))
    box, offset = Box(*corners), torch.tensor([-0.5, -2.0], dtype=torch.float64)[list(order)]
    matrix = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    unsafe = Unsafe(matrix, offset, torch.arange(2))
    problem = Problem(box, box.map(torch.Tensor.float), unsafe, lambda point: False)
    found = solve(
        Subject.of(module, (2,)),
        problem,
        stages=(stage,),
        choices=Choices(split="relu"),
    )
    assert found.verdict is Verdict.UNKNOWN
    assert found.bound is None or found.bound <= -2
