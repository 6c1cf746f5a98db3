"""DiffAI and CAP: what they minimise, their mixtures and schedules, and what they refuse."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from torch import nn

from tightrope.box import Box
from tightrope.domains import interval, zonotope
from tightrope.domains.error_terms import Errors
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, training_model
from tightrope.training.objectives import CAP, IBP, DiffAI, diffai, zonotopes
from tightrope.training.settings import Settings
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

RADIUS = 0.1
DOMAINS = {
    "box": DiffAI(),
    "h": DiffAI(domain="h", relu="switch"),
    "hrand": DiffAI(domain="hrand", correlated=7, relu="smooth"),
    "z": DiffAI(domain="z", relu="deepz"),
    "elided": DiffAI(domain="z", relu="deepz", loss="margins"),
    "cap": CAP(),
    "estimated": CAP(projections=4),
}


def run(net, objective, *, progress=1.0, radius=RADIUS, data=None):
    """Return the loss and its gradients."""
    net = copy.deepcopy(net)
    x, y = data or reference.batch()
    model = training_model(trace(net, reference.SHAPE), x)
    model.progress = progress
    torch.manual_seed(4)
    loss = objective(model, x, y, radius)
    loss.value.backward()
    return loss, reference.gradients(net)


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


# --- one domain at a time ---------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.NETS)
def test_elided_boxes_are_ibp_bit_for_bit(name):
    net = reference.NETS[name]()
    expected, gradients = run(net, IBP())
    found, same = run(net, DiffAI(loss="margins"))
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.robust, expected.robust)
    assert all(torch.equal(same[k], gradients[k]) for k in gradients)


@pytest.mark.parametrize("name", reference.NETS)
def test_cap_is_the_elided_loss_of_zonotopes(name):
    """Forwards with a new error term per neuron, and backwards by the dual network."""
    net = reference.NETS[name]()
    forward, gradients = run(net, DOMAINS["elided"])
    backward, same = run(net, CAP())
    torch.testing.assert_close(backward.value, forward.value, rtol=1e-12, atol=1e-12)
    assert torch.equal(backward.robust, forward.robust)
    assert_same(same, gradients)


def test_outputs_are_bounded_apart_and_margins_together():
    net, (x, y) = reference.plain_net(), reference.batch()
    graph = trace(copy.deepcopy(net), reference.SHAPE)
    box, own = Box.ball(x, RADIUS), F.one_hot(y, 3).bool()
    for options, kind in (({"domain": "z", "relu": "deepz"}, Errors()), ({}, None)):
        if kind is None:
            ends = interval.bounds(graph, box)[0]
        else:
            ends = zonotope.bounds(graph, box, errors=kind)[0]
        expected = F.cross_entropy(torch.where(own, ends.lower, ends.upper), y)
        apart, _ = run(net, DiffAI(**options))
        together, _ = run(net, DiffAI(loss="margins", **options))
        torch.testing.assert_close(apart.value, expected)
        assert together.value < apart.value


def test_the_worst_margin_alone():
    net, (x, y) = reference.plain_net(), reference.batch()
    margins, _ = zonotope.margins(trace(net, reference.SHAPE), Box.ball(x, RADIUS), y)
    expected = 0.0
    for row, label in zip(margins.tolist(), y.tolist(), strict=True):
        worst = max(-m for i, m in enumerate(row) if i != label)
        expected += math.log1p(math.exp(worst)) / len(y)
    loss, _ = run(net, DiffAI(domain="z", relu="deepz", loss="worst"))
    assert loss.value.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", DOMAINS)
def test_at_radius_zero_it_is_the_clean_loss(name):
    for build in (reference.plain_net, reference.norm_net):
        net, (x, y) = build(), reference.batch()
        found, _ = run(net, DOMAINS[name], radius=0.0)
        clean = F.cross_entropy(net.train()(x), y).item()
        assert found.value.item() == pytest.approx(clean, rel=1e-9)


@pytest.mark.parametrize("name", [n for n in DOMAINS if n != "estimated"])
def test_the_loss_lies_above_that_of_every_point(name):
    net, (x, y) = reference.plain_net(), reference.batch()
    loss, _ = run(net, DOMAINS[name])
    points = Box.ball(x, RADIUS).repeat(300).sample()
    losses = F.cross_entropy(net(points), y.repeat_interleave(300), reduction="none")
    assert losses.view(-1, 300).amax(1).mean().item() <= loss.value.item()


@pytest.mark.parametrize(
    ("net", "name"), [("odd", "h"), ("plain", "z"), ("plain", "cap"), ("plain", "estimated")]
)
def test_gradients_by_finite_differences(net, name):
    module = reference.NETS[net]()
    _, gradients = run(module, DOMAINS[name], radius=0.05)
    step = 1e-6
    for key, _ in module.named_parameters():
        place = gradients[key].abs().argmax()
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(module)
            moved.get_parameter(key).data.view(-1)[place] += sign * step
            ends.append(run(moved, DOMAINS[name], radius=0.05)[0].value.item())
        measured = (ends[0] - ends[1]) / (2 * step)
        assert measured == pytest.approx(gradients[key].view(-1)[place].item(), rel=1e-4, abs=1e-6)


def test_projections_estimate_the_bounds_of_layers_only():
    """With more vectors than neurons nothing is estimated; few of them give other numbers."""
    net = reference.plain_net()
    exact, many, few = (run(net, CAP(projections=k))[0].value.item() for k in (0, 1000, 4))
    assert many == pytest.approx(exact, rel=1e-9)
    assert few != pytest.approx(exact, rel=1e-3)


# --- mixtures ---------------------------------------------------------------------------------


def regions(monkeypatch, objective, *, progress=1.0, radius=RADIUS):
    """Return the boxes that are bounded, and those that are attacked."""
    bounded, attacked = [], []
    bounds, attack = diffai.worst_logits, diffai.pgd

    def seen(model, box, *args, **options):
        bounded.append(box)
        return bounds(model, box, *args, **options)

    def tried(network, box, *args, **options):
        attacked.append(box)
        return attack(network, box, *args, **options)

    monkeypatch.setattr(diffai, "worst_logits", seen)
    monkeypatch.setattr(diffai, "pgd", tried)
    loss, _ = run(reference.plain_net(), objective, progress=progress, radius=radius)
    return loss, bounded, attacked


@pytest.mark.parametrize("center", ["random", "attack"])
def test_the_small_ball_lies_inside_the_ball(center, monkeypatch):
    objective = DiffAI(center=center, start_ratio=0.0, end_ratio=0.3)
    _, (small,), attacked = regions(monkeypatch, objective)
    ball = Box.ball(reference.batch()[0], RADIUS)
    torch.testing.assert_close(small.radius, 0.3 * ball.radius)
    assert (small.lower >= ball.lower - 1e-12).all() and (small.upper <= ball.upper + 1e-12).all()
    assert not torch.allclose(small.center, ball.center)
    if center == "attack":  # AdvInclusion: confined to where the centre may be
        torch.testing.assert_close(attacked[0].radius, 0.7 * ball.radius)
    else:
        assert not attacked
        again = regions(monkeypatch, objective)[1][0]
        assert torch.equal(again.center, small.center)  # the same seed


def test_centres_of_insamp_are_spread_over_the_room_they_have():
    x = torch.full((4000, 1), 0.5, dtype=torch.float64)
    net = FixedModel(trace(nn.Linear(1, 2).double(), (1,)), x)
    torch.manual_seed(0)
    objective = DiffAI(center="random", end_ratio=0.4)
    small = objective._region(net, Box.ball(x, 0.1), x, torch.zeros(4000).long(), 0.4)
    offset = (small.center - x) / 0.06
    assert offset.abs().max() <= 1 + 1e-9
    assert offset.mean().abs() < 0.05 and abs(offset.abs().mean() - 0.5) < 0.02


def test_the_published_schedule():
    """Radii, lambda and weights over 420 epochs, by `Lin(start, end, steps, until)`."""
    objective = DiffAI(
        center="random",
        start_ratio=0.0,
        start_weight=0.0,
        end_weight=0.5,
        delay=1 / 6,
        attack_ready=5 / 9,
    )

    def lin(start, end, steps, until, epoch):
        return start + (end - start) * min(1.0, max(0.0, (epoch - until) / steps))

    for epoch in (30, 50, 80, 120, 160, 200, 300):
        progress = lin(0, 1, 180, 20, epoch)
        with pytest.MonkeyPatch.context() as patch:
            _, bounded, attacked = regions(
                patch, objective, progress=progress, radius=0.2 * progress
            )
        ball = Box.ball(reference.batch()[0], lin(0, 0.2, 100, 20, epoch))
        torch.testing.assert_close(attacked[0].lower, ball.lower)
        weight = lin(0, 0.5, 150, 50, epoch)
        assert len(bounded) == (weight > 0)
        if bounded:
            whole = Box.ball(reference.batch()[0], lin(0, 0.2, 150, 50, epoch))
            torch.testing.assert_close(bounded[0].radius, lin(0, 1, 150, 50, epoch) * whole.radius)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_mixture_is_linear_in_the_weight(weight):
    net = reference.plain_net()
    ends = [run(net, DiffAI(start_weight=w, end_weight=w))[0].value.item() for w in (0.0, 1.0)]
    found = run(net, DiffAI(start_weight=0.9, end_weight=weight))[0].value.item()
    assert found == pytest.approx((1 - weight) * ends[0] + weight * ends[1], rel=1e-12)


def test_the_attack_is_the_iterated_fgsm():
    """k steps of a k-th of the radius along the sign of the gradient, from the input."""
    net, (x, y) = reference.plain_net(), reference.batch()
    x = 0.3 + 0.4 * x  # the ball is not clipped
    points = x.clone()
    for _ in range(3):
        points = points.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(points), y, reduction="sum"), points)
        points = points + 0.05 / 3 * slope.sign()
    expected = F.cross_entropy(net(points), y).item()
    found, _ = run(net, DiffAI(start_weight=0.0, end_weight=0.0), radius=0.05, data=(x, y))
    assert found.value.item() == pytest.approx(expected, rel=1e-9)


# --- as other methods -------------------------------------------------------------------------

WHOLE = {**DOMAINS, "mixed": DiffAI(domain="h", relu="deepz", end_weight=0.4)}


@pytest.mark.parametrize("name", [n for n in WHOLE if n not in ("hrand", "estimated")])
@pytest.mark.parametrize("net", reference.NETS)
def test_parts_of_a_batch_have_the_gradient_of_the_whole(net, name):
    results = []
    for accumulate in (1, 3):
        module = reference.NETS[net]()
        graph = trace(module, reference.SHAPE)
        step = Step(graph, WHOLE[name], target=0.2, natural_weight=0.2, accumulate=accumulate)
        results.append((step(*reference.batch(), RADIUS, annealing=True), module))
    (whole, first), (sums, second) = results
    assert sums.loss == pytest.approx(whole.loss, rel=1e-9)
    assert (sums.natural, sums.robust) == (whole.natural, whole.robust)
    assert_same(reference.gradients(second), reference.gradients(first))


@pytest.mark.parametrize("name", [n for n in DOMAINS if n != "box"])
def test_less_memory_gives_the_same_gradient(name, monkeypatch):
    """Also where something is drawn: for the whole batch, before it is cut."""
    net = reference.norm_net()
    expected, gradients = run(net, DOMAINS[name])
    parts = []
    compute = zonotopes.checkpoint
    monkeypatch.setattr(
        zonotopes, "checkpoint", lambda *given, **how: parts.append(0) or compute(*given, **how)
    )
    monkeypatch.setattr(zonotopes, "MEMORY", 1)
    found, same = run(net, DOMAINS[name])
    assert len(parts) == 7
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-12)
    assert_same(same, gradients)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"diffai.domain": "zonotope"}, "diffai.domain must be one of box, h, hrand, z, got"),
        ({"diffai.relu": "deepz"}, "diffai.relu = deepz needs error terms, of which diffai.domain"),
        ({"diffai.end_ratio": 0.5}, "diffai.start_ratio and end_ratio are those of a ball inside"),
        ({"diffai.delay": 1}, "diffai.delay must be at least 0 and below 1, got 1"),
        ({"diffai.attack_ready": 0}, "diffai.attack_ready must be above 0 and at most 1, got 0"),
        ({"diffai.correlated": 0}, "diffai.correlated must be at least 1, got 0"),
        ({"diffai.end_weight": 1.2}, "diffai.end_weight must be between 0 and 1, got 1.2"),
        ({"method": "cap", "cap.projections": -1}, "cap.projections must be at least 0, got -1"),
        ({"method": "cap", "cap.domain": "h"}, "unknown setting 'cap.domain'"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(UserError) as caught:
        Settings.parse({"method": "diffai", **given}).objective()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_networks_that_are_too_large_are_refused():
    convolutions = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    net = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(64 * 784, 10))
    graph = trace(net, (1, 28, 28))
    for objective in (DiffAI(), DiffAI(domain="hrand", relu="switch", correlated=10)):
        objective.check(graph)
    with pytest.raises(UserError, match=r"^diffai\.domain = z would keep \d+\.\d GiB for each sam"):
        DiffAI(domain="z", relu="deepz").check(graph)
    with pytest.raises(UserError, match=r"^cap would keep \d+\.\d GiB for each sample of this"):
        CAP().check(trace(nn.Sequential(nn.Linear(20000, 20000), nn.ReLU()), (20000,)))


def test_cap_refuses_other_activations_by_name():
    graph = trace(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)), (3,))
    with pytest.raises(UserError, match=r"cap is for networks of ReLUs, and '1' is a Sigmoid; use"):
        CAP().check(graph)
    DiffAI(domain="z", relu="deepz").check(graph)


def test_other_activations_have_error_terms_too():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3))
    net = net.double()
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    points = Box.ball(x, 0.2).repeat(500).sample()
    losses = F.cross_entropy(net(points), y.repeat_interleave(500), reduction="none")
    worst = losses.view(-1, 500).amax(1).mean().item()
    for domain in ("h", "z", "hrand"):
        objective = replace(DOMAINS["elided"], domain=domain, correlated=2)
        value = objective(FixedModel(trace(net, (3,)), x), x, y, 0.2).value
        assert worst <= value.item() <= worst + 1


def test_the_bytes_of_a_sample_follow_the_error_terms():
    graph = trace(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,))
    sizes = {
        "z": 2 * (4 * 6 + 4 * 6 + 10 * 3),
        "h": 2 * (4 * 6 + 4 * 6 + 4 * 3),
        "hrand": 2 * (2 * 6 + 2 * 6 + 2 * 3),
    }
    for domain, terms in sizes.items():
        errors = DiffAI(domain=domain, relu="deepz", correlated=2).errors
        assert zonotopes.sample_bytes(graph, errors) == 4 * (terms + 8 * 15)
    assert zonotopes.sample_bytes(graph, Errors(projections=3)) == 4 * (
        2 * (3 * 6 + 3 * 6 + 6 * 3) + 8 * 15
    )
