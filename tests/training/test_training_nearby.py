"""Gaussian loss smoothing and sharpness-aware minimisation."""

import copy
import math

import pytest
import torch
import training_reference as reference
from torch import nn

from tightrope.graph import trace
from tightrope.training import nearby
from tightrope.training.nearby import SharpnessAware, Smoothed, moved
from tightrope.training.objectives import IBP, PGD, Loss, Standard
from tightrope.training.regularizers import l1
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def one_layer(weight):
    """A network with nothing but a weight."""
    net = nn.Sequential(nn.Linear(len(weight), 1, bias=False)).double()
    net[0].weight.data.copy_(torch.tensor([weight], dtype=torch.float64))
    return net


def of_weights(function):
    """An objective that is a function of the weights alone."""

    def objective(model, x, y, radius):
        return Loss(function(model.graph.nodes[-1].op.weight[0]))

    return objective


def gradient(function, weight, wrapped, seed=0):
    """Return what a wrapped step leaves in the weight."""
    net = one_layer(weight)
    before = net[0].weight.detach().clone()
    step = Step(trace(net, (len(weight),)), of_weights(function), 0.1)
    torch.manual_seed(seed)
    x = torch.zeros(2, len(weight), dtype=torch.float64)
    wrapped(step)(x, torch.tensor([0, 0]), 0.1, annealing=False)
    assert torch.equal(net[0].weight, before)
    return net[0].weight.grad[0]


def quadratic(weight):
    return weight @ A @ weight / 2


def step_function(weight):
    """1[theta > 0]: no slope anywhere."""
    return (weight[0] > 0).to(weight.dtype)


# --- smoothing --------------------------------------------------------------------------------


def test_gradients_of_a_quadratic_are_its_own():
    """Antithetic pairs have its exact gradient in their mean."""
    theta = [0.7, -1.2]
    expected = A @ torch.tensor(theta, dtype=torch.float64)
    found = gradient(quadratic, theta, lambda step: Smoothed(step, "rgs", 0.5, 3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_losses_of_a_quadratic_estimate_its_gradient():
    """`(L(theta + d) - L(theta - d)) d / (2 s^2) = (d d' / s^2) A theta`, in the mean A theta."""
    theta, pairs = [0.7, -1.2], 500
    expected = A @ torch.tensor(theta, dtype=torch.float64)
    found = gradient(quadratic, theta, lambda step: Smoothed(step, "pgpe", 0.5, pairs))
    # Each component has the variance (|g|^2 + g_i^2) / pairs.
    deviation = ((expected.norm() ** 2 + expected**2) / pairs).sqrt()
    assert ((found - expected).abs() < 5 * deviation).all()
    torch.manual_seed(0)
    d = 0.5 * torch.cat([torch.randn(1, 2, dtype=torch.float64) for _ in range(pairs)])
    by_hand = ((d @ expected)[:, None] * d).mean(0) / 0.25
    torch.testing.assert_close(found, by_hand, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("theta", [0.0, 0.3, -0.6])
def test_a_step_function(theta):
    """Smoothed it is Phi(theta / s), of slope phi(theta / s) / s; gradients see none of it."""
    sigma, pairs = 0.5, 1000
    assert not gradient(step_function, [theta], lambda s: Smoothed(s, "rgs", sigma, 5)).any()
    found = gradient(step_function, [theta], lambda s: Smoothed(s, "pgpe", sigma, pairs)).item()
    slope = math.exp(-((theta / sigma) ** 2) / 2) / math.sqrt(2 * math.pi) / sigma
    assert abs(found - slope) < 5 / (2 * sigma) / math.sqrt(pairs)


def taken(name, objective, wrap=lambda step: step, count=7, **options):
    """Return the result, gradients and buffers of one step on a fresh network."""
    net = reference.NETS[name]()
    before = copy.deepcopy(net.state_dict())
    step = Step(trace(net, reference.SHAPE), objective, 0.2, **options)
    torch.manual_seed(5)
    result = wrap(step)(*reference.batch(count), 0.05, annealing=False)
    named = dict(net.named_parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in named.items())
    return result, reference.gradients(net), dict(net.named_buffers())


@pytest.mark.parametrize("kind", ["rgs", "pgpe"])
@pytest.mark.parametrize("name", reference.NETS)
def test_smoothing_by_hand(name, kind):
    """Every draw written out: weights moved, statistics of the batch at the present weights."""
    sigma, pairs, objective = 0.05, 2, IBP()
    _, found, buffers = taken(name, objective, lambda s: Smoothed(s, kind, sigma, pairs), l1=1e-2)
    net = reference.NETS[name]()
    x, y = reference.batch()
    parameters = list(net.parameters())
    center = [p.detach().clone() for p in parameters]
    slow = reference.Reference(net, x)
    constant = {k: (m.detach(), v.detach()) for k, (m, v) in slow.statistics.items()}
    total = [torch.zeros_like(p) for p in parameters]
    torch.manual_seed(5)
    for _ in range(pairs):
        noise = [torch.randn_like(p) for p in parameters]
        losses = []
        for sign in (1, -1):
            for p, c, n in zip(parameters, center, noise, strict=True):
                p.data = c + sign * sigma * n
            slow.statistics = constant
            loss = slow.ibp_loss(x, y, 0.05)
            losses.append(loss.item())
            if kind == "rgs":
                for t, g in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                    t += g / (2 * pairs)
        if kind == "pgpe":
            for t, n in zip(total, noise, strict=True):
                t += (losses[0] - losses[1]) * n / (2 * sigma * pairs)
    for p, c in zip(parameters, center, strict=True):
        p.data = c
    penalty = torch.autograd.grad(
        l1(trace(net, reference.SHAPE)) * 1e-2, parameters, allow_unused=True
    )
    for t, g in zip(total, penalty, strict=True):
        t += 0 if g is None else g
    expected = dict(zip(dict(net.named_parameters()), total, strict=True))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8, msg=key)
    net.train()(x)  # one clean pass moves the running statistics, however many are drawn
    for key, value in net.named_buffers():
        torch.testing.assert_close(buffers[key], value, msg=key)


@pytest.mark.parametrize("kind", ["rgs", "pgpe"])
def test_both_of_a_pair_see_the_same_points(kind, monkeypatch):
    draws = []

    def spy(model, box, y, **_):
        draws.append(box.sample())
        return draws[-1]

    monkeypatch.setattr("tightrope.training.objectives.pgd.adversarial_points", spy)
    taken("norm", PGD(), lambda s: Smoothed(s, kind, 0.01, 2))
    assert len(draws) == 4
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[2], draws[3])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("kind", ["rgs", "pgpe"])
@pytest.mark.parametrize("name", ["norm", "odd"])
def test_parts_of_a_smoothed_step_are_the_whole(name, kind):
    options = {"natural_weight": 0.2, "l1": 1e-3, "regularizer_weight": 0.5}
    wrap = {"wrap": lambda s: Smoothed(s, kind, 0.05, 2)}
    whole = taken(name, IBP(), **wrap, **options)
    parts = taken(name, IBP(), **wrap, **options, accumulate=3)
    for found, expected in zip(parts[1:], whole[1:], strict=True):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8, msg=key)
    assert parts[0].loss == pytest.approx(whole[0].loss, rel=1e-9)


