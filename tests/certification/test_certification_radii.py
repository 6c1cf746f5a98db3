"""The largest radius: proved from below, attacked from above."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.certification.regions import distance
from tightrope.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


def linear_network(seed: int) -> tuple[nn.Linear, torch.Tensor, Fraction]:
    """Return a network of two classes, an input, and the exact radius at which they tie."""
    torch.manual_seed(seed)
    net = nn.Linear(4, 2)
    x = torch.full((4,), 0.5)
    with torch.no_grad():
        net.weight.copy_((net.weight * 64).round() / 64)
        net.bias.copy_((net.bias * 64).round() / 64)
    rows = [[Fraction(v) for v in row] for row in net.weight.tolist()]
    first, second = rows
    bias = [Fraction(v) for v in net.bias.tolist()]
    margin = sum((a - b) / 2 for a, b in zip(first, second, strict=True)) + bias[0] - bias[1]
    slope = sum(abs(a - b) for a, b in zip(first, second, strict=True))
    return net, x, abs(margin) / slope


@pytest.mark.parametrize("seed", range(8))
def test_the_exact_radius_lies_between(seed: int) -> None:
    net, x, exact = linear_network(seed)
    label = int(net(x[None]).argmax())
    found = tr.largest_radius(net, x, label, tolerance=1e-3, largest=4, domain=None)
    assert found.upper is not None and found.counterexample is not None
    assert found.lower <= exact
    # The network itself rounds: at a tie it may answer otherwise a little earlier.
    assert found.upper >= exact * (1 - Fraction(1, 10**5))
    assert (found.upper - found.lower) <= Fraction(2, 1000) * found.upper
    assert int(net(found.counterexample[None]).argmax()) != label
    assert distance(x, found.counterexample) == found.upper
    assert len(found.steps) >= 5 and "steps" in repr(found) and "by" in repr(found.steps[0])
    # What is said of it holds for `verify`, too.
    assert tr.verify(net, x, label, eps=found.lower, domain=None).verdict == "verified"
    beyond = tr.verify(net, x, label, eps=found.upper, domain=None)
    assert beyond.verdict == "falsified"


def test_a_network_that_is_robust_everywhere() -> None:
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([1.0, 0.0]))
    found = tr.largest_radius(net, torch.full((3,), 0.5), 0)
    assert (found.lower, found.upper, found.counterexample) == (1, None, None)
    assert len(found.steps) == 1


def test_an_input_that_is_wrong_itself() -> None:
    net, x, _ = linear_network(0)
    label = 1 - int(net(x[None]).argmax())
    found = tr.largest_radius(net, x, label)
    assert (found.lower, found.upper) == (0, 0)
    assert found.counterexample is not None and torch.equal(found.counterexample, x)


def test_specs_have_a_radius() -> None:
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    found = tr.largest_radius(net, torch.tensor([0.5]), spec=tr.within(0.25, 0.75), tolerance=1e-4)
    assert found.upper is not None
    assert found.lower <= Fraction(1, 4) < found.upper <= Fraction(1, 4) + Fraction(1, 10**4)
    assert found.lower >= Fraction(1, 4) * (1 - Fraction(2, 10**4))


def test_what_is_too_hard_stays_open() -> None:
    """Without time there is neither a proof nor a counterexample, and no claim."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    x = torch.full((4,), 0.5)
    label = int(net(x[None]).argmax())
    found = tr.largest_radius(net, x, label, timeout=1e-3)
    assert found.lower == 0 or tr.verify(net, x, label, eps=found.lower).verdict == "verified"
    for step in found.steps:
        assert step.answer.verdict in ("verified", "falsified", "unknown")


def test_distances_are_exact() -> None:
    x = torch.tensor([1e8, 0.1, 1.0])
    assert distance(x, torch.tensor([1e8, 0.1, 1.0])) == 0
    point = torch.tensor([1e8, 1e-30, 1.0])
    assert distance(x, point) == Fraction(float(x[1])) - Fraction(float(point[1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0}, "tolerance must lie between 0 and 1"),
        ({"tolerance": 1.5}, "tolerance must lie between 0 and 1"),
        ({"largest": 2}, "largest must lie in"),
        ({"largest": "far"}, "largest must be a number"),
        ({"timeout": 0}, "timeout must be"),
        ({"label": 7}, "label must be one of 0 to 1"),
        ({"label": None}, "either a label or a spec"),
        ({"x": [0.5] * 4}, "x must be a torch tensor"),
    ],
)
def test_refusals_of_radii(options: dict[str, object], message: str) -> None:
    net, x, _ = linear_network(0)
    with pytest.raises(UserError, match=message):
        tr.largest_radius(**{"network": net, "x": x, "label": 0, **options})  # type: ignore[arg-type]
