"""Problems at the edge: no width, no ReLUs, other activations, numbers that are not finite."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from handmade import network, rational_margin, records
from torch import Tensor, nn

from tightrope.answer import Answer, Verdict
from tightrope.box import Box
from tightrope.certification import properties
from tightrope.certification.cascade import solve
from tightrope.certification.complete import branch_and_bound
from tightrope.certification.problem import Choices, OpenProblem, Problem, robustness
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = ("ibp", "attack", "crown-ibp", "alpha", "bab")


def around(module: nn.Module, x: Tensor, eps: Fraction | str) -> tuple[Subject, Problem]:
    """Return the robustness of a module's own prediction."""
    subject = Subject.of(module, tuple(x.shape))
    label = subject.predict(x[None])
    (problem,) = robustness(subject, Ball(x[None], Fraction(eps)), label)
    return subject, problem


def decide(module: nn.Module, x: Tensor, eps: Fraction | str) -> Answer:
    subject, problem = around(module, x, eps)
    found = solve(subject, problem, timeout=60.0)
    if found.counterexample is not None:
        assert problem.fails(found.counterexample)
    return found


def single_row(subject: Subject, box: Box, offset: float, row: tuple[float, ...]) -> Problem:
    """Return the problem `row . output + offset <= 0`, of a float64 network."""
    matrix = torch.tensor([row], dtype=torch.float64)
    unsafe = Unsafe(matrix, torch.tensor([offset], dtype=torch.float64), torch.zeros(1).long())

    def fails(point: Tensor) -> bool:
        return float(matrix @ subject.outputs(point[None])[0]) + offset <= 0

    return Problem(box, box, unsafe, fails)


# --- what is unsafe -------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "classes"), [(0, 2), (1, 2), (2, 4)])
def test_misclassification_has_one_group_for_each_other_class(label: int, classes: int) -> None:
    unsafe = Unsafe.misclassification(label, classes, torch.device("cpu"))
    outputs = torch.arange(1.0, classes + 1, dtype=torch.float64) ** 2
    others = [i for i in range(classes) if i != label]
    expected = [float(outputs[label] - outputs[i]) for i in others]
    assert (unsafe.matrix @ outputs + unsafe.offset).tolist() == expected
    assert unsafe.group.tolist() == list(range(classes - 1))


def test_goals_of_groups_of_different_sizes() -> None:
    """A short group repeats its rows, which changes nothing: all of them have to be reached."""
    matrix = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    unsafe = Unsafe(matrix, torch.tensor([0.0, -1.0, 0.5]).double(), torch.tensor([0, 0, 1]))
    outputs = torch.tensor([[-1.0, 0.5], [-1.0, 0.5], [2.0, 0.0]], dtype=torch.float64)
    goal = unsafe.goal(torch.tensor([0, 1, 0]), torch.float64)
    assert goal(outputs).tolist() == [0.5, 0.0, -2.0]
    assert goal.reached(outputs).tolist() == [True, True, False]


# --- boxes ----------------------------------------------------------------------------------------


def test_groups_are_attacked_in_parts_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "GOAL_ENTRIES", 40)
    group = torch.tensor([0] * 9 + [1, 2, 3, 3, 4, 5, 6, 7])
    rows = torch.arange(2.0 * len(group)).view(-1, 2)
    unsafe = Unsafe(rows, rows[:, 0], group)
    parts = list(unsafe.parts(group.unique(), 3))
    assert torch.cat(parts).tolist() == list(range(8))
    for part in parts:
        goal = unsafe.goal(part, torch.float64)
        assert len(part) == 1 or (len(part) <= 3 and goal.matrix.numel() <= 40)
        for matrix, g in zip(goal.matrix, part.tolist(), strict=True):
            assert {tuple(row) for row in matrix.tolist()} == {
                tuple(row) for row in rows[group == g].tolist()
            }


@pytest.mark.parametrize("distance", [1e-3, 1e-9, 1e-14])
def test_a_box_without_width(distance: float) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    subject = Subject.of(module, (2,))
    point = torch.rand(1, 2, dtype=torch.float64)
    value = subject.outputs(point)[0, 0].item()
    box = Box(point, point)
    above = solve(subject, single_row(subject, box, distance - value, (1.0, 0.0)))
    assert above.verdict == "verified" and 0 < (above.bound or 0) <= distance * (1 + 1e-2)
    below = solve(subject, single_row(subject, box, -distance - value, (1.0, 0.0)))
    assert below.verdict == "falsified" and torch.equal(below.counterexample, point[0])


