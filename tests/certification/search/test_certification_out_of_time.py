"""Searches that ran out of time before they began: nothing open is not nothing left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tightrope.box import Box
from tightrope.certification import complete
from tightrope.certification.problem import Choices, OpenProblem, Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.inputs import InputSearch
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.domains.pieces.bounder import PieceBounder

pytestmark = pytest.mark.usefixtures("one_thread")


def false_problem() -> tuple[Subject, Problem]:
    """The output is tanh(x) - 1, which is never positive; no point counts as a counterexample."""
    module = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
        module[2].bias.fill_(-1.0)
    ones = torch.ones(1, 2, dtype=torch.float64)
    row = torch.ones(1, 1, dtype=torch.float64)
    unsafe = Unsafe(row, 0 * row[0], torch.zeros(1, dtype=torch.long))
    box = Box(-ones, ones)
    return Subject.of(module, (2,)), Problem(box, box, unsafe, lambda point: False)


def once(method: Any) -> Any:
    """Run out of time at the first call."""
    calls: list[int] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OutOfTimeError
        return method(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    ("split", "owner", "method"),
    [
        ("input", InputSearch, "_look"),
        ("input", InputSearch, "_divide"),
        ("relu", PieceBounder, "improve"),
    ],
)
def test_a_search_that_did_not_begin_proves_nothing(
    split: str, owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, problem = false_problem()
    monkeypatch.setattr(owner, method, once(getattr(owner, method)))
    opened, choices = OpenProblem(problem), Choices(split=split)
    first = complete.root(subject, opened, Deadline.after(60.0), choices)
    assert first.verdict == "unknown"
    found = complete.branch_and_bound(subject, opened, Deadline.after(1.0), choices)
    assert found.verdict == "unknown"


def test_what_was_not_bounded_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, problem = false_problem()
    search = complete.input_search(subject, problem, None)
    monkeypatch.setattr(InputSearch, "_look", once(InputSearch._look))
    with pytest.raises(OutOfTimeError):
        search.begin()
    assert len(search.pool) == 1
    assert search.run(Deadline.after(1.0).end).verdict == "unknown"
