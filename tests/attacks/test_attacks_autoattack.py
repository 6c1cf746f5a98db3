"""AutoAttack's suite: published parameters, and linear models whose answer is known exactly."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightrope.attacks import autoattack, fab, square
from tightrope.attacks.apgd import (
    Ball,
    _Climb,
    apgd,
    checkpoints,
    cross_entropy,
    dlr,
    targeted_dlr,
)
from tightrope.box import Box

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES, INPUTS = 4, 6


def linear_model(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(INPUTS, CLASSES).double().requires_grad_(False)


def linear_balls(model, *, count=60, radius=0.05):
    """Samples far from 0 and 1, labelled by the model, and which of them can be broken."""
    x = 0.3 + 0.4 * torch.rand(count, INPUTS, dtype=torch.float64)
    logits = model(x)
    labels = logits.argmax(1)
    margins = logits.gather(1, labels[:, None]) - logits
    reach = (model.weight[labels][:, None] - model.weight).abs().sum(2) * radius
    breakable = ((margins < reach) & (F.one_hot(labels, CLASSES) == 0)).any(1)
    assert breakable.any() and not breakable.all()
    # No margin is so near to its reach that rounding decides.
    assert (margins - reach).abs()[F.one_hot(labels, CLASSES) == 0].min() > 1e-6
    return Ball(x, Box.ball(x, radius), labels, (0.0, 1.0)), breakable


def misled(model, ball, points):
    inside = ball.box.contains(points)
    return inside & ball.misled(model(points))


# --- parameters -------------------------------------------------------------------------------


def test_checkpoints_are_the_published_ones():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(10) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert checkpoints(1) == [1]


def test_the_suite_is_the_standard_one():
    targets = {name: count for name, (_, count) in autoattack.ATTACKS.items()}
    assert targets == {"apgd-ce": 1, "apgd-t": 9, "fab-t": 9, "square": 1}
    assert list(targets) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert apgd.__kwdefaults__ == {"steps": 100}
    assert fab.fab.__kwdefaults__ == {"steps": 100}
    assert inspect.signature(square.square).parameters["queries"].default == 5000
    assert (fab.MOST_BIAS, fab.BEYOND, fab.BACK) == (0.1, 1.05, 0.9)


def test_squares_shrink_as_published():
    ends = (0, 10, 11, 50, 51, 200, 201, 500, 501, 1000, 1001, 2000, 2001, 4000, 4001, 4999)
    powers = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert [square.share_at(q) for q in ends] == [0.8 / 2**k for k in powers]
    assert square.sides((28, 28), 0.8) == (25, 25)
    assert square.sides((32, 32), 0.8 / 128) == (3, 3)
    assert square.sides((4, 28), 0.8) == (4, 9)
    assert square.sides((1, 10), 0.8) == (1, 8) and square.sides((1, 10), 0.01) == (1, 1)


def test_difference_of_logits_ratios_by_hand():
    logits = torch.tensor([[5.0, 3.0, 2.0, 1.0, 0.0], [1.0, 4.0, 2.0, 0.0, -1.0]])
    labels = torch.tensor([0, 0])
    # -(5 - 3) / (5 - 2) and -(1 - 4) / (4 - 1)
    assert dlr(labels)(logits).tolist() == pytest.approx([-2 / 3, 1.0])
    # -(5 - 1) / (5 - (2 + 1) / 2) and -(1 - 2) / (4 - (1 + 0) / 2)
    found = targeted_dlr(labels, torch.tensor([3, 2]))(logits)
    assert found.tolist() == pytest.approx([-4 / 3.5, 1 / 3.5])
    few = targeted_dlr(labels, torch.tensor([1, 2]))(logits[:, :3])
    assert few.tolist() == [-2.0, 1.0]


def test_targets_are_the_classes_that_come_next_at_the_input():
    logits = torch.tensor([[0.3, 5.0, 0.1, 2.0], [4.0, 1.0, 2.0, 3.0]])
    ball = Ball(torch.zeros(2, 1), Box(torch.zeros(2, 1), torch.ones(2, 1)), torch.tensor([1, 0]))
    ranked = autoattack.ranked_classes(lambda x: logits, ball)
    assert ranked.tolist() == [[3, 0, 2], [3, 2, 1]]


# --- APGD -------------------------------------------------------------------------------------


def test_the_radius_is_that_of_the_side_that_is_not_cut_off():
    x = torch.tensor([[0.02, 0.5], [0.99, 0.0]])
    ball = Ball(x, Box.ball(x, 0.1), torch.zeros(2, dtype=torch.long))
    assert ball.radius.flatten().tolist() == pytest.approx([0.1, 0.1])


def test_it_starts_on_the_surface_of_the_ball():
    model = linear_model()
    ball, _ = linear_balls(model)
    climb = _Climb(model, ball, cross_entropy(ball.labels), 100)
    assert (climb.points - ball.x).abs().amax(1).tolist() == pytest.approx([0.05] * 60)
    assert climb.size.flatten().tolist() == pytest.approx([0.1] * 60)


def test_steps_by_hand():
    """`x + a (z - x) + (1 - a)(x - x')`, a = 1 at first and 0.75 then, projected twice."""
    torch.manual_seed(2)
    x, target = 0.5 * torch.ones(8, 4).double(), 0.4 + 0.2 * torch.rand(8, 4).double()
    box = Box.ball(x, 0.1)
    ball = Ball(x, box, torch.zeros(8, dtype=torch.long))
    climb = _Climb(lambda t: t, ball, lambda t: -(t - target).square().sum(1), 100)
    before = here = climb.points
    assert (climb.points - x).abs().amax(1).tolist() == pytest.approx([0.1] * 8)
    for k in range(21):  # up to the first checkpoint, with steps of twice the radius
        ahead = box.project(here + 0.2 * (target - here).sign())
        share = 0.75 if k else 1.0
        moved = box.project(here + share * (ahead - here) + (1 - share) * (here - before))
        before, here = here, moved
        climb.step(k)
        torch.testing.assert_close(climb.points, here)
    assert (here - before).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["ce", "dlr"])
def test_the_best_loss_never_falls_and_all_points_stay_inside(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(INPUTS, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
    ball, _ = linear_balls(linear_model())
    loss = cross_entropy(ball.labels) if kind == "ce" else dlr(ball.labels)
    climb = _Climb(model, ball, loss, 40)
    best, size = climb.best_value, climb.size
    for k in range(40):
        climb.step(k)
        assert (climb.best_value >= best).all() and ball.box.contains(climb.points).all()
        ratio = size / climb.size
        assert ((ratio == 1) | ((ratio == 2) & (k + 1 in checkpoints(40)))).all()
        best, size = climb.best_value, climb.size
    assert (climb.size < 0.1).any()
    torch.testing.assert_close(climb.best_value, loss(model(climb.best)))


def test_halving_by_hand():
    """One sample for each reason: rises enough, swings, stands still, and stood still before."""
    ball, _ = linear_balls(linear_model(), count=60)
    part = ball[torch.arange(4)]
    climb = _Climb(linear_model(), part, cross_entropy(part.labels), 100)
    rising = torch.arange(1.0, 101.0, dtype=torch.float64)
    climb.values[:, 0] = rising
    climb.values[:, 1] = rising % 2  # rises half of the time
    climb.values[:, 2:] = rising[:, None]
    climb.best_value = torch.tensor([9.0, 9.0, 5.0, 5.0], dtype=torch.float64)
    climb.last_value = torch.tensor([1.0, 1.0, 5.0, 5.0], dtype=torch.float64)
    climb.halved = torch.tensor([False, False, False, True])
    before, points = climb.size, climb.points + 0.01
    climb.points, climb.best = points, points - 0.02
    climb._look_back(40, 19)
    assert climb.halved.tolist() == [False, True, True, False]
    assert (before / climb.size).flatten().tolist() == [1, 2, 2, 1]
    moved = (climb.points != points).any(1)
    assert moved.tolist() == [False, True, True, False]


def test_the_first_window_is_compared_with_a_row_of_zeros():
    ball, _ = linear_balls(linear_model())
    part = ball[torch.arange(2)]
    climb = _Climb(linear_model(), part, cross_entropy(part.labels), 100)
    # 16 rises of 22 are too few, 17 are enough: the first value counts as a rise if positive.
    values = torch.cat((torch.arange(1.0, 18.0), torch.full((5,), 0.5))).double()
    climb.values[:22] = torch.stack((values, values - 1.5), 1)
    climb._look_back(21, 22)
    assert climb.halved.tolist() == [False, True]


# --- linear models ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_apgd_breaks_exactly_what_can_be_broken(seed):
    model = linear_model(seed)
    ball, breakable = linear_balls(model)
    broken = misled(model, ball, apgd(model, ball, cross_entropy(ball.labels)))
    assert not (broken & ~breakable).any()
    ranked = autoattack.ranked_classes(model, ball)
    for target in range(CLASSES - 1):
        loss = targeted_dlr(ball.labels, ranked[:, target])
        broken |= misled(model, ball, apgd(model, ball, loss))
    assert broken.tolist() == breakable.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_fab_finds_the_nearest_point(seed):
    model = linear_model(seed)
    ball, breakable = linear_balls(model)
    logits = model(ball.x)
    margins = logits.gather(1, ball.labels[:, None]) - logits
    reach = (model.weight[ball.labels][:, None] - model.weight).abs().sum(2)
    nearest = torch.full((60,), math.inf, dtype=torch.float64)
    for target in range(CLASSES - 1):
        targets = autoattack.ranked_classes(model, ball)[:, target]
        points = fab.fab(model, ball, targets)
        found = ball.misled(model(points))
        distance = (points - ball.x).abs().amax(1)
        nearest = torch.where(found, torch.minimum(nearest, distance), nearest)
    exact = (margins / reach).scatter(1, ball.labels[:, None], math.inf).amin(1)
    near = exact < 0.25  # the domain is not in the way
    assert near.sum() > 10
    assert (nearest >= exact - 1e-12).all() and (nearest[near] <= 1.06 * exact[near]).all()
    assert ((nearest <= 0.05) <= breakable).all()


def test_the_projection_is_the_nearest_point_of_the_plane():
    torch.manual_seed(1)
    x, w = torch.rand(200, 5, dtype=torch.float64), torch.randn(200, 5, dtype=torch.float64)
    w[:20, 2] = 0
    level = (w * torch.rand(200, 5, dtype=torch.float64)).sum(1)  # a point of the domain is on it
    move = fab.project_plane(x, w, level, 0.0, 1.0)
    torch.testing.assert_close((w * (x + move)).sum(1), level)
    assert (x + move >= -1e-12).all() and (x + move <= 1 + 1e-12).all()
    # With any smaller radius the plane is out of reach.
    radius = move.abs().amax(1, keepdim=True) * (1 - 1e-6)
    way = -(((w * x).sum(1) - level)[:, None].sign() * w).sign()
    room = torch.where(way > 0, 1 - x, x)
    reach = (w.abs() * torch.minimum(radius, room)).sum(1)
    assert (reach < ((w * x).sum(1) - level).abs() + 1e-15).all()
    out = fab.project_plane(x[:1], torch.ones(1, 5).double(), torch.tensor([9.0]).double(), 0, 1)
    torch.testing.assert_close(x[:1] + out, torch.ones(1, 5).double())
    none = fab.project_plane(x[:1], torch.zeros(1, 5).double(), level[:1], -math.inf, math.inf)
    assert none.tolist() == [[0.0] * 5]


def test_square_breaks_a_linear_model():
    model = linear_model()
    ball, breakable = linear_balls(model)
    torch.manual_seed(0)
    broken = misled(model, ball, square.square(model, ball, queries=500))
    assert not (broken & ~breakable).any() and broken.sum() >= 0.9 * breakable.sum()


def test_square_moves_squares_to_the_ends_of_the_ball():
    torch.manual_seed(0)
    x = 0.5 * torch.ones(2, 3, 8, 8)
    ball = Ball(x, Box.ball(x, 0.1), torch.zeros(2, dtype=torch.long), (0.0, 1.0))
    seen = []

    def network(points):
        seen.append(points.clone())
        return torch.tensor([[1.0, 0.0]]).repeat(len(points), 1)

    square.square(network, ball, queries=30)
    assert len(seen) == 1 + 30  # the stripes are no query: 5001 passes of the standard suite
    first = seen[0]
    assert torch.equal(first, first[:, :, :1].expand_as(first))  # vertical stripes
    assert len(first.unique()) == 2
    for points in seen[1:]:
        changed = (points != first).any(1)
        rows, columns = changed.any(2).sum(1), changed.any(1).sum(1)
        assert (rows <= 7).all() and (columns <= 7).all()
        assert ((points - x).abs() - 0.1).abs().max() < 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_the_suite_leaves_exactly_what_cannot_be_broken(seed, monkeypatch):
    monkeypatch.setattr(autoattack, "square", lambda n, b: square.square(n, b, queries=20))
    model = linear_model(seed)
    ball, breakable = linear_balls(model)
    seen = []

    def confirm(points, index):
        seen.append(len(index))
        return misled(model, ball[index], points)

    left = dict(autoattack.autoattack(model, ball, confirm))
    assert list(left) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    counts = [len(rest) for rest in left.values()]
    assert counts == sorted(counts, reverse=True)
    assert left["square"].tolist() == (~breakable).nonzero()[:, 0].tolist()
    # Four classes have three targets, and only those that are left are attacked.
    assert len(seen) == 1 + 3 + 3 + 1 and seen[0] == 60 and seen == sorted(seen, reverse=True)


def test_nothing_is_attacked_when_nobody_is_left():
    model = linear_model()
    ball, _ = linear_balls(model)
    calls = []

    def confirm(points, index):
        calls.append(len(index))
        return torch.ones(len(index), dtype=torch.bool)

    left = dict(autoattack.autoattack(model, ball, confirm))
    assert calls == [60] and all(len(rest) == 0 for rest in left.values())
