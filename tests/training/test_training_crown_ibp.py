"""CROWN-IBP: margins, fusion, its schedule, and what it refuses."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from torch import nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.linear import batch
from tightrope.domains.linear.crown import CROWN_IBP, Effort, relax
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, training_model
from tightrope.training.objectives import CROWNIBP, IBP, crown_ibp
from tightrope.training.settings import Settings
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

RADIUS = 0.1
LOSSES = ("margins", "fused")


def run(net, objective, *, progress=1.0, radius=RADIUS, data=None):
    """Return the loss and its gradients."""
    net = copy.deepcopy(net)
    x, y = data or reference.batch()
    model = training_model(trace(net, reference.SHAPE), x)
    model.progress = progress
    loss = objective(model, x, y, radius)
    loss.value.backward()
    return loss, reference.gradients(net)


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def clean_loss(net, data):
    x, y = data
    return F.cross_entropy(net.train()(x), y).item()


# --- the margins ------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bounds", ["crown-ibp", "crown"])
@pytest.mark.parametrize("name", reference.NETS)
def test_without_linear_bounds_it_is_ibp_bit_for_bit(name, bounds, loss):
    net = reference.NETS[name]()
    expected, gradients = run(net, IBP())
    found, same = run(net, CROWNIBP(bounds=bounds, loss=loss))  # beta is 0 at the full radius
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.robust, expected.robust)
    assert all(torch.equal(same[k], gradients[k]) for k in gradients)


# With residual sums ours are tighter than `relax`'s: it leaves stable neurons to intervals.
CHAINS = [(name, "crown", Effort(0, forms=False)) for name in ("plain", "norm")]


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize(
    ("name", "bounds", "effort"),
    [*((name, "crown-ibp", CROWN_IBP) for name in reference.NETS), *CHAINS],
)
def test_margins_are_those_of_the_linear_domain(name, beta, bounds, effort):
    net = reference.NETS[name]()
    x, y = reference.batch()
    loss, _ = run(net, CROWNIBP(end_beta=beta, bounds=bounds))
    graph = training_model(trace(copy.deepcopy(net), reference.SHAPE), x).graph
    ball = Box.ball(x, RADIUS)
    plain = relax(graph, ball, effort=effort)
    own = batch.lower_bounds(
        plain, plain.output, torch.eye(3).double()[y].unsqueeze(1) - torch.eye(3)
    )
    intervals, _ = interval.margins(graph, ball, y)
    mixed = beta * own + (1 - beta) * intervals  # the row of the true class is zero
    torch.testing.assert_close(loss.value, F.cross_entropy(-mixed, y), rtol=1e-9, atol=1e-9)
    wrong = mixed.scatter(1, y[:, None], math.inf)
    assert loss.robust.tolist() == (wrong.amin(1) > 0).tolist()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", reference.NETS)
def test_at_radius_zero_it_is_the_clean_loss(name, loss):
    net, data = reference.NETS[name](), reference.batch()
    found, _ = run(net, CROWNIBP(end_beta=1.0, loss=loss), radius=0.0, data=data)
    assert found.value.item() == pytest.approx(clean_loss(net, data), rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["plain", "norm", "odd"])
def test_gradients_by_finite_differences(name, loss):
    net = reference.NETS[name]()
    objective = CROWNIBP(end_beta=0.6, loss=loss, end_kappa=0.2)
    _, gradients = run(net, objective, radius=0.05)
    step = 1e-6
    for key, parameter in net.named_parameters():
        place = gradients[key].abs().argmax()
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(net)
            moved.get_parameter(key).data.view(-1)[place] += sign * step
            ends.append(run(moved, objective, radius=0.05)[0].value.item())
        measured = (ends[0] - ends[1]) / (2 * step)
        assert measured == pytest.approx(gradients[key].view(-1)[place].item(), rel=1e-4, abs=1e-6)
        assert parameter.shape == gradients[key].shape


def test_beta_and_kappa_follow_the_radius():
    net, data = reference.plain_net(), reference.batch()
    ends = [run(net, CROWNIBP(end_beta=b))[0].value.item() for b in (1.0, 0.7, 0.4)]
    found = [run(net, CROWNIBP(end_beta=0.4), progress=p)[0].value.item() for p in (0.0, 0.5, 1.0)]
    assert found == pytest.approx(ends, rel=1e-12)
    mixed = CROWNIBP(end_beta=1.0, start_kappa=0.6, end_kappa=0.2)
    for progress, kappa in ((0.0, 0.6), (0.5, 0.4), (1.0, 0.2)):
        value = run(net, mixed, progress=progress)[0].value.item()
        assert value == pytest.approx(kappa * clean_loss(net, data) + (1 - kappa) * ends[0])


def test_negligible_linear_bounds_are_not_computed(monkeypatch):
    monkeypatch.setattr(crown_ibp.batch, "lower_bounds", None)
    net = reference.plain_net()
    run(net, CROWNIBP(end_beta=0.9e-5))
    with pytest.raises(TypeError):
        run(net, CROWNIBP(end_beta=1.1e-5))


# --- fusion -----------------------------------------------------------------------------------


def two_classes(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_the_fused_loss_lies_above_that_of_every_point(seed, beta):
    net = two_classes(seed)
    x = torch.rand(1, 3, dtype=torch.float64)
    for label in (0, 1):
        y = torch.tensor([label])
        model = FixedModel(trace(net, (3,)), x)
        fused = CROWNIBP(end_beta=beta, loss="fused")(model, x, y, 0.3).value.item()
        points = Box.ball(x, 0.3).repeat(2000).sample()
        worst = F.cross_entropy(net(points), y.expand(2000), reduction="none").max().item()
        assert worst <= fused <= 4 * worst + 1


@pytest.mark.parametrize("name", reference.NETS)
def test_the_fused_loss_is_the_bound_of_a_sum_of_chords(name):
    """By hand, one sample and class after the other; the sum by the plain linear domain."""
    net = reference.NETS[name]()
    x, y = reference.batch()
    beta = 0.3
    loss, _ = run(net, CROWNIBP(end_beta=beta, loss="fused"))
    graph = training_model(trace(copy.deepcopy(net), reference.SHAPE), x).graph
    ball = Box.ball(x, RADIUS)
    lower, _ = interval.margins(graph, ball, y)
    # The upper margin of class i is minus the lower one of `o_i - o_y`.
    upper = torch.stack(
        [-interval.margins(graph, ball, torch.full_like(y, i))[0].gather(1, y[:, None])[:, 0]
         for i in range(3)], 1,
    )  # fmt: skip
    k = (torch.exp(-upper) - torch.exp(-lower)) / (upper - lower)
    plain = relax(graph, ball, effort=CROWN_IBP)
    total = 0.0
    for n, label in enumerate(y.tolist()):
        wrong = [i for i in range(3) if i != label]
        row = torch.zeros(1, 3, dtype=x.dtype)
        for i in wrong:
            row[0, label] -= k[n, i]
            row[0, i] += k[n, i]
        rows = torch.zeros(len(y), 1, 3, dtype=x.dtype)
        rows[n] = row
        least = batch.lower_bounds(plain, plain.output, rows)[n, 0]
        chords = sum(torch.exp(-lower[n, i]) - k[n, i] * lower[n, i] for i in wrong)
        by_lines = 1 + chords - least
        by_intervals = 1 + sum(torch.exp(-lower[n, i]) for i in wrong)
        total = total + torch.log((beta * by_lines + (1 - beta) * by_intervals).clamp(min=1))
    torch.testing.assert_close(loss.value, total / len(y), rtol=1e-9, atol=1e-9)


def test_the_fused_loss_of_huge_margins_is_finite():
    net = two_classes()
    with torch.no_grad():
        net[2].weight.mul_(1e6)
    x = torch.rand(4, 3)
    for y in (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)):
        single = copy.deepcopy(net).float()
        loss = CROWNIBP(end_beta=0.5, loss="fused")(FixedModel(trace(single, (3,)), x), x, y, 0.1)
        loss.value.backward()
        assert loss.value.isfinite() and loss.value >= 0
        assert all(g.isfinite().all() for g in reference.gradients(single).values())


def test_chords_of_points_are_tangents():
    """Where a margin has no width, the slope of its chord is that of the exponential."""
    lower = torch.tensor([[0.0, 0.7, -2.0]], dtype=torch.float64)
    graph = trace(nn.Sequential(nn.Flatten(), nn.Linear(1, 3)).double(), (1,))
    with torch.no_grad():
        graph.nodes[-1].op.weight.zero_()
        graph.nodes[-1].op.bias.copy_(-lower[0])
    found = batch.relaxed_by_intervals(graph, Box.ball(torch.zeros(1, 1).double(), 0.0), {})
    for width in (0.0, 1e-6, 1e-3):
        value = crown_ibp.fused_loss(found, lower, lower + width, torch.tensor([0]), 1.0)
        expected = math.log(1 + math.exp(-0.7) + math.exp(2.0))
        assert value.item() == pytest.approx(expected, abs=2 * width + 1e-12)


# --- as other methods -------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", reference.NETS)
def test_parts_of_a_batch_have_the_gradient_of_the_whole(name, loss, parts):
    results = []
    for accumulate in (1, parts):
        net = reference.NETS[name]()
        objective = CROWNIBP(end_beta=0.2, loss=loss, start_kappa=0.5, end_kappa=0.1)
        step = Step(
            trace(net, reference.SHAPE),
            objective,
            target=0.2,
            regularizer_weight=0.5,
            accumulate=accumulate,
        )
        result = step(*reference.batch(), RADIUS, annealing=True)
        results.append((result, reference.gradients(net)))
    (whole, expected), (sums, found) = results
    assert sums.loss == pytest.approx(whole.loss, rel=1e-9)
    assert (sums.natural, sums.robust) == (whole.natural, whole.robust)
    assert_same(found, expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_less_memory_gives_the_same_gradient(loss, monkeypatch):
    expected, gradients = run(reference.norm_net(), CROWNIBP(end_beta=0.5, loss=loss))
    monkeypatch.setattr(crown_ibp, "MEMORY", 1)
    found, same = run(reference.norm_net(), CROWNIBP(end_beta=0.5, loss=loss))
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-12)
    assert_same(same, gradients)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_trainer_gets_the_boxes_it_watches(loss):
    x, y = reference.batch()
    model = training_model(trace(reference.norm_net(), reference.SHAPE), x)
    model.progress, model.watched = 0.5, (0, 2, 3)
    boxes = CROWNIBP(loss=loss)(model, x, y, RADIUS).boxes
    expected = IBP()(model, x, y, RADIUS).boxes
    assert boxes.keys() == set(model.watched)
    for i in model.watched:
        torch.testing.assert_close(boxes[i].lower, expected[i].lower)


def test_bounds_of_every_layer_are_refused_for_large_networks():
    large = nn.Sequential(nn.Linear(784, 4000), nn.ReLU(), nn.Linear(4000, 10))
    graph = trace(large, (784,))
    CROWNIBP().check(graph)
    with pytest.raises(UserError, match=r"crown-ibp\.bounds = crown is for small .* 4000 numbers"):
        CROWNIBP(bounds="crown").check(graph)
    CROWNIBP(bounds="crown").check(trace(reference.plain_net(), reference.SHAPE))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"crown-ibp.end_beta": 1.5}, "crown-ibp.end_beta must be between 0 and 1, got 1.5"),
        ({"crown-ibp.start_kappa": -1}, "crown-ibp.start_kappa must be between 0 and 1, got -1"),
        ({"crown-ibp.loss": "sum"}, "crown-ibp.loss must be one of margins, fused, got"),
        ({"crown-ibp.bounds": "ibp"}, "crown-ibp.bounds must be one of crown-ibp, crown, got"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(UserError) as caught:
        Settings.parse({"method": "crown-ibp", **given}).objective()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_networks_that_do_not_end_in_a_linear_layer():
    """Margins are then differences of two bounds; the fused chords lie between them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3), nn.LeakyReLU(0.1)).double()
    x, y = torch.rand(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    for loss in LOSSES:
        model = FixedModel(trace(net, (3,)), x)
        value = CROWNIBP(end_beta=1.0, loss=loss)(model, x, y, 0.1).value.item()
        points = Box.ball(x, 0.1).repeat(500).sample()
        labels = y.repeat_interleave(500)
        losses = F.cross_entropy(net(points), labels, reduction="none").view(4, 500)
        assert losses.amax(1).mean().item() <= value
