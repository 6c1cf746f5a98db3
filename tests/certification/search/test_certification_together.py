"""Many problems of one network in one search."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tightrope.answer import Cause, Verdict
from tightrope.box import Box
from tightrope.certification.problem import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.together import alike, decide_together
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline

pytestmark = pytest.mark.usefixtures("one_thread")


def many_problems(
    margins: list[float], seed: int, activation: type[nn.Module] = nn.ReLU
) -> tuple[Subject, list[Problem]]:
    """Return problems on neighbouring boxes whose smallest row is about the given margin."""
    torch.manual_seed(seed)
    layers = (nn.Linear(3, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 2))
    module = nn.Sequential(*layers)
    subject = Subject.of(module.double(), (3,))
    problems = []
    for k, margin in enumerate(margins):
        lower = torch.tensor([[0.2 * k, -0.3, 0.5]], dtype=torch.float64)
        box = Box(lower, lower + torch.tensor([0.2, 0.4, 0.0], dtype=torch.float64))
        outputs = subject.outputs(box.sample(4000)[0])
        matrix = torch.tensor([[1.0, 0.5], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
        lowest = (outputs @ matrix.T).amin(0)
        offset = margin - lowest
        unsafe = Unsafe(matrix, offset, torch.arange(3))

        def fails(point: Tensor, unsafe: Unsafe = unsafe) -> bool:
            rows = unsafe.matrix @ subject.outputs(point[None])[0] + unsafe.offset
            return float(rows.min()) <= 0

        problems.append(Problem(box, box, unsafe, fails))
    return subject, problems


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_many_problems_are_decided_together(activation: type[nn.Module], seed: int) -> None:
    subject, problems = many_problems([0.1] * 6, seed, activation)
    assert alike(problems)
    found = decide_together(subject, problems, Deadline())
    assert found is not None
    answer, _ = found
    assert answer.verdict is Verdict.VERIFIED, answer.reason
    assert answer.bound is not None and answer.bound <= 0.1
    subject, problems = many_problems([0.1, 0.1, 0.1, -0.005, 0.1], seed, activation)
    found = decide_together(subject, problems, Deadline())
    assert found is not None
    answer, number = found
    assert answer.verdict is Verdict.FALSIFIED and number == 3
    assert answer.counterexample is not None and problems[3].fails(answer.counterexample)
    assert bool(problems[3].inner.contains(answer.counterexample[None])[0])


def test_signs_of_neurons_are_those_of_all_boxes() -> None:
    """A ReLU is the identity on the first box and zero on the second, where the row is -1/2."""
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    for parameter in module.parameters():
        nn.init.constant_(parameter, float(parameter.dim() == 2))
    problems = []
    for low, high, offset in ((1.0, 2.0, 2.5), (-1.0, -1.0, -0.5)):
        corners = (torch.tensor([[x]], dtype=torch.float64) for x in (low, high))
        box, sign = Box(*corners), torch.tensor([[-1.0]], dtype=torch.float64)
        unsafe = Unsafe(sign, torch.tensor([offset], dtype=torch.float64), torch.arange(1))
        problems.append(Problem(box, box, unsafe, lambda point: False))  # none is recognised
    found = decide_together(Subject.of(module, (1,)), problems, Deadline())
    assert found is not None and found[0].verdict is Verdict.UNKNOWN
    assert found[0].cause is Cause.TOO_CLOSE


def test_each_row_of_each_problem_has_its_own_offset() -> None:
    """The rows are 1 and 3, less 1.5 and 0 in the second problem: the first row is below zero."""
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    for parameter in module.parameters():
        nn.init.constant_(parameter, float(parameter.dim() == 2))
    problems = []
    for offset in ((0.0, 0.0), (-1.5, 0.0)):
        point = torch.ones(1, 1, dtype=torch.float64)
        matrix = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
        unsafe = Unsafe(matrix, torch.tensor(offset, dtype=torch.float64), torch.arange(2))
        problems.append(Problem(Box(point, point), Box(point, point), unsafe, lambda point: False))
    for number, verdict in ((1, Verdict.VERIFIED), (2, Verdict.UNKNOWN)):
        chosen = [problems[0], problems[number - 1]]
        found = decide_together(Subject.of(module, (1,)), chosen, Deadline())
        assert found is not None and found[0].verdict is verdict


def test_problems_that_differ_are_not_decided_together() -> None:
    _, problems = many_problems([0.1] * 4, 0)
    other = problems[0].unsafe
    changed = Unsafe(2 * other.matrix, other.offset, other.group)
    assert not alike(problems[:3])
    assert not alike([*problems[:3], Problem(problems[3].outer, problems[3].inner, changed, bool)])
