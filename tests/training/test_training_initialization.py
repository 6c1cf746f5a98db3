"""Shi et al.'s initialisation."""

import copy
import math

import pytest
import torch
from torch import nn
from training_reference import Skip

from tightrope import nets
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import trace
from tightrope.training.initialization import initialize

pytestmark = pytest.mark.usefixtures("one_thread")


def initialized(net, shape):
    """Return the network before and after."""
    before = copy.deepcopy(net)
    initialize(trace(net, shape))
    return before, net


def check_deviation(weight, expected):
    """Mean 0 and the given deviation, within four standard errors; normal by its kurtosis."""
    n = weight.numel()
    assert abs(weight.mean()) < 4 * expected / math.sqrt(n)
    deviation = weight.square().mean().sqrt()
    assert deviation == pytest.approx(expected, rel=4 / math.sqrt(2 * n))
    kurtosis = (weight / expected).pow(4).mean()
    assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(96 / n) + 0.01)


def test_every_hidden_weight_is_drawn_with_its_own_deviation():
    torch.manual_seed(3)
    net = nets.build("cnn7", (3, 16, 16), 10, width=24, hidden=128, batch_norm=True)
    before, after = initialized(net, (3, 16, 16))
    layers = [m for m in after.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    fans = [3 * 9, 24 * 9, 24 * 9, 48 * 9, 48 * 9, 48 * 64]
    for layer, fan in zip(layers[:-1], fans, strict=True):
        check_deviation(layer.weight.detach(), math.sqrt(2 * math.pi) / fan)
    changed = {
        name
        for (name, old), new in zip(
            before.state_dict().items(), after.state_dict().values(), strict=True
        )
        if not torch.equal(old, new)
    }
    hidden = {
        f"{name}.weight"
        for name, m in after.named_modules()
        if isinstance(m, nn.Conv2d | nn.Linear) and m is not layers[-1]
    }
    assert changed == hidden  # not the last layer, no bias, no BatchNorm


def test_grouped_convolutions_count_their_own_inputs():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 128, 3, groups=4), nn.Flatten(), nn.Linear(128, 2))
    _, net = initialized(net, (64, 3, 3))
    check_deviation(net[0].weight.detach(), math.sqrt(2 * math.pi) / (16 * 9))


def test_half_the_deviation_behind_a_residual_sum():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1),
        Skip(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
        nn.Conv2d(32, 64, 3, padding=1),
        Skip(nn.ReLU(), nn.Conv2d(64, 64, 1)),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.Flatten(),
        nn.Linear(64, 2),
    )
    _, net = initialized(net, (8, 3, 3))
    root = math.sqrt(2 * math.pi)
    check_deviation(net[0].weight.detach(), root / 72)
    check_deviation(net[1].body[0].weight.detach(), root / 288)
    check_deviation(net[2].weight.detach(), root / 288 / 2)  # reads the sum itself
    check_deviation(net[3].body[1].weight.detach(), root / 64)
    check_deviation(net[5].weight.detach(), root / 576)  # reads a ReLU of the sum


def widths(net, size):
    """Mean radius of the box in front of each ReLU (or behind each linear layer)."""
    torch.manual_seed(1)
    box = Box.around(torch.rand(16, size), torch.full((16, size), 0.01))
    graph = trace(net, (size,))
    linear = [i for i, node in enumerate(graph.nodes) if "Linear" in type(node.op).__name__]
    _, boxes = interval.bounds(graph, box, keep=linear)
    return [float(boxes[i].radius.mean().detach()) for i in linear[:-1]]


@pytest.mark.parametrize("relu", [False, True])
def test_the_width_of_bounds_stays_where_the_default_explodes(relu):
    torch.manual_seed(0)
    size, depth = 256, 8
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(size, size), nn.ReLU()] if relu else [nn.Linear(size, size)]
    net = nn.Sequential(*layers, nn.Linear(size, 2))
    exploding = widths(net, size)
    assert exploding[-1] > 1e4 * exploding[0]
    initialize(trace(net, (size,)))
    found = widths(net, size)
    # E|w| = sqrt(2 / pi) * sqrt(2 pi) / n = 2 / n: each layer doubles a width, and a ReLU
    # over boxes that straddle zero evenly halves it again.
    factor = 1.0 if relu else 2.0
    for i, width in enumerate(found):
        expected = 0.02 * factor**i
        assert expected / 2 < width < 2 * expected, (i, width)