def test_a_partly_flat_box() -> None:
    net = network(([[1.0, 1.0], [1.0, -1.0]], [0.0, 0.0]), ([[1.0, 1.0], [0.0, 0.0]], [0.0, 0.5]))
    subject = Subject.of(net.double(), (2,))  # o_0 - o_1 = relu(x + y) + relu(x - y) - 1/2
    box = Box(torch.tensor([[0.0, -1.0]]).double(), torch.tensor([[0.0, 1.0]]).double())
    # Along x = 0 the sum is |y|: its minimum is zero.
    margin = (1.0, -1.0)
    assert solve(subject, single_row(subject, box, 0.5 + 1e-6, margin)).verdict == "verified"
    assert solve(subject, single_row(subject, box, 0.5 - 1e-6, margin)).verdict == "falsified"


def test_a_radius_that_covers_the_whole_range() -> None:
    """`o_0 - o_1 = x - 1/4`: everything within [0, 1] is in the ball of every point."""
    net = network(([[1.0]], [0.0]), ([[1.0], [0.0]], [0.0, 0.25]))
    for place in (1.0, 0.5):
        found = decide(net, torch.tensor([place]), "1")
        assert found.verdict == "falsified" and found.counterexample is not None
        assert 0 <= float(found.counterexample) <= 0.25
    above = network(([[1.0]], [0.0]), ([[1.0], [0.0]], [0.0, -0.25]))
    assert decide(above, torch.tensor([0.5]), "1").verdict == "verified"


def test_the_smallest_radius_is_still_a_ball() -> None:
    net = network(([[1.0]], [0.0]), ([[1.0], [0.0]], [0.0, 0.25]))
    assert decide(net, torch.tensor([0.5]), Fraction(1, 10**29)).verdict == "verified"


# --- networks that need no branching --------------------------------------------------------------


def test_linear_networks_are_decided_exactly() -> None:
    torch.manual_seed(1)
    verdicts = set()
    for _ in range(20):
        module = nn.Linear(4, 3)
        x = torch.rand(4)
        for eps in (Fraction(1, 1000), Fraction(1, 5)):
            found = decide(module, x, eps)
            subject, problem = around(module, x, eps)
            rows = (problem.unsafe.matrix @ module.weight.double()).detach()
            values = problem.unsafe.matrix @ subject.exact(x[None].double())[0]
            low, high = problem.outer.lower[0] - x, problem.outer.upper[0] - x
            worst = values + rows.clamp(min=0) @ low + rows.clamp(max=0) @ high
            exact = float(worst.min())
            verdicts.add(found.verdict)
            assert found.verdict == ("verified" if exact > 0 else "falsified")
            if found:
                assert 0 < found.bound <= exact + 1e-6
                assert found.bound <= exact + 1e-12
    assert verdicts == {"verified", "falsified"}


def test_stable_relus_need_no_branching() -> None:
    """One ReLU is always on, one always off: `o_0 - o_1 = x + 1 - 3/2`."""
    net = network(([[1.0], [-1.0]], [1.0, -2.0]), ([[1.0, 1.0], [0.0, 0.0]], [0.0, 1.5]))
    subject, problem = around(net, torch.tensor([0.75]), "1/5")
    answer = branch_and_bound(subject, OpenProblem(problem), Deadline.after(60.0))
    assert bool(answer) and answer.domains == 1
    assert answer.bound == pytest.approx(0.05, abs=1e-9)
    assert decide(net, torch.tensor([0.75]), "1/3").verdict == "falsified"


def test_a_relu_that_only_touches_zero() -> None:
    """The bend lies on the border of the box."""
    net = network(([[1.0], [-1.0]], [-0.5, 0.5]), ([[1.0, 1.0], [0.0, 0.0]], [0.25, 0.0]))
    for place in (0.25, 0.75):
        found = decide(net, torch.tensor([place]), "1/4")
        assert found.verdict == "verified" and found.bound == pytest.approx(0.25, abs=1e-9)


# --- other activations ----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(1.5)])
def test_other_activations_are_proved_or_refuted(activation: nn.Module) -> None:
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 6), activation, nn.Linear(6, 5), activation)
        module.append(nn.Linear(5, 3))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(5 if parameter.dim() > 1 else 0)
        x = torch.rand(3)
        found = decide(module, x, "1/20" if seed % 2 else "1/2")
        seen.add(found.verdict)
        if found:
            box = Ball(x[None], Fraction(1, 20) if seed % 2 else Fraction(1, 2)).inner()
            points = box.lower + torch.rand(2000, 3) * (box.upper - box.lower)
            with torch.no_grad():
                assert (module(points).argmax(1) == module(x[None]).argmax(1)).all()
        else:
            assert found.verdict == "falsified", "three inputs are few enough to be split"
    assert "verified" in seen


