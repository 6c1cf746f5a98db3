"""When the PGD loop stops, and that it leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pgd_helpers import GOALS, Spy, attack, batch, network
from torch import Tensor

from tightrope.attacks import CrossEntropy, Goal, Margin, Steps, misclassified, pgd
from tightrope.box import Box

pytestmark = pytest.mark.usefixtures("one_thread")


# --- stopping ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracked:
    """A goal that writes down which samples it found broken, by their place in the batch."""

    goal: Goal
    places: Tensor
    broken: set[int]

    def __call__(self, logits: Tensor) -> Tensor:
        return self.goal(logits)

    def reached(self, logits: Tensor) -> Tensor:
        reached = self.goal.reached(logits)
        self.broken.update(self.places[reached].tolist())
        return reached

    def select(self, index: Tensor) -> Tracked:
        return Tracked(self.goal.select(index), self.places[index], self.broken)


@pytest.mark.parametrize("goal", GOALS)
def test_stopped_samples_are_broken(goal: str) -> None:
    """Whoever leaves the batch is handed back with a point that breaks it."""
    _, graph = network(dtype=torch.float64)
    x, labels = batch(100, dtype=torch.float64)
    tracked = Tracked(GOALS[goal](labels), torch.arange(100), set())
    spy = Spy(graph)
    points = attack(spy, Box.ball(x, 0.3), tracked, Steps(8, size=0.5), restarts=2, stop=True)
    sizes = [len(asked) for asked in spy.asked]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] == 100
    with torch.no_grad():
        reached = GOALS[goal](labels).reached(graph(points))
    assert set(reached.nonzero()[:, 0].tolist()) == tracked.broken
    assert 0 < len(tracked.broken) < 100


def low_score_when_broken(x: Tensor) -> Tensor:
    """Misclassified for x < 0 by one class out of two, right elsewhere but near a tie of three."""
    broken, right = torch.tensor([[0.0, 0.01, -20.0]]), torch.tensor([[0.0, -0.01, -0.01]])
    return torch.where(x < 0, broken, right)


def test_a_broken_sample_is_kept_although_its_score_is_lower() -> None:
    labels, start = torch.tensor([0]), torch.tensor([[0.5]])
    goal = CrossEntropy(labels)
    assert goal(low_score_when_broken(start)) > goal(low_score_when_broken(-start)) + 0.3
    assert goal.reached(low_score_when_broken(-start)) and not goal.reached(
        low_score_when_broken(start)
    )
    box = Box(torch.tensor([[-1.0]]), torch.tensor([[1.0]]))
    options = {"restarts": 40, "starts": (start,)}  # 39 random points, half of them broken
    stopped = attack(low_score_when_broken, box, goal, Steps(0), stop=True, **options)
    assert stopped.item() < 0
    best = attack(low_score_when_broken, box, goal, Steps(0), **options)
    assert best.item() >= 0, "by score alone, the broken points lose"


def test_stop_evaluates_nothing_once_all_are_broken() -> None:
    _, graph = network()
    x, _ = batch(10)
    labels = (graph(x).argmax(1) + 1) % 4  # wrong everywhere from the start
    spy = Spy(graph)
    goal = Margin(labels)
    points = pgd(spy, Box(x, x), goal, steps=Steps(10), restarts=5, stop=True)
    assert len(spy.asked) == 1
    assert torch.equal(points, x)


def test_stop_finds_as_much_as_going_on_with_one_restart() -> None:
    """Up to the first success the walk is the same, so stopping loses none."""
    _, graph = network()
    x, labels = batch(100)
    box, goal = Box.ball(x, 0.2), Margin(labels)
    with torch.no_grad():
        through = goal.reached(graph(attack(graph, box, goal, Steps(8))))
        stopped = goal.reached(graph(attack(graph, box, goal, Steps(8), stop=True)))
    assert torch.equal(through, stopped)
    assert 0 < stopped.sum() < 100


def test_undefined_outputs_stop_at_a_point_of_the_box() -> None:
    def undefined(x: Tensor) -> Tensor:
        return torch.cat((x * torch.nan, x), 1)

    lower = torch.zeros(3, 1)
    box = Box(lower, lower + 1)
    labels = torch.zeros(3, dtype=torch.long)
    for stop in (True, False):
        points = pgd(undefined, box, Margin(labels), steps=Steps(3), restarts=2, stop=stop)
        assert box.contains(points).all()
        assert misclassified(undefined(points), labels).all()


def test_undefined_gradients_do_not_leave_the_box() -> None:
    """The gradient of a square root at zero is infinite; times zero it is undefined."""

    def edge(x: Tensor) -> Tensor:
        return torch.cat((torch.sqrt(x * 0.0), -1 - x), 1)

    lower = torch.zeros(4, 1)
    box = Box(lower, lower + 1)
    points = pgd(edge, box, Margin(torch.zeros(4, dtype=torch.long)), steps=Steps(3), keep="last")
    assert box.contains(points).all()


# --- no traces --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("live", [True, False])
def test_no_gradients_and_no_graphs_are_left(live: bool, keep: str) -> None:
    module, graph = network()
    x, labels = batch()
    box = Box.ball(x, 0.3)
    learned_box = Box(box.lower.requires_grad_(), box.upper.requires_grad_())
    used = graph if live else graph.detach()
    points = pgd(used, learned_box, CrossEntropy(labels), steps=Steps(3), keep=keep)
    assert not points.requires_grad and points.grad_fn is None
    assert all(p.grad is None for p in module.parameters())
    assert box.lower.grad is None
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_start_with_gradients_leaves_no_graph(keep: str) -> None:
    _, graph = network()
    x, labels = batch()
    start = x.clone().requires_grad_()
    points = pgd(
        graph, Box.ball(x, 0.3), Margin(labels), steps=Steps(2), keep=keep, starts=(start,)
    )
    assert not points.requires_grad and points.grad_fn is None


def test_gradients_that_were_there_stay() -> None:
    module, graph = network()
    x, labels = batch()
    CrossEntropy(labels)(graph(x)).mean().backward()
    before = [p.grad.clone() for p in module.parameters()]
    pgd(graph, Box.ball(x, 0.3), CrossEntropy(labels), steps=Steps(3))
    assert all(torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True))


def test_attack_works_without_gradient_mode() -> None:
    _, graph = network()
    x, labels = batch()
    goal, box = Margin(labels), Box.ball(x, 0.3)
    with torch.no_grad():
        a = attack(graph, box, goal, Steps(4))
        assert not torch.is_grad_enabled()
    b = attack(graph, box, goal, Steps(4))
    assert torch.is_grad_enabled()
    assert torch.equal(a, b)


def test_inputs_are_not_changed() -> None:
    _, graph = network()
    x, labels = batch()
    box = Box.ball(x, 0.3)
    lower, upper, start = box.lower.clone(), box.upper.clone(), x.clone()
    pgd(graph, box, Margin(labels), steps=Steps(4), starts=(start,), restarts=2)
    assert torch.equal(box.lower, lower) and torch.equal(box.upper, upper)
    assert torch.equal(start, x)


def test_same_seed_same_points() -> None:
    _, graph = network()
    x, labels = batch()
    box, goal = Box.ball(x, 0.3), Margin(labels)
    a = attack(graph, box, goal, Steps(4), restarts=3)
    b = attack(graph, box, goal, Steps(4), restarts=3)
    assert torch.equal(a, b)
    torch.manual_seed(4)
    c = pgd(graph, box, goal, steps=Steps(4), restarts=3)
    assert not torch.equal(a, c)


def test_empty_batch() -> None:
    _, graph = network()
    empty = torch.zeros(0, 6)
    goal = Margin(torch.zeros(0, dtype=torch.long))
    for options in ({}, {"stop": True, "restarts": 3}, {"keep": "last"}):
        assert pgd(graph, Box(empty, empty), goal, steps=Steps(2), **options).shape == (0, 6)
