"""The PGD loop: stays in the box, keeps the best, stops where it may, leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks
from torch import Tensor, nn

from tightrope.attacks import CrossEntropy, Goal, Margin, Steps, Targeted, misclassified, pgd
from tightrope.box import Box
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")

GOALS = {
    "cross-entropy": CrossEntropy,
    "margin": Margin,
    "targeted": lambda labels: Targeted(labels, (labels + 1) % 4),
}


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Graph]:
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    module = nn.Sequential(*layers).to(dtype).eval()
    return module, trace(module, (6,))


def batch(count: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.rand(count, 6, dtype=dtype), torch.randint(0, 4, (count,))


def scores_of(graph: Graph, goal: Goal, points: Tensor) -> Tensor:
    with torch.no_grad():
        return goal(graph(points))


def attack(graph: Graph, box: Box, goal: Goal, steps: Steps, **options: object) -> Tensor:
    """The attack with a seed of its own, so that two calls draw the same points."""
    torch.manual_seed(3)
    return pgd(graph, box, goal, steps=steps, **options)


class Spy:
    """A network that remembers the points it was asked about."""

    def __init__(self, inner: Graph) -> None:
        self.inner = inner
        self.asked: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        return self.inner(x)


# --- step sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        (Steps(3), [0.25, 0.25, 0.25]),
        (Steps(0), []),
        (Steps(4, size=2.0, milestones=(0.5,)), [2.0, 2.0, 0.2, 0.2]),
        (Steps(5, size=1.0, decay=0.5, milestones=(0.4, 0.8)), [1.0, 1.0, 0.5, 0.5, 0.25]),
        (Steps(3, size=1.0, decay=0.1, milestones=(0.5, 0.5)), [1.0, 0.01, 0.01]),
        # fractions are rounded down: int(.7 * 8) = 5, int(.4 * 8) = 3
        (Steps(8, size=1.0, decay=0.5, milestones=(0.4, 0.7)), [1.0] * 3 + [0.5] * 2 + [0.25] * 3),
        (Steps(2, size=1.0, milestones=(0.0,)), [0.1, 0.1]),
        (Steps(2, size=1.0, milestones=(1.0,)), [1.0, 1.0]),
    ],
)
def test_sizes(steps: Steps, sizes: list[float]) -> None:
    assert steps.sizes() == pytest.approx(sizes, rel=1e-12)


def test_the_schedule_of_the_paper() -> None:
    # 20 steps, x0.1 at int(.7 * 20) = 14
    assert Steps(20, size=0.4, milestones=(0.7,)).sizes() == pytest.approx([0.4] * 14 + [0.04] * 6)


def test_steps_are_relative_to_the_half_width() -> None:
    spy = Spy(trace(nn.Linear(2, 2), (2,)))
    with torch.no_grad():
        spy.inner.nodes[1].op.weight.copy_(torch.tensor([[-1.0, 2.0], [1.0, -2.0]]))
    box = Box(torch.tensor([[0.0, -4.0]]), torch.tensor([[2.0, 4.0]]))
    start = torch.tensor([[1.0, 0.0]])
    goal = Margin(torch.tensor([0]))  # o_1 - o_0 = 2 x_0 - 4 x_1 + constant
    steps = Steps(3, size=0.5, decay=0.5, milestones=(0.5,))
    pgd(spy, box, goal, steps=steps, start=start)
    # 0.5 of (1, 4), then 0.25 of it twice; the sign of x_1 is negative
    visited = [[1.0, 0.0], [1.5, -2.0], [1.75, -3.0], [2.0, -4.0]]
    assert torch.cat(spy.asked).tolist() == visited


# --- inside the box ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_points_never_leave_the_box(data: st.DataObject) -> None:
    """Exactly: a point outside by one bit is no counterexample."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    module = data.draw(networks(classes=4)).to(dtype)
    spy = Spy(trace(module, module.input_shape).detach())
    box = data.draw(boxes(module.input_shape, batch=3, dtype=dtype))
    if data.draw(st.booleans()):
        box = Box.around(box.center, box.radius)
    goal = data.draw(st.sampled_from(list(GOALS.values())))(torch.tensor([0, 3, 1]))
    options = data.draw(
        st.sampled_from([{"restarts": 2}, {"keep": "last"}, {"stop": True, "restarts": 2}])
    )
    torch.manual_seed(0)
    points = pgd(spy, box, goal, steps=Steps(4, size=0.7, milestones=(0.5,)), **options)
    assert points.dtype == dtype and points.shape == box.lower.shape
    assert box.contains(points).all()
    if not options.get("stop"):
        assert all(box.contains(asked).all() for asked in spy.asked)


def test_start_outside_the_box_is_projected() -> None:
    _, graph = network()
    x, labels = batch(5)
    box = Box.ball(x, 0.1)
    spy = Spy(graph)
    points = pgd(spy, box, Margin(labels), steps=Steps(1), start=x + 5.0)
    assert torch.equal(spy.asked[0], box.upper)
    assert box.contains(points).all()