def test_what_a_smoothed_step_reports():
    results = iter([(1.0, 2, 1), (3.0, 3, 2), (4.0, 5, 2), (8.0, 5, 3)])

    def scripted(self, x, y, radius, *, annealing):
        loss, natural, robust = next(results)
        return nearby.StepResult(7, loss, natural, robust)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", scripted)
        result = taken("plain", Standard(), lambda s: Smoothed(s, "rgs", 0.1, 2))[0]
    assert (result.samples, result.loss, result.natural, result.robust) == (7, 4.0, 5, 3)


# --- sharpness --------------------------------------------------------------------------------


def test_uphill_by_hand():
    """One tensor: from (3, 4) / 5 of length rho; the gradient there."""
    theta, rho = [0.7, -1.2], 0.3
    weight = torch.tensor(theta, dtype=torch.float64)
    first = A @ weight
    expected = A @ (weight + rho * first / first.norm())
    found = gradient(quadratic, theta, lambda step: SharpnessAware(step, rho))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    flat = gradient(quadratic, [0.0, 0.0], lambda step: SharpnessAware(step, rho))
    assert not flat.any()  # no gradient, no way up


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", reference.NETS)
def test_sam_by_hand(name, accumulate):
    """Each tensor goes up by its own norm; the way is shown by the network in evaluation mode."""
    rho, objective = 0.1, IBP()
    options = {"l1": 1e-2, "accumulate": accumulate}
    _, found, buffers = taken(name, objective, lambda s: SharpnessAware(s, rho), **options)
    net = reference.NETS[name]()
    x, y = reference.batch()
    named = dict(net.named_parameters())
    slow = reference.Reference(net, x)
    slow.statistics = {m: (m.running_mean, m.running_var) for m in slow.statistics}
    penalty = 1e-2 * l1(trace(net, reference.SHAPE))
    first = torch.autograd.grad(slow.ibp_loss(x, y, 0.05) + penalty, list(named.values()))
    for parameter, g in zip(named.values(), first, strict=True):
        parameter.data += rho * g / g.norm()
    clean = copy.deepcopy(net)
    slow = reference.Reference(net, x)
    loss = slow.ibp_loss(x, y, 0.05) + 1e-2 * l1(trace(net, reference.SHAPE))
    second = torch.autograd.grad(loss, list(named.values()))
    for key, value in zip(named, second, strict=True):
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8, msg=key)
    clean.train()(x)  # running statistics follow the second pass alone
    for key, value in clean.named_buffers():
        torch.testing.assert_close(buffers[key], value, msg=key)


def test_moved_weights_come_back_whatever_happens():
    weight = nn.Parameter(torch.randn(3, 3))
    before = weight.detach().clone()
    with pytest.raises(ZeroDivisionError), moved([weight], [torch.ones(3, 3)], 1e-3):
        assert not torch.equal(weight, before)
        raise ZeroDivisionError
    assert torch.equal(weight, before)
