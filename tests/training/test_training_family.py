"""Expressive losses, IBP-R, multi-PGD; what every method does; what options are refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from taught import teaching
from torch import nn

from tightrope.attacks import attack_margins, pgd
from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, training_model
from tightrope.training.objectives import (
    CCIBP,
    EXPIBP,
    IBP,
    IBPR,
    METHODS,
    MTLIBP,
    PGD,
    SABR,
    STAPS,
    TAPS,
    MultiPGD,
)
from tightrope.training.settings import Settings
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

ON_RELUS = [name for name, method in METHODS.items() if not method.trains_distances]
RADIUS = 0.1
EXPRESSIVE = [MTLIBP, CCIBP, EXPIBP]
ATTACK = "tightrope.training.objectives.regions.pgd"


def run(net, objective, radius=RADIUS, data=None):
    """Return the loss and its gradients, always from the same random points."""
    net = copy.deepcopy(net)
    x, y = data or reference.batch()
    torch.manual_seed(11)
    loss = objective(training_model(trace(net, reference.SHAPE), x), x, y, radius)
    loss.value.backward()
    return loss, reference.gradients(net)


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture
def attacks(monkeypatch):
    """Every attack on the input: its box, its options and what it found."""
    seen = []

    def spy(network, box, goal, **options):
        seen.append((box, options, pgd(network, box, goal, **options)))
        return seen[-1][2]

    monkeypatch.setattr(ATTACK, spy)
    return seen


def cross_entropy(margins, y):
    """The mean of `ln(1 + sum exp(-(o_y - o_i)))`, one wrong class after the other."""
    total = 0.0
    for n, label in enumerate(y.tolist()):
        wrong = [torch.exp(-margins[n, i]) for i in range(margins.shape[1]) if i != label]
        total = total + torch.log1p(sum(wrong))
    return total / len(y)


# --- expressive losses ------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("method", EXPRESSIVE)
@pytest.mark.parametrize("name", reference.NETS)
def test_expressive_losses_by_formula(name, method, alpha, attacks):
    net = reference.NETS[name]()
    x, y = reference.batch()
    loss, found = run(net, method(alpha=alpha, attack_scale=1.5, steps=3))
    ((box, _, points),) = attacks
    torch.testing.assert_close(box.upper, (x + 1.5 * RADIUS).clamp(max=1))
    slow = reference.Reference(net, x)
    outputs = slow.points(points)
    attacked = outputs.gather(1, y[:, None]) - outputs
    every, _, _ = slow.bounds((x - RADIUS).clamp(min=0), (x + RADIUS).clamp(max=1))
    bound = every[torch.arange(len(y)), y]
    mixed = alpha * bound + (1 - alpha) * attacked
    upper, lower = cross_entropy(bound, y), cross_entropy(attacked, y)
    value = {
        MTLIBP: alpha * upper + (1 - alpha) * lower,
        CCIBP: cross_entropy(mixed, y),
        EXPIBP: torch.exp(alpha * upper.log() + (1 - alpha) * lower.log()),
    }[method]
    value.backward()
    torch.testing.assert_close(loss.value, value, rtol=1e-10, atol=1e-10)
    assert_same(found, reference.gradients(net))
    wrong = torch.ones_like(mixed).scatter(1, y[:, None], 0) > 0
    assert loss.robust.tolist() == [
        bool((m[w] > 0).all()) for m, w in zip(mixed, wrong, strict=True)
    ]


@pytest.mark.parametrize("method", EXPRESSIVE)
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_ends_of_the_expressive_losses(name, method):
    net = reference.NETS[name]()
    for alpha, other in ((1.0, IBP()), (0.0, PGD(steps=4, restarts=2))):
        loss, found = run(net, method(alpha=alpha, steps=4, restarts=2))
        expected, gradients = run(net, other)
        assert loss.value.item() == pytest.approx(expected.value.item(), rel=1e-10)
        assert_same(found, gradients)
        assert loss.robust.tolist() == expected.robust.tolist()


@pytest.mark.parametrize("method", EXPRESSIVE)
def test_a_single_step_is_taken(method, attacks):
    """Expressive losses: one step of size 10 ends at a corner, whether that helps or not."""
    run(reference.plain_net(), method(steps=1, step_size=10.0))
    run(reference.plain_net(), method(steps=8))
    (box, one, points), (_, eight, _) = attacks
    assert one["keep"] == "last" and eight["keep"] == "best"
    assert (one["steps"].count, one["steps"].size) == (1, 10.0)
    assert (eight["steps"].count, eight["steps"].size) == (8, 0.25)
    assert ((points == box.lower) | (points == box.upper)).double().mean() > 0.9


@pytest.mark.parametrize("method", EXPRESSIVE)
def test_expressive_losses_lie_between_their_ends(method):
    net = reference.plain_net()
    values = [run(net, method(alpha=a, steps=4))[0].value.item() for a in (0.0, 0.3, 0.6, 1.0)]
    assert values == sorted(values) and values[0] < values[1] < values[2] < values[3]


def test_a_batch_without_any_loss_has_no_gradient():
    # BUG in expressive.py: where a loss is 0 in floating-point numbers (margins above 17 in
    # float32), the derivative of its root is infinite, and EXP-IBP's gradients are no numbers.
    net = nn.Sequential(nn.Linear(2, 2))
    nn.init.zeros_(net[0].weight)
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([200.0, 0.0]))
    x, y = torch.rand(4, 2), torch.zeros(4, dtype=torch.long)
    for method in EXPRESSIVE:
        net.zero_grad()
        loss = method(alpha=0.5)(FixedModel(trace(net, (2,)), x), x, y, RADIUS)
        loss.value.backward()
        assert loss.value == 0
        assert all((g == 0).all() for g in reference.gradients(net).values()), method.name


# --- IBP-R ------------------------------------------------------------------------------------


def centres(box, count=None):
    return box.center.clone()


@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_ibp_r_by_hand(masked, progress, monkeypatch):
    monkeypatch.setattr(Box, "sample", centres)
    # h = relu(2x - 1), outputs 2h - 0.3 and h - 0.1
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        net[0].weight.fill_(2.0)
        net[0].bias.fill_(-1.0)
        net[2].weight.copy_(torch.tensor([[2.0], [1.0]]))
        net[2].bias.copy_(torch.tensor([-0.3, -0.1], dtype=torch.float64))
    x = torch.full((2, 1), 0.55, dtype=torch.float64)
    model = FixedModel(trace(net, (1,)), x, progress=progress)
    loss = IBPR(area_weight=3.0, masked=masked)(model, x, torch.tensor([1, 0]), 0.2)
    # 2x - 1 in [-0.3, 0.5], h in [0, 0.5]; outputs in [-0.3, 0.7] and [-0.1, 0.4]
    area = (0.3 * 0.5 + (0.3 * 0.7 + 0.1 * 0.4)) / 2  # mean over two layers, sums over neurons
    # o_1 - o_0 = 0.2 - h: clean 0.1, the label 1 is right and the label 0 is wrong
    natural = (math.log1p(math.exp(-0.1)) + math.log1p(math.exp(0.1))) / 2
    # at worst 0.2 - 0.5 for label 1, and 0 - 0.2 for label 0
    attacked = (math.log1p(math.exp(0.3)) + math.log1p(math.exp(0.2))) / 2
    mean_area = area / 2 if masked else area
    k = progress
    expected = (1 - k) * natural + k * attacked + k * 3.0 * mean_area
    assert loss.value.item() == pytest.approx(expected, rel=1e-12)
    assert loss.robust.tolist() == [False, False]


@pytest.mark.parametrize("name", reference.NETS)
def test_ibp_r_area_of_all_layers(name, attacks):
    net = reference.NETS[name]()
    x, y = reference.batch()
    loss, found = run(net, IBPR(area_weight=0.1, steps=3))
    slow = reference.Reference(net, x)
    ball = (x - RADIUS).clamp(min=0), (x + RADIUS).clamp(max=1)
    _, _, layers = slow.bounds(*ball)
    layers.append(slow._interval(net, ball, []))
    areas = [(low.clamp(max=0).neg() * up.clamp(min=0)).sum() / len(x) for low, up in layers]
    attacked = F.cross_entropy(slow.points(attacks[0][2]), y)
    (attacked + 0.1 * sum(areas) / len(areas)).backward()
    assert loss.value.item() == pytest.approx((attacked + 0.1 * sum(areas) / len(areas)).item())
    assert_same(found, reference.gradients(net))


def test_ibp_r_progress_is_the_share_of_the_radius(monkeypatch):
    seen = []
    real = IBPR.__call__
    monkeypatch.setattr(
        IBPR,
        "__call__",
        lambda self, model, *a: seen.append(model.progress) or real(self, model, *a),
    )
    step = Step(trace(reference.plain_net(), reference.SHAPE), IBPR(), 0.2)
    step(*reference.batch(), 0.05, annealing=True)
    step(*reference.batch(), 0.2, annealing=False)
    assert seen == [0.25, 1.0]


# --- multi-PGD --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.NETS)
def test_multi_pgd_takes_each_margin_at_its_own_point(name, monkeypatch):
    net = reference.NETS[name]()
    x, y = reference.batch()
    seen = []

    def spy(network, box, labels, **options):
        seen.append((box, options, attack_margins(network, box, labels, **options)))
        return seen[-1][2]

    monkeypatch.setattr("tightrope.training.objectives.multi_pgd.attack_margins", spy)
    loss, found = run(net, MultiPGD(steps=5, restarts=2))
    ((box, options, points),) = seen
    assert options["restarts"] == 2
    assert options["steps"].sizes() == pytest.approx([0.8] * 5)  # 2 / 5 of the full width
    torch.testing.assert_close(box.lower, (x - RADIUS).clamp(min=0))
    slow, margins = reference.Reference(net, x), torch.zeros(len(y), 3, dtype=torch.float64)
    for e in range(2):
        outputs = slow.points(points[:, e])
        for n, label in enumerate(y.tolist()):
            i = [c for c in range(3) if c != label][e]
            margins = margins.index_put(
                (torch.tensor(n), torch.tensor(i)), outputs[n, label] - outputs[n, i]
            )
    value = cross_entropy(margins, y)
    value.backward()
    torch.testing.assert_close(loss.value, value, rtol=1e-10, atol=1e-10)
    assert_same(found, reference.gradients(net))


def test_multi_pgd_is_taps_with_the_whole_network_as_classifier():
    net = reference.norm_net()
    whole, _ = run(net, TAPS(classifier_relus=2, loss="taps", steps=8, restarts=10))
    attack, _ = run(net, MultiPGD(steps=8, restarts=10))
    assert attack.value.item() == pytest.approx(whole.value.item(), rel=0.01)


# --- every method -----------------------------------------------------------------------------


def make(method, name):
    """The method with few steps and a split that the network has."""
    options = {"steps": 3} if hasattr(METHODS[method], "steps") else {}
    if method in ("taps", "staps"):
        options["classifier_relus"] = 2 if name == "odd" else 1
    return METHODS[method](**options)


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize("method", ON_RELUS)
def test_every_method_trains_every_network(method, name):
    net, objective = reference.NETS[name](), make(method, name)
    x, y = reference.batch()
    model = training_model(trace(net, reference.SHAPE), x)
    model.teacher = teaching(method, name).get("teacher")
    loss = objective(model, x, y, RADIUS)
    assert all(p.grad is None for p in net.parameters())
    assert loss.value.shape == () and loss.value > 0
    assert (loss.robust is None) == (method in ("standard", "noise"))
    if loss.robust is not None:
        assert loss.robust.shape == y.shape and loss.robust.dtype == torch.bool
        assert not loss.robust.requires_grad
    loss.value.backward()
    gradients = reference.gradients(net)
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in gradients.values())
    with torch.no_grad():
        anew = training_model(trace(net, reference.SHAPE), x)
        anew.teacher = model.teacher
        again = objective(anew, x, y, RADIUS)
    assert again.value.isfinite() and not again.value.requires_grad


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["norm", "odd"])
@pytest.mark.parametrize("method", ON_RELUS)
def test_statistics_are_those_of_the_clean_pass(method, name, accumulate):
    net, clean = reference.NETS[name](), reference.NETS[name]()
    x, y = reference.batch()
    graph = trace(net, reference.SHAPE)
    options = {"accumulate": accumulate, **teaching(method, name)}
    Step(graph, make(method, name), 0.2, **options)(x, y, RADIUS, annealing=False)
    before = copy.deepcopy(clean).state_dict()
    clean.train()(x)
    buffers = dict(net.named_buffers())
    assert any("running_mean" in key for key in buffers)
    for key, value in clean.named_buffers():
        torch.testing.assert_close(buffers[key], value, msg=key)
        assert "running" not in key or not torch.equal(before[key], value)


# --- bad options ------------------------------------------------------------------------------

BAD = [
    ("taps", "taps.connector", [-0.1, 1.1, "x", math.nan, math.inf]),
    ("taps", "taps.weight", [-1.0, math.nan, "heavy"]),
    ("taps", "taps.classifier_relus", [-1, 1.5]),
    ("taps", "taps.steps", [0, -3, 2.5]),
    ("taps", "taps.restarts", [0]),
    ("taps", "taps.step_size", [0.0, -1.0, math.nan, math.inf]),
    ("taps", "taps.step_decay", [0.0, 1.5]),
    ("taps", "taps.estimators", ["many", ""]),
    ("taps", "taps.loss", ["pgd"]),
    ("taps", "taps.scale", ["code"]),
    ("taps", "taps.shrink", [0.0, 1.2]),
    ("taps", "taps.connected", ["perhaps"]),
    ("staps", "staps.ratio", [0.0, -0.2, 1.01, math.nan]),
    ("staps", "staps.connector", [2.0]),
    ("staps", "staps.weight", [-0.5]),
    ("staps", "staps.attack_steps", [0]),
    ("staps", "staps.attack_restarts", [0]),
    ("staps", "staps.attack_step_size", [0.0, math.inf]),
    ("staps", "staps.attack_step_decay", [0.0, 2.0]),
    ("sabr", "sabr.ratio", [0.0, 1.5, -1.0]),
    ("sabr", "sabr.steps", [0]),
    ("sabr", "sabr.restarts", [0]),
    ("sabr", "sabr.step_size", [0.0, math.inf]),
    ("sabr", "sabr.step_decay", [0.0, 1.1]),
    ("sabr", "sabr.shrink", [0.0, 1.1]),
    *[(f"{s}-ibp", f"{s}.alpha", [-0.1, 1.1, math.nan]) for s in ("mtl", "cc", "exp")],
    *[(f"{s}-ibp", f"{s}.steps", [0]) for s in ("mtl", "cc", "exp")],
    *[(f"{s}-ibp", f"{s}.restarts", [0]) for s in ("mtl", "cc", "exp")],
    *[(f"{s}-ibp", f"{s}.attack_scale", [0.0, math.inf]) for s in ("mtl", "cc", "exp")],
    ("mtl-ibp", "mtl.step_size", [0.0, math.inf]),
    ("ibp-r", "ibp-r.area_weight", [-1e-4, math.inf, math.nan]),
    ("ibp-r", "ibp-r.steps", [0]),
    ("ibp-r", "ibp-r.step_size", [-1.0]),
    ("multi-pgd", "multi-pgd.steps", [0]),
    ("multi-pgd", "multi-pgd.restarts", [0]),
    ("multi-pgd", "multi-pgd.step_size", [0.0, math.inf]),
    # unknown, or of another method
    ("taps", "taps.conector", [0.5]),
    ("taps", "taps.ratio", [0.5]),
    ("sabr", "taps.connector", [0.5]),
    ("mtl-ibp", "cc.alpha", [0.5]),
    ("ibp", "sabr.ratio", [0.5]),
    ("ibp-r", "mtl.alpha", [0.5]),
]


# BUG in taps.py and multi_pgd.py: a `step_size` of inf is let through. Infinity times a width or
# a gradient of zero is no number, so that such points never leave their start.
@pytest.mark.parametrize("method,option,value", [(m, o, v) for m, o, vs in BAD for v in vs])
def test_bad_options_are_refused_in_one_line(method, option, value):
    with pytest.raises(UserError) as caught:
        Settings.parse({"method": method, option: value})
    message = str(caught.value)
    assert "\n" not in message
    section, _, name = option.partition(".")
    assert option in message or (section in message and name in message), message


@pytest.mark.parametrize(
    "method,given,expected",
    [
        ("taps", {"taps.connector": 0, "taps.weight": "inf"}, TAPS(connector=0.0, weight=math.inf)),
        ("taps", {"taps.connector": "1", "taps.step_size": "none"}, TAPS(connector=1.0)),
        ("staps", {"staps.ratio": "1", "staps.connected": "no"}, STAPS(ratio=1.0, connected=False)),
        ("sabr", {"sabr.ratio": 0.1, "sabr.shrink": 0.8}, SABR(ratio=0.1, shrink=0.8)),
        ("exp-ibp", {"exp.alpha": 0}, EXPIBP(alpha=0.0)),
        ("ibp-r", {"ibp-r.masked": "true", "ibp-r.area_weight": 0}, IBPR(0.0, True)),
    ],
)
def test_good_options_are_taken(method, given, expected):
    assert Settings.parse({"method": method, **given}).objective() == expected
