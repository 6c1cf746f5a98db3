"""`tr.bounds`: it contains what the network computes, and tighter methods are tighter."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.certification.properties import Ball

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = ("ibp", "zonotope", "crown-ibp", "crown", "alpha")


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)),
    ).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", METHODS)
def test_outputs_lie_within(method: str, x: torch.Tensor) -> None:
    net = module()
    box = tr.bounds(net, x, eps="0.05", method=method)
    points = Ball(x, Fraction("0.05")).inner().repeat(200).sample()
    with torch.no_grad():
        outputs = net(points).double().view(3, 200, 4)
    noise = 1e-5
    assert (outputs.amin(1) >= box.lower - noise).all()
    assert (outputs.amax(1) <= box.upper + noise).all()
    assert box.lower.shape == (3, 4) and box.lower.dtype == torch.float64


def test_methods_are_ordered(x: torch.Tensor) -> None:
    widths = {}
    for method in ("ibp", "crown-ibp", "crown", "alpha"):
        box = tr.bounds(module(), x, eps=0.05, method=method)
        widths[method] = float((box.upper - box.lower).mean())
    assert widths["ibp"] > widths["crown-ibp"] > widths["crown"] >= widths["alpha"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_by_its_name(method: str, x: torch.Tensor) -> None:
    net = module()
    box = tr.bounds(net, x, eps=0.05, method=method, node="4")
    with torch.no_grad():
        values = net[:5](x).double()
    assert box.lower.shape == (3, 8)
    assert ((values >= box.lower - 1e-5) & (values <= box.upper + 1e-5)).all()


def test_graphs_and_boxes(x: torch.Tensor) -> None:
    net = module()
    ball = Ball(x, Fraction(1, 20)).outer()
    first = tr.bounds(net, x, eps="1/20")
    second = tr.bounds(tr.trace(net, (1, 8, 8)), tr.Box(*ball.corners))
    assert torch.equal(first.lower, second.lower) and torch.equal(first.upper, second.upper)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": 0.1, "method": "crwn"}, "did you mean 'crown'"),
        ({"eps": 0.1, "node": "17"}, "unknown layer"),
        ({}, "eps is missing"),
        ({"eps": 2}, r"eps must lie in \(0, 1\]"),
    ],
)
def test_bad_input(arguments: dict[str, object], message: str, x: torch.Tensor) -> None:
    with pytest.raises(tr.UserError, match=message):
        tr.bounds(module(), x, **arguments)  # type: ignore[arg-type]


def test_boxes_must_not_be_empty_and_shapes_must_fit(x: torch.Tensor) -> None:
    with pytest.raises(tr.UserError, match="empty"):
        tr.bounds(module(), tr.Box(x + 1, x))
    with pytest.raises(tr.UserError, match="takes"):
        tr.bounds(tr.trace(module(), (1, 8, 8)), x[:, :, :4], eps=0.1)
    with pytest.raises(tr.UserError, match="either"):
        tr.bounds(module(), tr.Box(x, x), eps=0.1)
