"""Counterexamples: inside the box, confirmed by the original network, and none is missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from handmade import network
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refuter
from tightrope.certification.subjects import Subject

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = torch.zeros(1, dtype=torch.long)


def refuter(
    net: nn.Sequential, fails: Callable[[Tensor], bool] | None = None, *, label: int = 1
) -> Refuter:
    """Return the refuter of a network of one input on [1/4, 3/4]."""
    subject = Subject.of(net, (1,))
    box = Box(torch.tensor([[0.25]]), torch.tensor([[0.75]]))
    unsafe = Unsafe.misclassification(label, 2, torch.device("cpu"))

    def misses(point: Tensor) -> bool:
        return int(subject.predict(point[None])[0]) != label

    return Refuter(subject, box, unsafe, fails or misses)


def level(difference: float) -> nn.Sequential:
    """Return the network with `o_1 - o_0 = difference` everywhere."""
    return network(([[0.0]], [0.0]), ([[0.0], [0.0]], [0.0, difference]))


def rising() -> nn.Sequential:
    """Return the network with `o_1 - o_0 = 3/4 - x`: class 1 loses at the right end only."""
    return network(([[1.0]], [0.0]), ([[1.0], [0.0]], [0.0, 0.75]))


def test_a_tie_that_the_network_loses_is_a_counterexample() -> None:
    """Both outputs are equal everywhere, and argmax takes the first."""
    refute = refuter(level(0.0))
    assert refute(torch.tensor([[0.5]]), GROUP) is not None
    assert refute.search(steps=2, restarts=1) is not None


def test_a_climb_that_ends_in_a_tie_is_a_counterexample() -> None:
    found = refuter(rising())(torch.tensor([[0.5]]), GROUP)
    assert found is not None and found.item() == 0.75


def test_the_original_network_has_the_last_word() -> None:
    asked: list[Tensor] = []

    def never(point: Tensor) -> bool:
        asked.append(point)
        return False

    refute = refuter(level(-1.0), never)
    assert refute(torch.tensor([[0.5]]), GROUP) is None
    assert refute.search(steps=2, restarts=1) is None
    assert asked


def test_points_are_brought_into_the_box() -> None:
    found = refuter(rising())(torch.tensor([[7.0]]), GROUP)
    assert found is not None and found.item() == 0.75


@pytest.mark.parametrize("bad", [0.0, 0.76, float("nan"), float("inf")])
def test_nothing_outside_of_the_box_is_confirmed(bad: float) -> None:
    refute = refuter(level(-1.0), lambda point: True)
    assert refute._confirm(torch.tensor([[bad]]), 1) is None
    found = refute._confirm(torch.tensor([[bad], [0.5]]), 2)
    assert found is not None and found.item() == 0.5


def test_only_so_many_points_are_confirmed_as_are_promising() -> None:
    refute = refuter(level(1.0), lambda point: True)
    assert refute._confirm(torch.tensor([[0.5]]), 0) is None


class Overflowing(nn.Module):
    """Class 0 wins from `x = 0.3` on down; beyond 1/2, outputs are infinity minus infinity."""

    def forward(self, x: Tensor) -> Tensor:
        large = 1e38 * torch.relu(x - 0.5) * 1e38
        return torch.cat((torch.zeros_like(x), x - 0.3), 1) + (large - 2 * large)


def overflowing(fails: Callable[[Tensor], bool]) -> Refuter:
    subject = Subject.of(Overflowing(), (1,))
    box = Box(torch.tensor([[0.25]]), torch.tensor([[0.75]]))
    return Refuter(subject, box, Unsafe.misclassification(1, 2, torch.device("cpu")), fails)


def test_points_without_a_score_do_not_hide_those_with_one() -> None:
    """Twenty points without an answer, which does not count as a failure, and one that fails."""
    refute = overflowing(lambda point: float(point) <= 0.3)
    points = torch.cat((torch.linspace(0.6, 0.75, 20), torch.tensor([0.26])))[:, None]
    assert bool(refute.subject.outputs(points[:20]).isnan().all())
    found = refute(points, GROUP.repeat(21))
    assert found is not None and found.item() <= 0.3
    found = refute(points.where(points > 0.5, 0.45), GROUP.repeat(21))  # it has to climb
    assert found is not None and found.item() <= 0.3


def test_points_without_an_answer_are_tried_where_that_is_a_failure() -> None:
    refute = overflowing(lambda point: float(point) > 0.5)
    found = refute(torch.tensor([[0.6]]), GROUP)
    assert found is not None and found.item() > 0.5
