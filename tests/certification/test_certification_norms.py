"""l1 and l2 balls: bounds by dual norms, attacks by projection, verdicts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightrope as tr
from tightrope.box import BallBox, length, shortened
from tightrope.certification.properties import parse_ball
from tightrope.certification.regions import distance
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, relax
from tightrope.domains.linear.pulled import Form
from tightrope.domains.reduced.reduction import reduce
from tightrope.domains.reduced.replay import lowest, strict_bounds
from tightrope.domains.reduced.splits import Bounder
from tightrope.errors import UserError
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")
NORMS = [1, 2]


def network(seed: int, inputs: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def convolutional(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def points_of(x: Tensor, eps: float, norm: int, count: int) -> Tensor:
    """Return points of the ball within [0, 1], many of them at its edge."""
    way = torch.randn(count, *x.shape, dtype=torch.float64)
    if norm == 1:
        way = way * (torch.rand_like(way) < 0.3)
    size = length(way, norm).clamp(min=1e-9).view(-1, *(1 for _ in x.shape))
    reach = torch.rand(count, dtype=torch.float64) ** 0.2 * eps * (1 - 1e-9)
    points = x.double() + way / size * reach.view_as(size)
    return points.clamp(0, 1)  # nearer in every coordinate


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown", "alpha"])
@pytest.mark.parametrize("make", [network, convolutional])
def test_points_of_the_ball_lie_within_the_bounds(norm: int, method: str, make: Any) -> None:
    shape = (6,) if make is network else (1, 5, 5)
    for seed in range(6):
        net = make(seed).double()
        x = torch.rand(2, *shape, dtype=torch.float64)
        x = torch.where(torch.rand_like(x) < 0.3, x.round(), x)  # some at the edge of the domain
        eps = (0.05, 0.4, 1.5)[seed % 3]
        found = tr.bounds(net, x, eps=eps, norm=norm, method=method)
        for i in range(2):
            outputs = net(points_of(x[i], eps, norm, 300))
            assert bool((outputs >= found.lower[i]).all() and (outputs <= found.upper[i]).all())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(10))
def test_bounds_of_an_affine_network(norm: int, seed: int) -> None:
    """Away from the domain's edges they are exact up to rounding, and never within it."""
    torch.manual_seed(seed)
    net = nn.Linear(7, 3, dtype=torch.float64)
    x = 0.4 + 0.2 * torch.rand(1, 7, dtype=torch.float64)
    eps = Fraction(3, 10) if norm == 2 else Fraction(1, 10)
    for method in ("crown", "alpha"):
        found = tr.bounds(net, x, eps=eps, norm=norm, method=method)
        for k in range(3):
            row = [Fraction(v) for v in net.weight[k].tolist()]
            middle = sum(
                (a * Fraction(v) for a, v in zip(row, x[0].tolist(), strict=True)), Fraction(0)
            )
            middle += Fraction(net.bias[k].item())
            low = middle - Fraction(float(found.lower[0, k]))
            high = Fraction(float(found.upper[0, k])) - middle
            dual = max(map(abs, row)) if norm == 1 else sum(a * a for a in row)
            for width in (low, high):
                assert width > 0
                reached = width if norm == 1 else width * width
                exact = eps * dual if norm == 1 else eps * eps * dual
                assert reached >= exact and float(reached - exact) < 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_balls_are_tighter_than_their_boxes(norm: int) -> None:
    net, x = network(0), torch.full((1, 6), 0.5)
    widths = {}
    for method in ("crown-ibp", "crown", "alpha"):
        box = tr.bounds(net, x, eps=0.2, method=method)
        ball = tr.bounds(net, x, eps=0.2, norm=norm, method=method)
        assert bool((ball.lower >= box.lower).all() and (ball.upper <= box.upper).all())
        widths[method] = float((ball.upper - ball.lower).sum() / (box.upper - box.lower).sum())
    assert max(widths.values()) < 0.9, widths


