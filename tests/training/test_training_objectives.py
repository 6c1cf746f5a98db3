"""What the objectives return, against formulas written out."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from torch import nn

from tightrope.attacks import CrossEntropy, Steps, pgd
from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, evaluation_model, training_model
from tightrope.training.objectives import IBP, METHODS, PGD, Standard, find_method, method_options

pytestmark = pytest.mark.usefixtures("one_thread")


def fixed(name, seed, x):
    """A network with the statistics of the batch, and its slow twin."""
    net = reference.NETS[name](seed)
    return training_model(trace(net, reference.SHAPE), x), reference.Reference(net, x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("radius", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("name", reference.NETS)
def test_ibp_loss_is_equation_2(name, radius, seed):
    x, y = reference.batch(seed=seed)
    model, slow = fixed(name, seed, x)
    loss = IBP()(model, x, y, radius)
    expected = slow.ibp_loss(x, y, radius)
    torch.testing.assert_close(loss.value, expected, rtol=1e-10, atol=1e-10)
    margins, _, _ = slow.bounds((x - radius).clamp(min=0), (x + radius).clamp(max=1))
    for n, label in enumerate(y.tolist()):
        worst = min(margins[n, label, i].item() for i in range(3) if i != label)
        assert bool(loss.robust[n]) == (worst > 0)


def test_ibp_by_hand():
    # h = relu(2x - 1), outputs 2h and h + 0.1.
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        net[0].weight.fill_(2.0)
        net[0].bias.fill_(-1.0)
        net[2].weight.copy_(torch.tensor([[2.0], [1.0]]))
        net[2].bias.copy_(torch.tensor([0.0, 0.1]))
    labels = torch.tensor([0, 1])
    model = FixedModel(trace(net, (1,)), torch.tensor([[0.5], [0.5]]))
    loss = IBP()(model, model.x, labels, 0.2)
    # x in [0.3, 0.7], h in [0, 0.4]. Merged rows: o_0 - o_1 = h - 0.1 >= -0.1 and
    # o_1 - o_0 >= -0.3; differences of output bounds would give -0.5 and -0.7.
    expected = (math.log1p(math.exp(0.1)) + math.log1p(math.exp(0.3))) / 2
    assert loss.value.item() == pytest.approx(expected, rel=1e-6)
    assert loss.robust.tolist() == [False, False]
    model = FixedModel(trace(net, (1,)), torch.tensor([[0.8], [0.2]]))
    loss = IBP()(model, model.x, labels, 0.1)
    # h in [0.4, 0.8]: o_0 - o_1 >= 0.3; h = 0: o_1 - o_0 = 0.1.
    expected = (math.log1p(math.exp(-0.3)) + math.log1p(math.exp(-0.1))) / 2
    assert loss.value.item() == pytest.approx(expected, rel=1e-6)
    assert loss.robust.tolist() == [True, True]


def linear_margins(net, x, y, radius):
    """The exact worst `o_y - o_other` of a linear net with two classes."""
    weight, bias = net[0].weight.detach(), net[0].bias.detach()
    low, up = (x - radius).clamp(min=0), (x + radius).clamp(max=1)
    result = []
    for n, label in enumerate(y.tolist()):
        gap = weight[label] - weight[1 - label]
        worst = torch.where(gap > 0, low[n], up[n])
        result.append((worst @ gap + bias[label] - bias[1 - label]).item())
    return result


@pytest.mark.parametrize("method", [IBP(), PGD(steps=8), PGD(steps=3), PGD(4, 3, step_size=3.0)])
@pytest.mark.parametrize("radius", [0.02, 0.2])
def test_both_sides_are_exact_on_linear_networks(method, radius):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2)).double()
    x, y = torch.rand(40, 4, dtype=torch.float64), torch.randint(2, (40,))
    loss = method(FixedModel(trace(net, (4,)), x), x, y, radius)
    margins = linear_margins(net, x, y, radius)
    expected = sum(math.log1p(math.exp(-m)) for m in margins) / 40
    assert loss.value.item() == pytest.approx(expected, rel=1e-10)
    assert loss.robust.tolist() == [m > 0 for m in margins]
    assert 0 < sum(m > 0 for m in margins) < 40


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("radius", [0.01, 0.1])
@pytest.mark.parametrize("name", reference.NETS)
def test_losses_are_ordered(name, radius, seed):
    """Clean <= attacked from the clean point <= IBP, and IBP >= every point of the box."""
    x, y = reference.batch(12, seed=seed)
    model, slow = fixed(name, seed, x)
    ball = Box.ball(x, radius)
    clean = Standard()(model, x, y, radius).value
    torch.testing.assert_close(clean, F.cross_entropy(slow.logits, y))
    points = pgd(model.frozen, ball, CrossEntropy(y), steps=Steps(5), keep="best", starts=(x,))
    attacked = F.cross_entropy(slow.points(points), y)
    bound = IBP()(model, x, y, radius)
    assert clean < attacked < bound.value
    torch.manual_seed(seed)
    corners = torch.where(torch.rand_like(x) < 0.5, ball.lower, ball.upper)
    for inside in (ball.sample(), ball.lower, ball.upper, corners):
        logits = slow.points(inside)
        assert F.cross_entropy(logits, y) <= bound.value
        wrong = logits.argmax(1) != y
        assert not (wrong & bound.robust).any()
    trained = PGD(steps=5)(model, x, y, radius)
    assert trained.value <= bound.value
    assert not (bound.robust & ~trained.robust).any()  # what is certified cannot be broken


def test_robust_masks_are_neither_empty_nor_full():
    net = reference.plain_net()
    x, _ = reference.batch(64)
    y = net(x).argmax(1)
    model = evaluation_model(trace(net, reference.SHAPE), x)
    for method in (IBP(), PGD()):
        shares = [method(model, x, y, r).robust.double().mean() for r in (0.001, 0.02, 0.2)]
        assert shares[0] > 0.9 and shares[0] > shares[1] > shares[2]
    assert Standard()(model, x, y, 0.1).robust is None


@pytest.mark.parametrize("name", reference.NETS)
def test_all_losses_meet_at_a_tiny_radius(name):
    x, y = reference.batch(12)
    model, _ = fixed(name, 1, x)
    values = [m(model, x, y, 1e-9).value.item() for m in (Standard(), PGD(), IBP())]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)
    bounds, attack = (m(model, x, y, 1e-9).robust for m in (IBP(), PGD()))
    assert bounds.tolist() == attack.tolist() == (model.logits.argmax(1) == y).tolist()


def test_ties_are_not_robust():
    net = nn.Sequential(nn.Linear(2, 3))
    nn.init.zeros_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    x, y = torch.rand(3, 2), torch.arange(3)
    model = FixedModel(trace(net, (2,)), x)
    for method in (IBP(), PGD()):
        assert not method(model, x, y, 0.1).robust.any()


def test_pgd_steps_relative_to_the_box_and_stays_inside(monkeypatch):
    seen = {}

    def spy(network, box, goal, **options):
        seen.update(options, box=box)
        return pgd(network, box, goal, **options)

    monkeypatch.setattr("tightrope.training.objectives.regions.pgd", spy)
    x, y = reference.batch()
    model, _ = fixed("plain", 0, x)
    for steps, expected in ((1, 2.0), (4, 0.5), (8, 0.25), (50, 0.25)):
        PGD(steps=steps)(model, x, y, 0.1)
        assert (seen["steps"].count, seen["steps"].size) == (steps, expected)
    PGD(steps=4, step_size=0.7, restarts=3)(model, x, y, 0.1)
    assert (seen["steps"].size, seen["restarts"], seen["keep"]) == (0.7, 3, "best")
    assert seen["box"].lower.min() == 0 and seen["box"].upper.max() == 1
    torch.testing.assert_close(seen["box"].upper, (x + 0.1).clamp(max=1))


@pytest.mark.parametrize(
    "options,name",
    [
        ({"steps": 0}, "pgd.steps"),
        ({"restarts": 0}, "pgd.restarts"),
        ({"step_size": 0.0}, "pgd.step_size"),
        ({"step_size": -1.0}, "pgd.step_size"),
        ({"step_size": math.nan}, "pgd.step_size"),
        ({"step_size": math.inf}, "pgd.step_size"),  # no gradient times infinity is no number
    ],
)
def test_pgd_refuses_options_without_meaning(options, name):
    with pytest.raises(UserError, match=name):
        PGD(**options)


def test_methods_by_name():
    assert {"standard": Standard, "pgd": PGD, "ibp": IBP}.items() <= METHODS.items()
    for name, method in METHODS.items():
        assert find_method(name) is method and method.name == name
        assert method.summary and "\n" not in method.summary
        assert isinstance(method.propagates_boxes, bool)
        instance = method()
        for option, field in method_options(name).items():
            assert getattr(instance, option) == field.default
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(instance, option, 1)
    with pytest.raises(UserError, match="did you mean 'ibp'"):
        find_method("ipb")
