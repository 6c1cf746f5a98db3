"""A batch computed in parts has the gradient of the whole, for every method."""

import copy

import pytest
import torch
import training_reference as reference
from taught import teaching

from tightrope.box import Box
from tightrope.graph import trace
from tightrope.training.objectives import METHODS, STAPS, TAPS, Loss, Objective
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

RADIUS, TARGET = 0.05, 0.2
ON_RELUS = [name for name, method in METHODS.items() if not method.trains_distances]
COMBINED = ("taps", "staps", "exp-ibp")  # losses that are no means over samples
REAL_SAMPLE = Box.sample


@pytest.fixture(autouse=True)
def attacks_start_at_centres(monkeypatch):
    """Random points would differ between a batch and its parts."""

    def centres(self, count=None):
        if count is None:
            return self.center.clone()
        return self.center.unsqueeze(1).repeat(1, count, *[1] * (self.center.dim() - 1))

    monkeypatch.setattr(Box, "sample", centres)


def make(method, name="norm", **options):
    """The method with few steps and a split that the network has."""
    if hasattr(METHODS[method], "steps"):
        options = {"steps": 3, **options}
    if method in ("taps", "staps"):
        options = {"classifier_relus": 2 if name == "odd" else 1, **options}
    return METHODS[method](**options)


def run(name, objective, accumulate, *, annealing=False, count=7, radius=RADIUS, **options):
    """Return the result, the gradients and the buffers of one step on a fresh network."""
    net = reference.NETS[name]()
    graph = trace(net, reference.SHAPE)
    options |= teaching(objective, name)
    step = Step(graph, objective, TARGET, accumulate=accumulate, **options)
    result = step(*reference.batch(count), radius, annealing=annealing)
    return result, reference.gradients(net), dict(net.named_buffers())


def assert_parts_are_the_whole(name, objective, parts=(2, 3, 5), tolerance=1e-9, **options):
    whole, expected, buffers = run(name, objective, 1, **options)
    assert all(g.isfinite().all() for g in expected.values())
    assert any(g.abs().max() > 1e-3 for g in expected.values())
    for accumulate in parts:
        result, found, moved = run(name, objective, accumulate, **options)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance, msg=key)
        for key, value in buffers.items():
            torch.testing.assert_close(moved[key], value, msg=key)
        assert result.loss == pytest.approx(whole.loss, rel=1e-9)
        assert (result.samples, result.natural) == (whole.samples, whole.natural)
        assert result.robust == whole.robust
    return expected


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize("method", ON_RELUS)
def test_parts_are_the_whole(method, name):
    parts = (2, 3, 5) if name == "norm" else (3,)
    assert_parts_are_the_whole(name, make(method, name), parts)


@pytest.mark.parametrize("method", ON_RELUS)
def test_parts_with_a_share_of_the_clean_loss(method):
    expected = assert_parts_are_the_whole("norm", make(method), (2, 3), natural_weight=0.3)
    without = run("norm", make(method), 1)[1]
    change = max((without[key] - value).abs().max().item() for key, value in expected.items())
    assert (change < 1e-12) == (method == "standard")


@pytest.mark.parametrize("method", ON_RELUS)
def test_parts_with_regularizers(method):
    options = {"annealing": True, "regularizer_weight": 0.5, "count": 24}
    # At the radius that looks at methods without bounds (1e-6), differences carry ten digits.
    expected = assert_parts_are_the_whole("norm", make(method), (2, 5), 1e-7, **options)
    without = run("norm", make(method), 1, count=24)[1]
    assert any((without[key] - value).abs().max() > 1e-4 for key, value in expected.items())


@pytest.mark.parametrize("method", ["taps", "staps", "sabr", "exp-ibp", "ibp-r"])
def test_parts_with_everything(method):
    options = {"annealing": True, "regularizer_weight": 0.5, "natural_weight": 0.2, "l1": 1e-3}
    assert_parts_are_the_whole("plain", make(method), (3,), 1e-7, count=24, **options)
    assert_parts_are_the_whole("odd", make(method, "odd"), (3,), 1e-7, count=24, **options)


@pytest.mark.parametrize("method", ["sabr", "staps"])
def test_regularizers_look_at_the_boxes_of_the_loss(method, monkeypatch):
    """They are computed first, from the same random points as the gradients afterwards."""
    draws = []

    def spy(self, count=None):
        draws.append(REAL_SAMPLE(self, count))
        return draws[-1]

    monkeypatch.setattr(Box, "sample", spy)
    run("norm", make(method), 3, annealing=True, regularizer_weight=0.5)
    half = len(draws) // 2
    assert half >= 3 and len(draws) == 2 * half
    assert all(torch.equal(a, b) for a, b in zip(draws[:half], draws[half:], strict=True))


@pytest.mark.parametrize("options", [{"weight": 0.0}, {"weight": float("inf")}, {"scale": "paper"}])
@pytest.mark.parametrize("method", ["taps", "staps"])
def test_parts_keep_the_gradient_weights(method, options):
    assert_parts_are_the_whole("norm", make(method, **options), (2,))


@pytest.mark.parametrize(
    "objective",
    [
        TAPS(steps=3, loss="taps"),
        TAPS(steps=3, estimators="single"),
        TAPS(steps=3, connected=False),
        TAPS(classifier_relus=0),
        TAPS(classifier_relus=2, steps=3),
        STAPS(steps=3, ratio=1.0),
        STAPS(steps=3, shrink=0.8),
    ],
    ids=str,
)
def test_parts_of_variants(objective):
    assert_parts_are_the_whole("norm", objective, (3,))


@pytest.mark.parametrize("method", COMBINED)
def test_combined_losses_are_not_means_of_the_parts(method):
    """So the tests above would notice a product that is taken part by part."""
    net = reference.plain_net()
    x, y = reference.batch()
    step = Step(trace(net, reference.SHAPE), make(method), TARGET)
    whole = step(x, y, RADIUS, annealing=False).loss
    parts = [step(x[i], y[i], RADIUS, annealing=False).loss for i in (slice(4), slice(4, 7))]
    assert abs(whole - sum(parts)) > 1e-3 * whole


@pytest.mark.parametrize("accumulate", [1, 2, 7, 9])
def test_any_combination_of_means(accumulate):
    """`Loss.of` with three means, of which one is a constant."""

    class Three(Objective):
        def __call__(self, model, x, y, radius):
            outputs = model.graph(x)
            own = outputs.gather(1, y[:, None]).mean()
            return Loss.of(lambda a, b, c: a * b**2 + c, own, outputs.mean(), x.mean())

    net = reference.plain_net()
    x, y = reference.batch()
    outputs = net(x)
    value = outputs.gather(1, y[:, None]).mean() * outputs.mean() ** 2 + x.mean()
    value.backward()
    expected = reference.gradients(net)
    copied = copy.deepcopy(net)
    copied.zero_grad()
    step = Step(trace(copied, reference.SHAPE), Three(), TARGET, accumulate=accumulate)
    result = step(x, y, RADIUS, annealing=False)
    assert result.loss == pytest.approx(7 * value.item(), rel=1e-10)
    for key, gradient in reference.gradients(copied).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-10)
