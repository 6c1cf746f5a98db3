"""TAPS, STAPS and SABR against the paper's formulas, written out."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import training_reference as reference
from taps_networks import RADIUS, assert_same, run
from torch import nn

import tightrope as tr
from tightrope.attacks import attack_loss, attack_margins
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, evaluation_model, training_model
from tightrope.training.objectives import (
    IBP,
    METHODS,
    PGD,
    SABR,
    STAPS,
    TAPS,
    MultiPGD,
    Objective,
)
from tightrope.training.objectives.propagation import gradient_factors

pytestmark = pytest.mark.usefixtures("one_thread")
RELUS = {"plain": 1, "norm": 1, "odd": 2}  # the last split behind a ReLU that a net has


def differ(one, other):
    return any((one[name] - other[name]).abs().max() > 1e-4 for name in one)


def combine(factors, *gradients):
    return {
        name: sum(f * g[name] for f, g in zip(factors, gradients, strict=True))
        for name in gradients[0]
    }


# --- the product ------------------------------------------------------------------------------


WEIGHTS = [("plain", w) for w in (0.0, 1.0, math.inf)]
WEIGHTS += [("paper", w) for w in (0.0, 5.0, math.inf)]


@pytest.mark.parametrize(
    "name,scale,weight",
    [(name, "plain", 5.0) for name in reference.NETS] + [("norm", s, w) for s, w in WEIGHTS],
)
@pytest.mark.parametrize("method", ["taps", "staps"])
def test_gradient_of_the_product(name, method, scale, weight):
    """w L_IBP dL_TAPS + L_TAPS dL_IBP, each by a backward pass of its own."""
    net, relus = reference.NETS[name](), RELUS[name]
    options = {"classifier_relus": relus, "weight": weight, "scale": scale, "steps": 4}
    objective = TAPS(**options) if method == "taps" else STAPS(**options, ratio=0.5)
    loss, found = run(net, objective)
    taps, of_taps = run(net, replace(objective, loss="taps"))
    ibp, of_ibp = run(net, objective.annealing)
    alpha = 1.0 if math.isinf(weight) else weight / (1 + weight)
    if scale == "paper":
        factors = 2 * alpha, 2 - 2 * alpha
    else:
        factors = (1.0, 0.0) if math.isinf(weight) else (weight, 1.0)
    both = factors[0] * ibp.value.item(), factors[1] * taps.value.item()
    assert_same(found, combine(both, of_taps, of_ibp))
    assert loss.value.item() == pytest.approx(taps.value.item() * ibp.value.item(), rel=1e-12)
    assert loss.robust.tolist() == taps.robust.tolist()
    assert differ(of_taps, of_ibp)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, 5.0, 20.0])
def test_both_scales_have_one_ratio(weight):
    plain, paper = (gradient_factors(weight, scale) for scale in ("plain", "paper"))
    assert plain == (weight, 1.0)
    assert paper[0] * plain[1] == pytest.approx(paper[1] * plain[0])
    assert sum(paper) == pytest.approx(2.0)
    assert plain[1] / paper[1] == pytest.approx((1 + weight) / 2)


def test_equal_weights_are_the_product_rule():
    net = reference.plain_net()
    x, y = reference.batch()
    _, found = run(net, TAPS(weight=1.0, steps=3))
    model = training_model(trace(net, reference.SHAPE), x)
    torch.manual_seed(11)
    (
        TAPS(loss="taps", steps=3)(model, x, y, RADIUS).value * IBP()(model, x, y, RADIUS).value
    ).backward()
    assert_same(found, reference.gradients(net))


# --- special cases ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize(
    "objective",
    [TAPS(classifier_relus=0), TAPS(loss="ibp"), SABR(ratio=1.0), STAPS(0, ratio=1.0)],
    ids=["no relus", "ibp loss", "sabr of the ball", "both"],
)
def test_ibp_as_a_special_case(name, objective):
    net = reference.NETS[name]()
    loss, found = run(net, objective)
    expected, gradients = run(net, IBP())
    torch.testing.assert_close(loss.value, expected.value)
    assert_same(found, gradients)
    assert loss.robust.tolist() == expected.robust.tolist()


@pytest.mark.parametrize("estimators", ["multi", "single"])
@pytest.mark.parametrize("name", reference.NETS)
def test_staps_of_the_whole_ball_is_taps(name, estimators):
    net, options = reference.NETS[name](), {"estimators": estimators, "steps": 4}
    options["classifier_relus"] = RELUS[name]
    loss, found = run(net, STAPS(**options, ratio=1.0))
    expected, gradients = run(net, TAPS(**options))
    assert loss.value.item() == pytest.approx(expected.value.item(), rel=1e-12)
    assert_same(found, gradients)
    smaller, _ = run(net, STAPS(**options, ratio=0.3))
    assert smaller.value < expected.value


def test_annealing_objectives():
    assert TAPS(weight=2.0).annealing == IBP()
    staps = STAPS(
        ratio=0.7,
        attack_steps=3,
        attack_restarts=2,
        attack_step_size=0.3,
        attack_step_decay=0.5,
        shrink=0.8,
    )
    expected = SABR(ratio=0.7, steps=3, restarts=2, step_size=0.3, step_decay=0.5, shrink=0.8)
    assert staps.annealing == expected


@pytest.mark.parametrize("method", [TAPS, STAPS])
def test_missing_splits_are_refused(method):
    plain, odd = (trace(reference.NETS[n](), reference.SHAPE) for n in ("plain", "odd"))
    for relus in (0, 1, 2):
        method(classifier_relus=relus).check(plain)
    for graph, relus in ((plain, 3), (odd, 1), (odd, 9)):
        with pytest.raises(UserError, match=rf"no split with {relus} ReLUs") as caught:
            method(classifier_relus=relus).check(graph)
        assert "\n" not in str(caught.value)


# --- the TAPS loss, slowly --------------------------------------------------------------------


def by_hand_connector(lower, upper, point, c):
    if upper - lower == 0:
        return 0.5, 0.5
    reach = c * (upper - lower)
    return max(0.0, 1 - (point - lower) / reach), max(0.0, 1 - (upper - point) / reach)


def slow_taps(net, split, x, y, points, c):
    """Value and gradients of L_TAPS at given latent points: one point after the other."""
    extractor, classifier = nn.Sequential(*net[:split]), nn.Sequential(*net[split:])
    ball = (x - RADIUS).clamp(min=0), (x + RADIUS).clamp(max=1)
    lower, upper = reference.Reference(extractor, x)._interval(extractor, ball, [])
    to_lower, to_upper = torch.zeros_like(lower), torch.zeros_like(upper)
    leaves = points.clone().requires_grad_()
    total = 0.0
    for n, label in enumerate(y.tolist()):
        terms = []
        for e, i in enumerate(i for i in range(3) if i != label):
            outputs = classifier(leaves[n, min(e, points.shape[1] - 1)].unsqueeze(0))[0]
            terms.append(torch.exp(outputs[i] - outputs[label]))
        total = total + torch.log1p(sum(terms)) / len(y)
    total.backward()  # classifier weights get ordinary gradients
    for place in torch.cartesian_prod(*(torch.arange(k) for k in points.shape)).tolist():
        n, e, *inner = place
        where = (n, *inner)
        ends = lower[where].item(), upper[where].item()
        down, up = by_hand_connector(*ends, points[tuple(place)].item(), c)
        to_lower[where] += down * leaves.grad[tuple(place)]
        to_upper[where] += up * leaves.grad[tuple(place)]
    if lower.requires_grad:  # the extractor has parameters
        torch.autograd.backward((lower, upper), (to_lower, to_upper))
    return total.item()


@pytest.mark.parametrize("relus,split", [(1, 4), (2, 1)])
@pytest.mark.parametrize("connector", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("estimators", ["multi", "single"])
def test_taps_loss_and_gradient_are_the_papers(estimators, connector, relus, split, monkeypatch):
    net = reference.plain_net()
    x, y = reference.batch(5)
    seen = []
    attack = {"multi": attack_margins, "single": attack_loss}[estimators]

    def spy(*arguments, **options):
        seen.append(attack(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(f"tightrope.training.objectives.taps.{attack.__name__}", spy)
    objective = TAPS(relus, connector=connector, steps=5, estimators=estimators, loss="taps")
    loss, found = run(net, objective, data=(x, y))
    (points,) = seen
    assert points.shape[1] == (2 if estimators == "multi" else 1)
    value = slow_taps(net, split, x, y, points, connector)
    assert loss.value.item() == pytest.approx(value, rel=1e-10)
    # The published clamps leave 5e-6 / reach at the end of a bound's reach (c = 1: all corners).
    assert_same(found, reference.gradients(net), 1e-9 if connector < 1 else 1e-3)
    assert found["1.weight"].abs().max() > 1e-2


@pytest.mark.parametrize("method", [TAPS(steps=4), STAPS(steps=4, estimators="single")])
def test_without_connection_the_extractor_learns_from_ibp_alone(method):
    net = reference.plain_net()
    _, whole = run(net, method)
    _, found = run(net, replace(method, connected=False))
    taps, of_taps = run(net, replace(method, connected=False, loss="taps"))
    _, of_ibp = run(net, method.annealing)
    extractor = [key for key in found if key.startswith("1.")]
    for key in extractor:
        assert of_taps[key].abs().max() == 0
        torch.testing.assert_close(found[key], taps.value.detach() * of_ibp[key])
    rest = [key for key in found if key not in extractor]
    assert_same({k: found[k] for k in rest}, {k: whole[k] for k in rest})
    assert differ(found, whole)


# --- order of the losses ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "norm"])
def test_losses_are_ordered_on_a_trained_network(name):
    """PGD <= TAPS <= IBP; the latter holds for any attack, the former up to its noise."""
    net = reference.NETS[name]()
    x, y = reference.batch(40, seed=3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(15):
        optimizer.zero_grad()
        IBP()(training_model(trace(net, reference.SHAPE), x), x, y, 0.03).value.backward()
        optimizer.step()
    for seed in (1, 2):
        data = reference.batch(12, seed=seed)
        strong = {"loss": "taps", "steps": 8, "restarts": 20}
        methods = [
            PGD(steps=10, restarts=2),
            TAPS(2, **strong),
            TAPS(1, **strong),
            IBP(),
        ]
        losses = [run(net, method, 0.05, data)[0] for method in methods]
        values = [loss.value.item() for loss in losses]
        assert all(a <= 1.001 * b for a, b in pairwise(values)), values
        assert values[1] <= values[3] and values[2] <= values[3]
        assert values[0] < 0.95 * values[3]
        assert not (losses[3].robust & ~losses[2].robust).any()
        single = run(net, TAPS(1, loss="taps", estimators="single", steps=10), 0.05, data)[0]
        assert single.value <= 1.001 * values[2]


def test_losses_are_ordered_on_every_batch_of_a_run(tmp_path, monkeypatch):
    """PGD <= TAPS <= IBP on real images, from the switch to the last step."""
    found = []

    class Watched(TAPS):
        name = "watched"

        def __call__(self, model, x, y, radius):
            if radius == 0.1 and len(x) == 32:  # not while validating
                others = PGD(steps=10), replace(TAPS(1, steps=20), loss="taps"), IBP()
                found.append([other(model, x, y, radius).value.item() for other in others])
            return super().__call__(model, x, y, radius)

    monkeypatch.setitem(METHODS, "watched", Watched)
    small = {"train_samples": 320, "validation": 64, "batch_size": 32, "width": 4}
    tr.train(method=Watched(steps=5), out=tmp_path / "run", epochs=4, annealing_epochs=1, **small)
    assert len(found) == 3 * 8
    for attack, taps, ibp in found:
        assert attack <= 1.01 * taps and taps <= ibp * (1 + 1e-6)
    assert any(attack < 0.95 * ibp for attack, _, ibp in found)


def test_robust_means_that_no_class_wins():
    net = reference.plain_net()
    x, _ = reference.batch(60)
    y = net(x).argmax(1)
    model = FixedModel(trace(net, reference.SHAPE), x)
    for method in (TAPS(steps=5), STAPS(steps=5), SABR(), TAPS(estimators="single", steps=5)):
        shares = [method(model, x, y, r).robust.double().mean() for r in (0.001, 0.03, 0.3)]
        assert shares[0] > 0.9 and shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize("method", [TAPS(loss="taps"), STAPS(loss="taps"), MultiPGD()])
def test_a_tie_is_not_robust(method: Objective) -> None:
    """Margins of exactly zero: nobody may call them robust."""
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    model = evaluation_model(trace(net, (4,)), torch.rand(5, 4))
    loss = method(model, model.x, torch.zeros(5, dtype=torch.long), 0.1)
    assert loss.robust is not None and not loss.robust.any()


@pytest.mark.parametrize(
    ("start", "share", "expected"),
    [
        ("ball", 0.25, [0.025, 0.45, 0.8875]),
        ("ball", 0.9, [0.09, 0.58, 0.985]),
        ("input", 0.25, [0.0, 0.45, 0.9125]),  # the first pixel is clamped from -0.025
        ("input", 0.9, [0.04, 0.58, 1.0]),  # the last one from 1.01
    ],
)
def test_where_the_attack_for_the_small_box_starts(monkeypatch, start, share, expected):
    """In the ball [0, 0.1] x [0.4, 0.6] x [0.85, 1] around (0, 0.5, 0.95), every restart."""
    asked = []

    def network(points):
        asked.append(points.detach().clone())
        return torch.stack((points.sum(1), -points.sum(1)), 1)

    monkeypatch.setattr(torch, "rand_like", lambda t: torch.full_like(t, share))
    x = torch.tensor([[0.0, 0.5, 0.95]], dtype=torch.float64)
    model = SimpleNamespace(frozen=network)
    for method in (
        SABR(steps=3, restarts=2, start=start),
        STAPS(attack_steps=3, attack_restarts=2, attack_start=start),
    ):
        asked.clear()
        method.region(model, x, torch.tensor([0]), 0.1)
        assert len(asked) == 8  # two restarts: the start, and what three steps lead to
        for first in (asked[0], asked[4]):
            assert first[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_start_is_a_declared_setting():
    with pytest.raises(UserError, match=r"^sabr.start must be one of ball, input"):
        SABR(start="anywhere")
    with pytest.raises(UserError, match=r"^staps.attack_start must be one of ball, input"):
        STAPS(attack_start="x")
