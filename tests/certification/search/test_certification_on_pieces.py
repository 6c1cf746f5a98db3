"""Branch and bound over parts of the intervals of any activation."""

from __future__ import annotations

import pytest
import torch
from effort import mostly_slow
from test_certification_exact import agree
from torch import Tensor, nn

from tightrope.answer import Answer, Cause, Verdict
from tightrope.box import Box
from tightrope.certification.complete import bound_nodes, branch_and_bound
from tightrope.certification.problem import Choices, OpenProblem, Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refuter
from tightrope.certification.search.on_pieces import PieceSearch
from tightrope.certification.search.pooled import PoolSettings
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline

pytestmark = pytest.mark.usefixtures("one_thread")

RELUS = Choices(split="relu")
CLOSE = 0.05  # minima this close to zero may stay unknown: leaves have no linear programs here
REACH = 0.3
SETTINGS = PoolSettings(batch=64, iterations=10)


def search(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
    """Decide a problem of a ReLU network as if its activations were of any kind."""
    relaxation = bound_nodes(subject, opened)
    refuter = opened.problem.refuter(subject)
    pieces = PieceSearch(relaxation, opened.problem.unsafe, refuter, settings=SETTINGS)
    return pieces.run(deadline.end)


@pytest.mark.parametrize("part", mostly_slow(range(20), 2))
def test_answers_are_those_of_enumeration(part: int) -> None:
    seeds = range(50_000 + 4 * part, 50_004 + 4 * part)
    counts = agree(search, seeds, most=32, single=True, tiny=CLOSE)
    assert counts["verified"] >= 4 and counts["falsified"] >= 4


ACTIVATIONS = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


def smooth_network(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    activation = ACTIVATIONS[kind]
    module = nn.Sequential(
        *(nn.Linear(2, 6), activation(), nn.Linear(6, 6), activation(), nn.Linear(6, 1))
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)
    return module.double()


def grid(count: int = 301) -> Tensor:
    side = REACH * torch.linspace(-1, 1, count, dtype=torch.float64)
    return torch.cartesian_prod(side, side)


def above(value: float, module: nn.Module) -> tuple[Subject, Problem]:
    """Ask whether the output is above a value on a square."""
    subject = Subject.of(module, (2,))
    ones = torch.full((1, 2), REACH, dtype=torch.float64)
    row = torch.ones(1, 1, dtype=torch.float64)
    unsafe = Unsafe(row, row[0] * -value, torch.zeros(1, dtype=torch.long))

    def fails(point: Tensor) -> bool:
        return float(module(point[None]).detach()) <= value

    return subject, Problem(Box(-ones, ones), Box(-ones, ones), unsafe, fails)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("seed", mostly_slow(range(10), 1))
def test_what_is_true_of_smooth_networks_is_proved_and_nothing_else(kind: str, seed: int) -> None:
    module = smooth_network(kind, seed)
    with torch.no_grad():
        outputs = module(grid())
    least, spread = float(outputs.min()), float(outputs.max() - outputs.min())
    for value, verdict in (
        (least - 0.2 * spread, "verified"),
        (least + 0.01 * spread, "falsified"),
    ):
        subject, problem = above(value, module)
        found = branch_and_bound(subject, OpenProblem(problem), Deadline.after(60.0), RELUS)
        assert found.verdict == verdict or (seed > 0 and found.verdict == "unknown")
        if found.bound is not None:
            assert 0 < found.bound <= least - value + 1e-9


def test_minima_of_zero_are_not_proved() -> None:
    """The output of a tanh that is read twice is exactly zero, and its lines never say so."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)[:, :1] - torch.tanh(x)[:, :1]

    subject, problem = above(0.0, Twice().double())
    unrefuted = Problem(problem.outer, problem.inner, problem.unsafe, lambda point: False)
    found = branch_and_bound(subject, OpenProblem(unrefuted), Deadline.after(3.0), RELUS)
    assert found.verdict == "unknown" and found.cause in (Cause.TIME, Cause.TOO_CLOSE)
    assert found.subproblems > 1


def test_where_a_counterexample_is_known_no_other_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = smooth_network("tanh", 0)
    with torch.no_grad():
        outputs = module(grid())
    least, spread = float(outputs.min()), float(outputs.max() - outputs.min())
    subject, problem = above(least + 0.05 * spread, module)

    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("it was attacked again")

    monkeypatch.setattr(Refuter, "search", unwanted)
    found = branch_and_bound(subject, OpenProblem(problem), Deadline.after(60.0), RELUS)
    assert found.verdict is Verdict.FALSIFIED