def test_a_coordinate_that_cannot_move_does_not_count() -> None:
    """Inputs at 0 only rise, so what falls when they fall does not."""
    net = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    x = torch.tensor([[0.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
    found = tr.bounds(net, x, eps=0.25, norm=2)
    assert 0.25 - 1e-12 < float(found.lower) <= 0.25
    assert 1.0 <= float(found.upper) < 1.0 + 1e-12


def exact_fall(row: list[Fraction], eps: Fraction, norm: int) -> Fraction:
    """Return `eps |row|` in the dual norm, its square for l2."""
    return eps * max(map(abs, row)) if norm == 1 else eps * eps * sum(a * a for a in row)


def test_slack_counts_on_balls() -> None:
    form = Form(
        Coefficients(torch.zeros(1, 2, dtype=torch.float64), None),
        torch.zeros(1, dtype=torch.float64),
        torch.full((1,), 0.5, dtype=torch.float64),
        {},
        2,
    )
    x = torch.full((1, 2), 0.5, dtype=torch.float64)
    ball = parse_ball(x, Fraction(1, 10), None, 2).outer()
    assert float(form.minimum(ball, rounding=ROUNDING)) <= -0.5


@pytest.mark.parametrize("norm", NORMS)
def test_replays_on_balls_round_down(norm: int) -> None:
    """Rows of the input alone: strict bounds of the reduced network are below the exact ones."""
    for seed in range(20):
        torch.manual_seed(seed)
        net = nn.Linear(9, 4, bias=False, dtype=torch.float64)
        x = 0.4 + 0.2 * torch.rand(1, 9, dtype=torch.float64)
        eps = Fraction(1, 7)
        ball = parse_ball(x, eps, None, norm).outer()
        graph = tr.trace(net, (9,)).detach()
        relaxation = relax(graph, ball, effort=CROWN, rounding=ROUNDING)
        matrix = torch.eye(4, dtype=torch.float64)
        reduced = reduce(relaxation, matrix, matrix.new_zeros(4))
        # The search itself is the same: no neuron, so nothing but the inputs.
        found = strict_bounds(reduced, Bounder(reduced).root(torch.arange(4)))
        for k in range(4):
            row = [Fraction(v) for v in net.weight[k].tolist()]
            pairs = zip(row, x[0].tolist(), strict=True)
            width = sum((a * Fraction(v) for a, v in pairs), -Fraction(float(found[k])))
            assert width > 0
            reached = width if norm == 1 else width * width
            assert reached >= exact_fall(row, eps, norm)
            assert float(reached - exact_fall(row, eps, norm)) < 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_sums_on_balls_round_down(norm: int) -> None:
    """Rows as they are, without any slack: nothing but the last sums is rounded."""
    torch.manual_seed(0)
    rows = torch.randn(400, 5, dtype=torch.float64)
    x = 1 + torch.rand(1, 5, dtype=torch.float64)
    eps, nothing = Fraction(1, 4), torch.zeros(400, dtype=torch.float64)
    ball = parse_ball(x, eps, None, norm).outer()
    form = Form(Coefficients(rows, None), nothing, nothing, {}, 5)
    for found in (form.minimum(ball, rounding=ROUNDING), lowest(ball, rows, ROUNDING)):
        for row, low in zip(rows.tolist(), found.tolist(), strict=True):
            exact = [Fraction(v) for v in row]
            pairs = zip(exact, x[0].tolist(), strict=True)
            width = sum((a * Fraction(v) for a, v in pairs), -Fraction(low))
            assert width > 0
            assert (width if norm == 1 else width * width) >= exact_fall(exact, eps, norm)


# --- the ball itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_membership_is_exact(norm: int) -> None:
    x = torch.zeros(1, 2, dtype=torch.float64)
    ball = parse_ball(x, Fraction(5), None, norm).inner()
    assert isinstance(ball, BallBox)
    at = {1: [2.0, 3.0], 2: [3.0, 4.0]}[norm]
    inside = torch.tensor([at], dtype=torch.float64)
    assert bool(ball.contains(inside)[0])
    outside = torch.tensor([[at[0], math.nextafter(at[1], 9)]], dtype=torch.float64)
    assert not bool(ball.contains(outside)[0])
    # The sum of floats would be 5 in either case.
    tiny = torch.tensor([[5.0, 1e-30]], dtype=torch.float64)
    assert not bool(ball.contains(tiny)[0])


def test_the_reach_is_not_below_the_radius() -> None:
    x = torch.zeros(1, 1)
    for eps in (Fraction(1, 3), Fraction(1, 10), Fraction(3, 10), Fraction(2, 255), Fraction(1, 4)):
        ball = parse_ball(x, eps, None, 2).outer()
        assert isinstance(ball, BallBox)
        assert eps <= Fraction(ball.reach) <= eps * (1 + Fraction(1, 10**15))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projections_lead_into_the_ball(norm: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (1, 3, 200):
        x = torch.rand(4, size).to(dtype)
        ball = parse_ball(x, Fraction(1, 10), (0.0, 1.0), norm).inner()
        for points in (torch.rand(4, size).to(dtype), ball.sample(), x, x + 5):
            found = ball.project(points)
            assert bool(ball.contains(found).all())
            again = ball.project(found)
            assert torch.allclose(again, found, atol=1e-5)
        near = x + torch.where(torch.arange(size) == 0, 0.01, 0.0).to(dtype)
        kept = near.clamp(0, 1)
        assert torch.equal(ball.project(kept), kept)


@pytest.mark.parametrize("norm", NORMS)
def test_shortened_is_the_nearest(norm: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 8, dtype=torch.float64)
    found = shortened(x, 0.7, norm)
    assert bool((length(found, norm) <= 0.7 + 1e-12).all())
    others = shortened(
        found + 0.05 * torch.randn(500, 5, 8, dtype=torch.float64).view(500, 5, 8)[0], 0.7, norm
    )
    assert bool((length(x - found, 2) <= length(x - others, 2) + 1e-12).all())


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(10))
def test_affine_networks_are_decided_exactly(norm: int, seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Linear(5, 2)
    x = 0.4 + 0.2 * torch.rand(5)
    label = int(net(x[None]).argmax())
    rows = [[Fraction(v) for v in row] for row in net.weight.tolist()]
    bias = [Fraction(v) for v in net.bias.tolist()]
    values = [Fraction(v) for v in x.tolist()]
    slope = [a - b for a, b in zip(rows[label], rows[1 - label], strict=True)]
    margin = sum(a * v for a, v in zip(slope, values, strict=True)) + bias[label] - bias[1 - label]
    exact = float(margin) / (
        float(max(map(abs, slope))) if norm == 1 else math.sqrt(sum(a * a for a in slope))
    )
    below, above = (Fraction(exact * share).limit_denominator(10**6) for share in (0.999, 1.01))
    assert tr.verify(net, x, label, eps=below, norm=norm, domain=None).verdict == "verified"
    found = tr.verify(net, x, label, eps=above, norm=norm, domain=None)
    assert found.verdict == "falsified" and found.counterexample is not None
    assert distance(x, found.counterexample, norm) <= above * (1 + Fraction(1, 10**15))
    assert int(net(found.counterexample[None]).argmax()) != label


@pytest.mark.parametrize("norm", NORMS)
def test_verdicts_agree_with_points_and_attacks(norm: int) -> None:
    decided = 0
    for seed in range(12):
        net = network(seed)
        x = torch.rand(6)
        label = int(net(x[None]).argmax())
        eps = Fraction((1, 3, 8, 20)[seed % 4], 20)
        found = tr.verify(net, x, label, eps=eps, norm=norm, timeout=20)
        points = points_of(x, float(eps), norm, 3000).float()
        broken = bool((net(points).argmax(1) != label).any())
        if found.verdict == "falsified":
            point = found.counterexample
            assert point is not None and bool(((point >= 0) & (point <= 1)).all())
            pairs = list(zip(point.tolist(), x.tolist(), strict=True))
            exact = sum(abs(Fraction(a) - Fraction(b)) ** norm for a, b in pairs)
            assert exact <= eps**norm
            assert int(net(point[None]).argmax()) != label
        if found.verdict == "verified":
            assert not broken
        decided += found.verdict != "unknown"
    assert decided >= 10


@pytest.mark.parametrize("split", ["auto", "input", "relu"])
def test_any_search_is_sound_on_balls(split: str) -> None:
    for seed in range(4):
        net = network(seed, inputs=3)
        x = torch.rand(3)
        label = int(net(x[None]).argmax())
        found = tr.verify(net, x, label, eps=0.3, norm=2, split=split, timeout=10)
        if found.verdict == "verified":
            points = points_of(x, 0.3, 2, 5000).float()
            assert bool((net(points).argmax(1) == label).all())


@pytest.mark.parametrize("norm", NORMS)
def test_the_largest_radius_in_a_norm(norm: int) -> None:
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    x = torch.tensor([0.5, 0.5])
    exact = {1: 1.0, 2: math.sqrt(0.5)}[norm]
    found = tr.largest_radius(net, x, 0, norm=norm, largest=4, domain=None, tolerance=1e-3)
    assert found.upper is not None
    assert float(found.lower) <= exact <= float(found.upper) * (1 + 1e-6)
    assert float(found.upper - found.lower) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": 3}, "norm must be linf, l2 or l1 .*, got 3"),
        ({"norm": "two"}, "norm must be linf, l2 or l1"),
        ({"norm": None}, "norm must be linf, l2 or l1"),
        ({"norm": 2, "eps": torch.rand(6)}, "radii by feature go with norm=inf"),
        ({"norm": 2, "eps": 0}, "eps must be a positive number"),
    ],
)
def test_refusals_of_norms(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tr.verify(network(0), torch.full((6,), 0.5), 0, **{"eps": 0.1, **options})
