"""SABR's small box and the shrinkage of ReLUs."""

import copy
from dataclasses import replace

import pytest
import torch
import training_reference as reference
from taps_networks import RADIUS, assert_same, run
from torch import nn

from tightrope.attacks import CrossEntropy, pgd
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import trace
from tightrope.training.batchnorm import training_model
from tightrope.training.objectives import (
    SABR,
    TAPS,
)
from tightrope.training.objectives.propagation import interval_rules
from tightrope.training.objectives.regions import SmallBox

pytestmark = pytest.mark.usefixtures("one_thread")
REGION = {"steps": 8, "restarts": 1, "step_size": 0.5, "step_decay": 0.1}


# --- SABR's small box -------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.02, 0.3])
@pytest.mark.parametrize("ratio", [0.01, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("name", reference.NETS)
def test_the_small_box_lies_inside_the_clipped_ball(name, ratio, radius):
    x, y = reference.batch(20)
    model = training_model(trace(reference.NETS[name](), reference.SHAPE), x)
    ball = Box.ball(x, radius)
    torch.manual_seed(5)
    box = SmallBox(ratio=ratio, **REGION)(model, x, y, radius)
    torch.testing.assert_close(box.radius, ratio * (ball.upper - ball.lower) / 2)
    assert (box.lower >= ball.lower - 1e-12).all() and (box.upper <= ball.upper + 1e-12).all()
    assert box.lower.min() > -1e-12 and box.upper.max() < 1 + 1e-12
    assert not box.lower.requires_grad


def test_the_small_box_holds_the_adversarial_point(monkeypatch):
    x, y = reference.batch(20)
    model = training_model(trace(reference.plain_net(), reference.SHAPE), x)
    seen = {}

    def spy(network, box, goal, **options):
        seen.update(options, box=box, goal=goal, point=pgd(network, box, goal, **options))
        return seen["point"]

    monkeypatch.setattr("tightrope.training.objectives.regions.pgd", spy)
    box = SmallBox(ratio=0.3, **REGION)(model, x, y, RADIUS)
    ball = Box.ball(x, RADIUS)
    assert torch.equal(seen["box"].lower, ball.lower) and torch.equal(seen["box"].upper, ball.upper)
    assert isinstance(seen["goal"], CrossEntropy)
    slack = 1e-12
    assert (seen["point"] >= box.lower - slack).all() and (seen["point"] <= box.upper + slack).all()
    half = 0.3 * (ball.upper - ball.lower) / 2
    expected = torch.minimum(torch.maximum(seen["point"], ball.lower + half), ball.upper - half)
    torch.testing.assert_close(box.center, expected)
    assert (seen["point"] != box.center).any() and (seen["point"] == box.center).any()
    # x0.1 after ceil(.5 n), ceil(.8 n) and ceil(.9 n) of n = 8 steps
    assert seen["steps"].sizes() == pytest.approx([0.5] * 4 + [0.05] * 3 + [0.005])
    SmallBox(ratio=0.3, **{**REGION, "step_decay": 1.0, "steps": 10})(model, x, y, RADIUS)
    assert seen["steps"].sizes() == pytest.approx([0.5] * 10)


@pytest.mark.parametrize("name", reference.NETS)
def test_sabr_is_ibp_on_the_small_box(name):
    net = reference.NETS[name]()
    x, y = reference.batch()
    loss, found = run(net, SABR(ratio=0.4))
    torch.manual_seed(11)
    slow = reference.Reference(net, x)
    model = training_model(trace(copy.deepcopy(net), reference.SHAPE), x)
    box = SmallBox(ratio=0.4, **REGION)(model, x, y, RADIUS)
    margins, _, _ = slow.bounds(box.lower, box.upper)
    own = -margins[torch.arange(len(y)), y]
    value = torch.nn.functional.cross_entropy(own, y)
    value.backward()
    torch.testing.assert_close(loss.value, value)
    assert_same(found, reference.gradients(net))


# --- ReLU shrinkage ---------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", [0.5, 0.8])
def test_shrinkage_by_hand(shrink):
    # In the network's own type: as a float32, 0.8 would be 0.800000012.
    module = nn.Sequential(nn.ReLU())
    lower = torch.tensor([[-3.0, -2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    upper = torch.tensor([[-1.0, 4.0, 2.0, 5.0, 0.0]], dtype=torch.float64)
    graph = trace(module, (5,))
    box, _ = interval.bounds(graph, Box(lower, upper), rules=interval_rules(shrink))
    assert box.lower.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]
    # only the second neuron crosses zero
    expected = [0.0, 4.0 * shrink, 2.0, 5.0, 0.0]
    assert box.upper[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", [SABR(ratio=1.0), TAPS(steps=3), TAPS(loss="ibp")])
def test_shrinkage_lowers_the_bounds(method):
    net = reference.plain_net()
    full, half = run(net, method)[0], run(net, replace(method, shrink=0.5))[0]
    assert 0 < half.value < full.value
    tiny = run(net, replace(method, shrink=1 - 1e-9))[0]
    assert tiny.value.item() == pytest.approx(full.value.item(), rel=1e-6)
