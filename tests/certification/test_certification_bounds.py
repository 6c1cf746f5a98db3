"""`tr.bounds`: it contains what the network computes, and tighter methods are tighter."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.certification.properties import Ball
from tightrope.errors import UserError

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


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_has_no_bounds(method: str, x: torch.Tensor) -> None:
    for given in (x[:0], tr.Box(x[:0], x[:0])):
        eps = None if isinstance(given, tr.Box) else 0.1
        box = tr.bounds(module(), given, eps=eps, method=method)
        assert box.lower.shape == box.upper.shape == (0, 4) and box.lower.dtype == torch.float64
        assert tr.bounds(module(), given, eps=eps, method=method, node="4").upper.shape == (0, 8)


def test_no_batch_at_all() -> None:
    with pytest.raises(UserError, match="x has no dimensions"):
        tr.bounds(module(), torch.tensor(0.5), eps=0.1)


def test_inputs_outside_of_the_domain_are_refused() -> None:
    net, x = module(), torch.full((1, 1, 8, 8), 1.5)
    with pytest.raises(UserError, match=r"x must lie in \[0, 1\].*domain="):
        tr.bounds(net, x, eps=0.1)
    with pytest.raises(UserError, match=r"x must lie in \[-1, 1\].*domain="):
        tr.verify(net, x[0], 0, eps=0.1, domain=(-1, 1))


@pytest.mark.parametrize("method", ["ibp", "crown", "alpha"])
def test_bounds_in_another_domain(method: str) -> None:
    net, x = module(), torch.full((1, 1, 8, 8), 1.5)
    free = tr.bounds(net, x, eps=2, domain=None, method=method)
    cut = tr.bounds(net, x, eps=2, domain=(-0.25, 3.0), method=method)
    same = tr.bounds(net, tr.Box(x.double() - 2, x.double() + 2), method=method)
    torch.testing.assert_close(free.lower, same.lower)
    for _ in range(50):
        points = (torch.rand(1, 1, 8, 8) * 3.25 - 0.25).clamp(-0.25, 3.0)
        assert cut.contains(net(points).double()).all()
    if method == "ibp":
        assert (cut.upper - cut.lower < free.upper - free.lower).all()


def test_verify_in_another_domain() -> None:
    """A threshold at 2: with pixels nothing is above it, without limits something is."""
    net = nn.Sequential(nn.Linear(1, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.0], [1.0]]))
        net[0].bias.copy_(torch.tensor([2.0, 0.0]))
    x = torch.tensor([1.0])
    assert tr.verify(net, x, 0, eps=1).verdict == "verified"
    assert tr.verify(net, x, 0, eps=1.5, domain=(-3, 1.75)).verdict == "verified"
    answer = tr.verify(net, x, 0, eps=1.5, domain=None)
    assert answer.verdict == "falsified" and float(answer.counterexample) >= 2


@pytest.mark.parametrize(("low", "high"), [(0.0, torch.inf), (-torch.inf, 0.0), (-torch.inf,) * 2])
@pytest.mark.parametrize("method", ["ibp", "crown"])
def test_a_box_without_end_is_refused(low: float, high: float, method: str) -> None:
    """Its bounds were not numbers."""
    box = tr.Box(torch.tensor([[0.0, low]]), torch.tensor([[1.0, high]]))
    with pytest.raises(UserError, match="the box is not bounded"):
        tr.bounds(nn.Linear(2, 2), box, method=method)
