"""ARoW and MART: their formulas by hand values, and that they compose as other methods do."""

import copy
import math

import pytest
import torch
import training_reference as reference
from torch import nn

from tightrope.attacks import CrossEntropy, Divergence
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.nets import Normalize
from tightrope.training.batchnorm import training_model
from tightrope.training.objectives import MART, ARoW, Noise, arow, mart
from tightrope.training.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")


class Outputs:
    """A model with given outputs: `clean` at the inputs, `attacked` at all other points."""

    def __init__(self, clean, attacked):
        self.logits = torch.tensor(clean, dtype=torch.float64).log()
        self.attacked = torch.tensor(attacked, dtype=torch.float64).log()
        self.frozen = None

    def graph(self, points):
        return self.attacked


@pytest.fixture
def no_attack(monkeypatch):
    """The goals of attacks, which return where they began."""
    goals = []

    def stay(model, box, y, *, goal=None, **_):
        goals.append(goal)
        return box.center

    for module in (arow, mart):
        monkeypatch.setattr(module, "adversarial_points", stay)
    return goals


CLEAN, ATTACKED = [[0.7, 0.2, 0.1]], [[0.3, 0.5, 0.2]]
APART = 0.7 * math.log(0.7 / 0.3) + 0.2 * math.log(0.2 / 0.5) + 0.1 * math.log(0.1 / 0.2)


def test_arow_by_hand(no_attack):
    model = Outputs(CLEAN, ATTACKED)
    x, y = torch.zeros(1, 2), torch.tensor([0])
    loss = ARoW(weight=7.0, label_smoothing=0.2)(model, x, y, 0.1)
    smoothed = -0.8 * math.log(0.7) - 0.2 / 3 * (math.log(0.7) + math.log(0.2) + math.log(0.1))
    assert loss.value.item() == pytest.approx(smoothed + 7 * APART * (1 - 0.3), rel=1e-12)
    assert loss.robust.tolist() == [False]
    assert isinstance(no_attack[0], Divergence)
    torch.testing.assert_close(no_attack[0].reference, model.logits)


def test_mart_by_hand(no_attack):
    model = Outputs(CLEAN, ATTACKED)
    x, y = torch.zeros(1, 2), torch.tensor([0])
    loss = MART(weight=5.0)(model, x, y, 0.1)
    boosted = -math.log(0.3) - math.log(1.0001 - 0.5)
    assert loss.value.item() == pytest.approx(boosted + 5 * APART * (1 - 0.7), rel=1e-9)
    assert loss.robust.tolist() == [False] and no_attack == [None]  # None is the cross-entropy


def test_mart_of_certain_predictions_is_finite(no_attack):
    """Probabilities of 0 and 1, of the right class and of a wrong one."""
    certain = [[1e3, 0.0, 0.0], [0.0, 1e3, 0.0]]
    model = Outputs([[0.4, 0.3, 0.3]] * 2, [[0.4, 0.3, 0.3]] * 2)
    model.attacked = torch.tensor(certain, requires_grad=True)
    loss = MART()(model, torch.zeros(2, 2), torch.tensor([0, 0]), 0.1).value
    loss.backward()
    assert loss.isfinite() and model.attacked.grad.isfinite().all()


def test_without_their_weights():
    """ARoW is then the clean loss, MART does not look at clean inputs."""
    net, (x, y) = reference.plain_net(), reference.batch()
    model = training_model(trace(net, reference.SHAPE), x)
    loss = ARoW(weight=0.0, label_smoothing=0.0, steps=2)(model, x, y, 0.1)
    torch.testing.assert_close(loss.value, torch.nn.functional.cross_entropy(model.logits, y))
    values = []
    for shift in (0.0, 1.0):
        torch.manual_seed(0)
        moved = training_model(trace(copy.deepcopy(net), reference.SHAPE), x)
        moved.logits = moved.logits + shift * torch.rand(7, 3).double()
        values.append(MART(weight=0.0, steps=1, restarts=1).__call__(moved, x, y, 0.0).value)
    assert torch.equal(*values)


def test_gradients_reach_both_predictions():
    """None of them is cut off, as in the published code."""
    for objective in (ARoW(steps=2), MART(steps=2)):
        net, (x, y) = reference.plain_net(), reference.batch()
        model = training_model(trace(net, reference.SHAPE), x)
        clean = model.logits.detach().requires_grad_()
        model.logits = clean
        objective(model, x, y, 0.1).value.backward()
        assert clean.grad.abs().max() > 0
        assert all(g.abs().max() > 0 for g in reference.gradients(net).values())


def test_the_goal_of_arow():
    torch.manual_seed(0)
    fixed, logits = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    goal = Divergence(fixed)
    p, q = fixed.softmax(1), logits.softmax(1)
    torch.testing.assert_close(goal(logits), (p * (p / q).log()).sum(1))
    assert (goal(fixed).abs() < 1e-15).all()
    index = torch.tensor([4, 1])
    torch.testing.assert_close(goal.select(index)(logits[index]), goal(logits)[index])
    changed = goal.reached(logits)
    assert changed.tolist() == (logits.argmax(1) != fixed.argmax(1)).tolist()
    assert not goal.reached(fixed).any()
    assert torch.equal(goal.reached(logits), CrossEntropy(fixed.argmax(1)).reached(logits))


def test_noise_is_added_before_normalisation():
    """In units of the inputs, and drawn anew for every sample and step."""
    torch.manual_seed(0)
    net = nn.Sequential(Normalize(0.4, 0.1), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.rand(500, 2, 2, 2).double(), torch.arange(500) % 3
    seen, model = [], training_model(trace(net, (2, 2, 2)), x)
    model.graph = lambda points: seen.append(points) or net(points)
    losses = [Noise(sigma=0.25)(model, x, y, 0.1) for _ in range(2)]
    for loss, points in zip(losses, seen, strict=True):
        expected = torch.nn.functional.cross_entropy(net(points), y)
        assert torch.equal(loss.value, expected) and loss.robust is None
        noise = (points - x).flatten() / 0.25
        assert abs(noise.mean()) < 0.1 and noise.std().item() == pytest.approx(1, abs=0.06)
        assert (points < 0).any() and (points > 1).any()  # nothing is cut off
        assert len(points.flatten(1).unique(dim=0)) == 500
    assert not torch.equal(*seen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "arow", "arow.weight": -1}, "arow.weight must be at least 0"),
        ({"method": "arow", "arow.label_smoothing": 1.1}, "arow.label_smoothing must be between"),
        ({"method": "mart", "mart.weight": "inf"}, "mart.weight must be at least 0"),
        ({"method": "mart", "mart.steps": 0}, "mart.steps must be at least 1"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(UserError, match=message):
        Settings.parse(given)
