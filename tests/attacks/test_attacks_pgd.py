"""The PGD loop: its steps, how it stays in the box, and that it keeps the best."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks
from pgd_helpers import GOALS, Spy, attack, batch, network
from torch import Tensor, nn

from tightrope.attacks import CrossEntropy, Goal, Margin, Steps, Targeted, misclassified, pgd
from tightrope.box import Box
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")


def scores_of(graph: Graph, goal: Goal, points: Tensor) -> Tensor:
    with torch.no_grad():
        return goal(graph(points))


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
    pgd(spy, box, goal, steps=steps, starts=(start,))
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
    points = pgd(spy, box, Margin(labels), steps=Steps(1), starts=(x + 5.0,))
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