@pytest.mark.parametrize("keep", ["best", "last"])
def test_zero_width_box_returns_the_point(keep: str) -> None:
    _, graph = network()
    x, labels = batch(8)
    points = pgd(graph, Box(x, x), Margin(labels), steps=Steps(5, size=10.0), keep=keep)
    assert torch.equal(points, x)


def test_flat_coordinates_stay_put() -> None:
    _, graph = network()
    x, labels = batch(8)
    upper = x.clone()
    upper[:, ::2] += 0.5
    points = pgd(graph, Box(x, upper), Margin(labels), steps=Steps(5))
    assert torch.equal(points[:, 1::2], x[:, 1::2])
    assert (points[:, ::2] != x[:, ::2]).any()


# --- how good the points are ------------------------------------------------------------------


@pytest.mark.parametrize("goal", GOALS)
def test_best_is_no_worse_than_start_and_last(goal: str) -> None:
    _, graph = network()
    x, labels = batch()
    goal = GOALS[goal](labels)
    box = Box.ball(x, 0.3)
    steps = Steps(6, size=1.5)  # so large that it overshoots and the last point is not the best
    start = attack(graph, box, goal, Steps(0))
    last = attack(graph, box, goal, steps, keep="last")
    best = attack(graph, box, goal, steps)
    score, score_start, score_last = (scores_of(graph, goal, p) for p in (best, start, last))
    assert (score >= score_start).all() and (score >= score_last).all()
    assert (score > score_last).any() and (score > score_start).any()


def test_best_is_the_best_of_all_points_visited() -> None:
    _, graph = network()
    x, labels = batch()
    goal, box = Margin(labels), Box.ball(x, 0.3)
    spy = Spy(graph)
    best = attack(spy, box, goal, Steps(6, size=1.5), restarts=3)
    assert len(spy.asked) == 3 * 7  # start, five in between, end
    visited = torch.stack([scores_of(graph, goal, points) for points in spy.asked])
    # The same points in a batch of the same size give the same numbers.
    assert torch.equal(scores_of(graph, goal, best), visited.amax(0))


def test_last_is_the_end_of_the_walk() -> None:
    _, graph = network()
    x, labels = batch()
    goal, box = Margin(labels), Box.ball(x, 0.3)
    spy = Spy(graph)
    attack(spy, box, goal, Steps(4, size=0.3))
    last = attack(graph, box, goal, Steps(4, size=0.3), keep="last")
    assert torch.equal(spy.asked[-1], last)


def test_keep_last_saves_an_evaluation() -> None:
    _, graph = network()
    x, labels = batch()
    spy = Spy(graph)
    attack(spy, Box.ball(x, 0.3), Margin(labels), Steps(4), keep="last")
    assert len(spy.asked) == 4


@pytest.mark.parametrize("options", [{"restarts": 2}, {"stop": True}])
def test_keep_last_refuses_what_it_cannot_do(options: dict[str, object]) -> None:
    _, graph = network()
    x, labels = batch()
    with pytest.raises(ValueError, match="last"):
        attack(graph, Box.ball(x, 0.3), Margin(labels), Steps(4), keep="last", **options)


@pytest.mark.parametrize("goal", GOALS)
def test_restarts_never_hurt(goal: str) -> None:
    _, graph = network()
    x, labels = batch()
    goal = GOALS[goal](labels)
    box = Box.ball(x, 0.3)
    scores = [
        scores_of(graph, goal, attack(graph, box, goal, Steps(2, size=0.4), restarts=n))
        for n in (1, 2, 4, 8)
    ]
    for fewer, more in pairwise(scores):
        assert (more >= fewer).all()
    assert (scores[-1] > scores[0]).any()


def test_restarts_never_lose_a_broken_sample() -> None:
    _, graph = network()
    x, labels = batch()
    goal, box = CrossEntropy(labels), Box.ball(x, 0.15)
    broken = [
        misclassified(graph(attack(graph, box, goal, Steps(2), restarts=n, stop=True)), labels)
        for n in (1, 3)
    ]
    assert (broken[1] | ~broken[0]).all()


def test_sign_steps_find_the_best_corner_of_a_linear_network() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 4)
    graph = trace(module, (8,))
    lower = torch.randn(20, 8)
    upper = lower + torch.rand(20, 8)
    labels, targets = torch.randint(0, 4, (20,)), torch.randint(0, 4, (20,))
    goal = Targeted(labels, targets)
    gap = (module.weight[targets] - module.weight[labels]).detach()
    best = torch.where(gap > 0, upper, lower)
    # Two steps of half a width reach any corner from anywhere; one of the whole width, too.
    for steps in (Steps(2, size=1.0), Steps(1, size=2.0), Steps(20, size=0.1)):
        points = pgd(graph, Box(lower, upper), goal, steps=steps, keep="last")
        other = targets != labels
        assert torch.equal(points[other], best[other])


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
    options = {"restarts": 40, "start": start}  # 39 random points, half of them broken
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
    points = pgd(graph, Box.ball(x, 0.3), Margin(labels), steps=Steps(2), keep=keep, start=start)
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
    pgd(graph, box, Margin(labels), steps=Steps(4), start=start, restarts=2)
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
