"""Signs that a network tests: searches of their own find them out."""

from __future__ import annotations

import pytest
import torch
from effort import mostly_slow
from torch import Tensor, nn

from tightrope.answer import Answer, Cause, Verdict
from tightrope.box import Box
from tightrope.certification.complete import bound_nodes, branch_and_bound
from tightrope.certification.problem import Choices, OpenProblem, Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.signs import SignSearch
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.linear.crown import CROWN_IBP

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = 8  # numbers that are compared with zero
CLEAR = 0.02  # signs that are closer to the other one need not be found out


class Counting(nn.Module):
    """Counts which of some numbers are positive, and adds a little of one of them."""

    def __init__(self, activation: type[nn.Module], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = (nn.Linear(2, 8), activation(), nn.Linear(8, 8), activation())
        self.body = nn.Sequential(*layers, nn.Linear(8, PARTS)).double()
        with torch.no_grad():
            for parameter in self.body.parameters():
                parameter.mul_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) > 0).to(x.dtype).sum(1, keepdim=True)


def grid(reach: float, count: int = 301) -> Tensor:
    side = reach * torch.linspace(-1, 1, count, dtype=torch.float64)
    return torch.cartesian_prod(side, side)


def at_least(value: float, module: Counting, reach: float) -> tuple[Subject, Problem]:
    """Ask whether at least so many numbers are positive on a square."""
    subject = Subject.of(module, (2,))
    ones = torch.full((1, 2), reach, dtype=torch.float64)
    row = torch.ones(1, 1, dtype=torch.float64)
    unsafe = Unsafe(row, row[0] * (0.5 - value), torch.zeros(1, dtype=torch.long))

    def fails(point: Tensor) -> bool:
        return float(module(point[None]).detach()) < value

    return subject, Problem(Box(-ones, ones), Box(-ones, ones), unsafe, fails)


def search(subject: Subject, problem: Problem, seconds: float = 60.0) -> tuple[Answer, int]:
    """Search for signs after bounds that leave many open; also return how many these are."""
    relaxation = bound_nodes(subject, OpenProblem(problem), CROWN_IBP)
    signs = SignSearch(relaxation, problem.unsafe, problem.refuter(subject))
    before = len(signs.open())
    return signs.run(Deadline.after(seconds).end), before


def known_counts(module: Counting, reach: float) -> tuple[int, int, bool]:
    """Return how many are positive everywhere and at the worst point, and whether that is clear."""
    with torch.no_grad():
        values = module.body(grid(reach))
    always = values.amin(0) > 0
    near = (values.amin(0).abs() < CLEAR) | (values.amax(0).abs() < CLEAR)
    return int(always.sum()), int((values > 0).sum(1).min()), not bool(near.any())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("seed", mostly_slow(range(60), 6))
def test_counts_that_signs_decide_are_proved_and_no_others(
    activation: type[nn.Module], seed: int
) -> None:
    module, reach = Counting(activation, seed), 0.4
    always, worst, clear = known_counts(module, reach)
    seconds = 60.0 if clear else 3.0  # others may be too close for any search
    found, before = search(*at_least(always, module, reach), seconds=seconds)
    assert found.verdict is Verdict.VERIFIED or not clear or before == 0
    found, _ = search(*at_least(worst + 1, module, reach), seconds=3.0)
    assert found.verdict is not Verdict.VERIFIED
    if found.counterexample is not None:
        with torch.no_grad():
            assert float(module(found.counterexample[None])) < worst + 1


def test_some_signs_are_open_before() -> None:
    """The test above is about something."""
    counts = [search(*at_least(0, Counting(nn.ReLU, seed), 0.4), 0.01)[1] for seed in range(6)]
    assert sum(count > 0 for count in counts) >= 3


def test_where_time_is_over_nothing_is_said() -> None:
    found, before = search(*at_least(PARTS, Counting(nn.ReLU, 1), 0.4), 0.0)
    assert before > 0
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.TIME


def test_the_search_by_pieces_goes_on_with_signs() -> None:
    """What it cannot cut any further is decided by signs."""
    module = Counting(nn.ReLU, 3)
    always, _, _ = known_counts(module, 0.4)
    subject, problem = at_least(always, module, 0.4)
    opened = OpenProblem(problem)
    bound_nodes(subject, opened, CROWN_IBP)
    found = branch_and_bound(subject, opened, Deadline.after(60.0), Choices(split="relu"))
    assert found.verdict is Verdict.VERIFIED
