"""Raids: they find what climbing does not, when they are due, and disturb nothing."""

from __future__ import annotations

import time

import pytest
import torch
from handmade import network
from torch import Tensor

from tightrope.box import Box
from tightrope.certification.properties import Unsafe
from tightrope.certification.raids import FIRST, LATER, LEAST, SHARE, Raids, raid_is_due
from tightrope.certification.refutation import Refuter
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline

pytestmark = pytest.mark.usefixtures("one_thread")

POINT, GROUP = torch.tensor([[0.5]]), torch.zeros(1, dtype=torch.long)


def misleading(*, deep: float) -> Refuter:
    """Return the refuter of class 1 on [1/4, 3/4]: `o_1 - o_0 = x + 2 - deep * max(x - 11/16, 0)`.

    Wherever x is below 11/16, the margin falls to the left; class 1 loses at the right end only.
    """
    net = network(([[1.0], [1.0]], [0.0, -0.6875]), ([[10.0, 0.0], [11.0, -deep]], [0.0, 2.0]))
    subject = Subject.of(net, (1,))
    box = Box(torch.tensor([[0.25]]), torch.tensor([[0.75]]))

    def misses(point: Tensor) -> bool:
        return int(subject.predict(point[None])[0]) != 1

    return Refuter(subject, box, Unsafe.misclassification(1, 2, torch.device("cpu")), misses)


def due(refuter: Refuter, *, credit: float = 10.0) -> Raids:
    """Return raids of a search that began long ago."""
    passed = max(credit / SHARE, (credit - 1.0) / LATER)
    return Raids(refuter, began=time.monotonic() - passed)


def test_raids_find_what_climbing_does_not() -> None:
    refuter = misleading(deep=60.0)
    assert refuter(POINT, GROUP) is None
    found = due(refuter)(POINT, GROUP)
    assert found is not None and refuter.fails(found) and 0.6875 < found.item() <= 0.75


def test_raids_that_find_nothing_end() -> None:
    raids = due(misleading(deep=1.0), credit=2 * LEAST)
    started = time.monotonic()
    assert raids(POINT, GROUP) is None
    assert raids.number > 0 and raids.spent <= time.monotonic() - started
    assert not raids.due


def test_the_first_questions_are_not_followed_by_raids() -> None:
    raids = Raids(misleading(deep=60.0))
    assert not raid_is_due(raids)
    assert raids(POINT, GROUP) is None and raids.number == 0


def test_only_raids_are_ever_due() -> None:
    refuter = misleading(deep=60.0)
    assert raid_is_due(due(refuter)) and not raid_is_due(refuter)


def test_random_numbers_of_the_search_stay_as_they_are() -> None:
    raids = due(misleading(deep=1.0), credit=2 * LEAST)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert raids(POINT, GROUP) is None and raids.number > 0
    assert torch.equal(torch.rand(4), expected)


def test_raids_without_time_come_with_fewer_points_and_later() -> None:
    raids = due(misleading(deep=60.0))
    for _ in range(10):
        assert raids.raid(GROUP, Deadline.after(-1.0)) is None
    assert FIRST > raids.count == 1 and raids.least > LEAST


def test_what_was_asked_lately_is_attacked() -> None:
    """The property has two groups; only the one that was asked about before can be refuted."""
    plain = misleading(deep=60.0)
    matrix = torch.cat((torch.zeros_like(plain.unsafe.matrix), plain.unsafe.matrix))
    offset = torch.cat((torch.ones_like(plain.unsafe.offset), plain.unsafe.offset))
    unsafe = Unsafe(matrix, offset, torch.tensor([0, 1]))
    raids = due(Refuter(plain.subject, plain.inner, unsafe, plain.fails))
    assert raids(POINT, GROUP) is None
    raids = due(raids.refuter)
    raids.asked.append(GROUP + 1)
    assert raids(POINT, GROUP) is not None
