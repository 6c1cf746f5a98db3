"""One step: gradients of the loss, of the regularisers, and of a batch computed in parts."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from torch import nn

from tightrope.attacks import pgd as real_pgd
from tightrope.graph import trace
from tightrope.training.batchnorm import training_model
from tightrope.training.objectives import IBP, PGD, Loss, Objective, Standard
from tightrope.training.objectives.propagation import interval_rules
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

ATTACK = "tightrope.training.objectives.regions.pgd"
OBJECTIVES = {"standard": Standard(), "pgd": PGD(), "ibp": IBP()}


def run(net, objective, radius, *, data=None, annealing=False, target=0.2, **options):
    """Return the result and the gradients of one step on a fresh copy of the network."""
    net = copy.deepcopy(net)
    x, y = data or reference.batch()
    step = Step(trace(net, reference.SHAPE), objective, target, **options)
    result = step(x, y, radius, annealing=annealing)
    return result, reference.gradients(net)


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def somewhere_in(network, box, goal, **options):
    """An attack that depends on nothing but the box."""
    return box.lower + 0.8 * (box.upper - box.lower)


# --- the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.NETS)
def test_standard_step_is_cross_entropy_in_training_mode(name):
    net = reference.NETS[name]()
    x, y = reference.batch()
    result, found = run(net, Standard(), 0.1)
    logits = net.train()(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    assert_same(found, reference.gradients(net))
    assert result.loss == pytest.approx(loss.item() * len(y), rel=1e-12)
    assert result.natural == int((logits.argmax(1) == y).sum())
    assert result.samples == len(y)
    assert result.robust is None


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("name", reference.NETS)
def test_pgd_step_is_cross_entropy_at_the_attacked_points(name, restarts, monkeypatch):
    net = reference.NETS[name]()
    x, y = reference.batch()
    points = []

    def spy(network, box, goal, **options):
        points.append(real_pgd(network, box, goal, **options))
        assert all(p.grad is None for p in copied.parameters())
        return points[0]

    monkeypatch.setattr(ATTACK, spy)
    copied = copy.deepcopy(net)
    step = Step(trace(copied, reference.SHAPE), PGD(steps=4, restarts=restarts), 0.2)
    result = step(x, y, 0.1, annealing=False)
    (adversarial,) = points
    assert not adversarial.requires_grad
    assert (adversarial - x).abs().max() <= 0.1 + 1e-12
    # The points are constants; the statistics of the clean batch are not.
    logits = reference.Reference(net, x).points(adversarial)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    assert_same(reference.gradients(copied), reference.gradients(net))
    assert result.loss == pytest.approx(loss.item() * len(y), rel=1e-12)
    assert result.robust == int((logits.argmax(1) == y).sum())


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize("keep", ["best", "last"])
def test_attacks_leave_no_gradient_in_parameters(name, keep):
    net = reference.NETS[name]()
    x, y = reference.batch()
    model = training_model(trace(net, reference.SHAPE), x)
    value = PGD(steps=3, restarts=2 if keep == "best" else 1)(model, x, y, 0.1).value
    assert all(p.grad is None for p in net.parameters())
    assert value.requires_grad


def test_ibp_step_counts_what_it_certifies():
    net = reference.plain_net()
    x, _ = reference.batch(64)
    y = net(x).argmax(1)
    y[::4] = (y[::4] + 1) % 3
    result, _ = run(net, IBP(), 0.01, data=(x, y))
    margins, _, _ = reference.Reference(net, x).bounds((x - 0.01).clamp(0), (x + 0.01).clamp(max=1))
    own = margins[torch.arange(64), y]
    own[torch.arange(64), y] = 1.0
    certified = int((own > 0).all(1).sum())
    assert 0 < certified < 48
    assert (result.natural, result.robust) == (48, certified)


# --- parts of a batch -------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [2, 3, 5, 7, 9])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_parts_have_the_gradient_of_the_whole(name, objective, accumulate, radius, monkeypatch):
    check_parts(name, objective, accumulate, radius, monkeypatch)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_parts_with_batchnorms_without_parameters(objective, monkeypatch):
    # The statistics of a BatchNorm at the input depend on no parameter.
    check_parts("odd", objective, 3, 0.1, monkeypatch)


def check_parts(name, objective, accumulate, radius, monkeypatch):
    monkeypatch.setattr(ATTACK, somewhere_in)
    net = reference.NETS[name]()
    method = OBJECTIVES[objective]
    whole, expected = run(net, method, radius, l1=1e-3)
    parts, found = run(net, method, radius, l1=1e-3, accumulate=accumulate)
    assert_same(found, expected)
    assert any(g.abs().max() > 1e-3 for g in expected.values())
    assert parts.loss == pytest.approx(whole.loss, rel=1e-11)
    assert (parts.samples, parts.natural) == (whole.samples, whole.natural)
    assert parts.robust == whole.robust
    assert (whole.robust is None) == (objective == "standard" and radius > 0)


def test_each_part_sees_its_share_of_the_batch(monkeypatch):
    seen = []

    def spy(network, box, goal, **options):
        seen.append((len(box.lower), len(goal.labels)))
        return somewhere_in(network, box, goal)

    monkeypatch.setattr(ATTACK, spy)
    run(reference.norm_net(), PGD(), 0.1, accumulate=3)
    assert seen == [(3, 3), (2, 2), (2, 2)]


# --- L1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_l1_adds_the_sign_of_weights(name, accumulate):
    net = reference.NETS[name]()
    with torch.no_grad():
        net[1].weight[0, 0, 0, 0] = 0.0
    plain, before = run(net, IBP(), 0.1, accumulate=accumulate)
    result, after = run(net, IBP(), 0.1, accumulate=accumulate, l1=0.03)
    weights = {
        f"{key}.weight": m.weight.detach()
        for key, m in net.named_modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    }
    assert len(weights) == 3
    expected = {
        key: value + (0.03 * weights[key].sign() if key in weights else 0.0)
        for key, value in before.items()
    }
    assert_same(after, expected)
    assert result.loss == plain.loss  # the log shows the objective, not the norm


# --- Shi's regularisers -----------------------------------------------------------------------


def slow_regularizer(net, x, radius):
    """Return value and gradients of the regularisers on the bounds at a radius."""
    net.zero_grad()
    ball = ((x - radius).clamp(min=0), (x + radius).clamp(max=1))
    _, first, layers = reference.Reference(net, x).bounds(*ball)
    value = reference.regularizer(first, layers)
    value.backward()
    gradients = reference.gradients(net)
    net.zero_grad()
    assert torch.isfinite(value) and value > 0
    return value.item(), gradients


@pytest.mark.parametrize("radius", [0.01, 0.05])
@pytest.mark.parametrize("name", reference.NETS)
def test_regularizers_fade_as_the_radius_grows(name, radius):
    net, target, weight = reference.NETS[name](), 0.08, 0.7
    data = reference.batch(24)
    options = {"data": data, "target": target, "annealing": True}
    plain, before = run(net, IBP(), radius, **options)
    result, after = run(net, IBP(), radius, **options, regularizer_weight=weight)
    value, gradients = slow_regularizer(net, data[0], radius)
    factor = weight * (1 - radius / target)
    assert result.loss - plain.loss == pytest.approx(24 * factor * value, rel=1e-8)
    assert_same(after, {k: v + factor * gradients[k] for k, v in before.items()}, 1e-8)


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_radius_zero_is_cross_entropy_with_regularizers_of_a_tiny_box(name, objective):
    net = reference.NETS[name]()
    x, y = data = reference.batch(24)
    options = {"data": data, "annealing": True, "regularizer_weight": 0.5}
    result, found = run(net, OBJECTIVES[objective], 0.0, **options)
    value, gradients = slow_regularizer(net, x, 1e-6)
    logits = net.train()(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    expected = {k: v + 0.5 * gradients[k] for k, v in reference.gradients(net).items()}
    # Differences of a box of width 2e-6 carry ten digits at most.
    assert_same(found, expected, 1e-7)
    assert result.loss == pytest.approx(24 * (loss.item() + 0.5 * value), rel=1e-7)
    right = int((logits.argmax(1) == y).sum())
    assert (result.natural, result.robust) == (right, right)


@pytest.mark.parametrize("name", reference.NETS)
def test_regularizers_never_look_at_boxes_below_the_precision(name):
    """The first radii of an annealing are tiny; in float32 their boxes would have no width."""
    net = reference.NETS[name]()
    data = reference.batch(24)
    options = {"data": data, "target": 0.08, "annealing": True}
    plain, before = run(net, IBP(), 1e-9, **options)
    result, after = run(net, IBP(), 1e-9, **options, regularizer_weight=0.5)
    value, gradients = slow_regularizer(net, data[0], 1e-6)
    assert result.loss - plain.loss == pytest.approx(24 * 0.5 * value, rel=1e-6)
    assert_same(after, {k: v + 0.5 * gradients[k] for k, v in before.items()}, 1e-6)


@dataclass(frozen=True)
class Shrunk(Objective):
    """A method that leaves its boxes to the step, and shrinks ReLUs."""

    name: ClassVar[str] = "shrunk"
    propagates_boxes: ClassVar[bool] = True
    shrink: float = 1.0

    @property
    def rules(self):
        return interval_rules(self.shrink)

    def __call__(self, model, x, y, radius):
        return Loss(F.cross_entropy(model.logits, y))


def test_regularizers_look_at_boxes_as_the_method_propagates_them():
    net, data = reference.NETS["plain"](), reference.batch(24)
    options = {"data": data, "target": 0.08, "annealing": True}
    plain = run(net, Shrunk(), 0.04, **options)[0].loss
    full, shrunk = (
        run(net, Shrunk(shrink), 0.04, **options, regularizer_weight=0.5)[0].loss - plain
        for shrink in (1.0, 0.5)
    )
    assert full == pytest.approx(24 * 0.25 * slow_regularizer(net, data[0], 0.04)[0], rel=1e-6)
    assert shrunk < full


@pytest.mark.parametrize("annealing,radius", [(False, 0.0), (False, 0.05), (True, 0.2)])
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_no_regularizers_after_annealing_or_at_the_target(name, annealing, radius):
    net = reference.NETS[name]()
    _, expected = run(net, IBP(), radius, annealing=False)
    _, found = run(net, IBP(), radius, annealing=annealing, regularizer_weight=5.0)
    assert_same(found, expected)


@pytest.mark.parametrize("radius", [0.0, 0.02])
@pytest.mark.parametrize("name", ["plain", "norm", "odd"])
def test_regularizers_of_parts_are_those_of_the_batch(name, radius):
    net, data = reference.NETS[name](), reference.batch(24)
    options = {"data": data, "annealing": True, "regularizer_weight": 0.5}
    whole, expected = run(net, IBP(), radius, **options)
    result, found = run(net, IBP(), radius, accumulate=5, **options)
    _, without = run(net, IBP(), radius, data=data)
    assert_same(found, expected, 1e-8)
    assert any(not torch.equal(without[key], value) for key, value in expected.items())
    assert result.loss == pytest.approx(whole.loss, rel=1e-8)


@pytest.mark.parametrize("radius", [0.0, 0.05])
@pytest.mark.parametrize("activation", [nn.Identity, nn.LeakyReLU, nn.Tanh])
def test_networks_without_relus_can_be_trained(activation, radius):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), activation(), nn.Linear(4, 3)).double()
    _, expected = run(net, IBP(), radius)
    _, found = run(net, IBP(), radius, annealing=True, regularizer_weight=0.5)
    assert_same(found, expected)