def wave() -> nn.Sequential:
    """Return a wave of sigmoids that lines cannot prove, though it never comes down to zero."""
    module = nn.Sequential(nn.Linear(1, 8), nn.Sigmoid(), nn.Linear(8, 2)).eval()
    with torch.no_grad():
        module[0].weight.fill_(40.0)
        module[0].bias.copy_(-40 * torch.linspace(0.1, 0.9, 8))
        module[2].weight.zero_()
        module[2].weight[0].copy_(torch.tensor([1.0, -1.0] * 4))
        module[2].bias.copy_(torch.tensor([0.05, 0.0]))
        assert (module(torch.linspace(0, 1, 5000)[:, None]).argmax(1) == 0).all()
    return module


def test_what_lines_cannot_prove_of_sigmoids_splits_of_the_input_do() -> None:
    module, x = wave(), torch.tensor([0.5])
    (record,) = records(module, x[None], [0], "1/2", stages=("alpha",))
    assert record.verdict == "unknown" and record.margin is not None and record.margin < 0
    (record,) = records(module, x[None], [0], "1/2", stages=EVERY)
    assert (record.verdict, record.stage) == ("verified", "bab")


def test_parts_of_what_sigmoids_see_are_searched() -> None:
    subject, problem = around(wave(), torch.tensor([0.5]), "1/2")
    found = branch_and_bound(subject, OpenProblem(problem), Deadline.after(3.0), Choices("relu"))
    assert found.verdict != "falsified" and found.subproblems > 2


def test_max_pools() -> None:
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        module = nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)
        )
        x = torch.rand(1, 3, 3)
        eps = Fraction(1, [50, 10, 4, 2][seed % 4])
        found = decide(module, x, eps)
        seen.add(found.verdict)
        box = Ball(x[None], eps).inner()
        points = box.lower + torch.rand(3000, 1, 3, 3) * (box.upper - box.lower)
        with torch.no_grad():
            same = (module(points).argmax(1) == module(x[None]).argmax(1)).all()
        assert same or not found
    assert {"verified", "falsified"} <= seen


# --- numbers that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["1.weight", "1.bias", "3.weight", "3.bias"])
@pytest.mark.parametrize("stage", ["ibp", "crown-ibp", "alpha", "bab"])
def test_weights_that_are_not_finite_prove_nothing(stage: str, where: str, bad: float) -> None:
    net = network(([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0]), ([[1.0, 0.0], [0.0, 0.0]], [0.0, -1.0]))
    x = torch.tensor([[0.75, 0.5], [0.0, 0.0]])
    assert [r.verdict for r in records(net, x, [0, 0], "1/100", stages=(stage,))] == [
        "verified",
        "verified",
    ]
    with torch.no_grad():
        net.get_parameter(where).view(-1)[0] = bad
    for label in (0, 1):
        for record in records(net, x, [label, label], "1/100", stages=(stage,)):
            assert record.verdict != "verified"
            assert record.verdict == "unknown" or record.prediction != label


def test_bounds_that_overflow_prove_nothing() -> None:
    """Ten layers of 2^120 leave float64; `inf - inf` must not look like a proof."""
    huge = 2.0**120
    hidden = ([[huge, -huge], [-huge, huge]], [0.0, 0.0])
    net = network(*[hidden] * 10, ([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0]))
    x = torch.tensor([[0.75, 0.75]])
    assert rational_margin(net, [0.75, 0.75], 0) > 0 > rational_margin(net, [0.7, 0.8], 0)
    for stage in ("ibp", "crown-ibp", "alpha"):
        (record,) = records(net, x, [0], "1/10", stages=(stage,))
        assert record.verdict != "verified"
    subject, problem = around(net, x[0], "1/10")
    assert not branch_and_bound(subject, OpenProblem(problem), Deadline.after(2.0))


def test_an_undefined_output_is_never_verified() -> None:
    """The exact margin is 2^130, but what the network computes is NaN."""
    big = 2.0**127
    net = network(
        ([[0.0], [0.0]], [big, big]),
        ([[16.0, 0.0], [0.0, 8.0]], [0.0, 0.0]),
        ([[1.0, -1.0], [-1.0, 1.0]], [0.0, 0.0]),
    )
    assert rational_margin(net, [0.5], 0) > 0
    for stages in (("crown-ibp",), ("alpha",), ("bab",), EVERY):
        (record,) = records(net, torch.tensor([[0.5]]), [0], "1/100", stages=stages)
        assert record.verdict != Verdict.VERIFIED
