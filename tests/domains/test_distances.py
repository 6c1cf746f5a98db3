"""Boxes of distance layers: exact, sound, and by Lipschitz constants."""

from fractions import Fraction

import pytest
import torch
from torch import nn

from tightrope import nets
from tightrope.box import Box
from tightrope.domains import interval, lipschitz
from tightrope.domains.distances import distance_box
from tightrope.graph import ops, trace
from tightrope.nets.distance import Distance, sort_shares
from tightrope.precision import ROUNDING

SHAPE = (1, 4, 4)


def op_of(*shape, keep=1.0, seed=0, dyadic=False):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if dyadic:
        weight = (weight * 64).round() / 64
    shares = sort_shares(keep, shape[1]).double()
    return ops.Distance(weight, torch.tensor([0.75, 0.25]).double() if dyadic else shares)


def graph_of(name="sortnet", seed=2, **options):
    torch.manual_seed(seed)
    normalize = ((0.3,), (0.25,))
    net = nets.build(name, SHAPE, 3, width=20, depth=4, normalize=normalize, **options)
    return trace(net.double().eval(), SHAPE)


def points(box, count=300, seed=1):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, *box.lower.shape, generator=generator, dtype=torch.float64)
    uniform[::2] = uniform[::2].round()
    return box.lower + uniform * (box.upper - box.lower)


@pytest.mark.parametrize("radius", [0.0, 0.125, 1.0, 8.0])
def test_uniform_boxes_are_the_value_and_the_radius(radius):
    """With numbers that floats add without rounding: exactly y + r above, no more than 2 r wide."""
    x = (torch.randn(6, 40, dtype=torch.float64) * 64).round() / 64
    for op in (op_of(9, 40, dyadic=True), ops.Distance(op_of(9, 40, dyadic=True).weight, ONE)):
        y = distance_box(op, Box(x, x), rounding=0.0).lower
        box = distance_box(op, Box(x - radius, x + radius), rounding=0.0)
        assert torch.equal(box.upper, y + radius)
        assert (box.upper - box.lower <= 2 * radius).all()
        if len(op.shares) == 1:
            assert torch.equal(box.lower, (y - radius).clamp(min=0))


ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_boxes_hold_all_points_and_are_reached(keep):
    op = op_of(5, 12, keep=keep)
    low = torch.randn(4, 12, dtype=torch.float64)
    box = Box(low, low + torch.rand(4, 12, dtype=torch.float64))
    found = distance_box(op, box, rounding=0.0)
    strict = distance_box(op, box, rounding=ROUNDING)
    assert (strict.lower <= found.lower).all() and (strict.upper >= found.upper).all()
    for x in points(box):
        y = distance_box(op, Box(x, x), rounding=0.0).lower
        assert (y >= strict.lower).all() and (y <= strict.upper).all()
    # The farthest corner of each row, and the nearest point.
    for row in range(5):
        middle = (box.lower + box.upper) / 2
        far = torch.where(middle > op.weight[row], box.upper, box.lower)
        near = torch.minimum(torch.maximum(op.weight[row], box.lower), box.upper)
        assert torch.equal(distance_box(op, Box(far, far), rounding=0.0).upper[:, row],
                           found.upper[:, row])  # fmt: skip
        assert torch.equal(distance_box(op, Box(near, near), rounding=0.0).lower[:, row],
                           found.lower[:, row])  # fmt: skip


@pytest.mark.parametrize("keep", [1.0, 0.7])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_strict_boxes_hold_exact_values(keep, size):
    op = op_of(3, 15, keep=keep)
    low = size * torch.randn(5, 15, dtype=torch.float64)
    box = Box(low, low + 0.1 * size * torch.rand(5, 15, dtype=torch.float64))
    found = distance_box(op, box, rounding=ROUNDING)
    shares = [Fraction(s) for s in op.shares.tolist()]
    for i in range(5):
        for row in range(3):
            ends = zip(box.lower[i].tolist(), box.upper[i].tolist(), op.weight[row], strict=True)
            exact = [(Fraction(a), Fraction(b), Fraction(float(w))) for a, b, w in ends]
            most = sorted((max(b - w, w - a) for a, b, w in exact), reverse=True)
            least = sorted((max(a - w, w - b, 0) for a, b, w in exact), reverse=True)
            above = sum(s * gap for s, gap in zip(shares, most, strict=False))
            below = sum(s * gap for s, gap in zip(shares, least, strict=False))
            assert Fraction(float(found.upper[i, row])) > above
            assert Fraction(float(found.lower[i, row])) <= below


@pytest.mark.parametrize("name", ["sortnet", "linf-dist", "sortnet-mlp"])
@pytest.mark.parametrize("radius", [0.0, 1e-3, 0.05, 0.3])
def test_lipschitz_bounds_hold_all_points(name, radius):
    graph = graph_of(name)
    x = torch.rand(4, *SHAPE, dtype=torch.float64)
    box = Box.ball(x, radius)
    found, _ = interval.bounds(graph, box, rounding=ROUNDING, rules=lipschitz.RULES)
    for point in points(box, 100):
        y = graph(point)
        assert (y >= found.lower - 1e-9).all() and (y <= found.upper + 1e-9).all()
    tighter, _ = interval.bounds(graph, box, rounding=ROUNDING)
    assert (tighter.lower >= found.lower - 1e-12).all()
    assert (tighter.upper <= found.upper + 1e-12).all()


def test_lipschitz_margins_are_those_of_the_point_less_twice_the_radius():
    graph = graph_of()
    x, radius, std = torch.rand(5, *SHAPE, dtype=torch.float64) * 0.5 + 0.25, 0.01, 0.25
    labels = torch.tensor([0, 1, 2, 0, 1])
    found, _ = interval.margins(
        graph, Box.ball(x, radius), labels, rounding=ROUNDING, rules=lipschitz.RULES
    )
    y = graph(x)
    expected = y.gather(1, labels[:, None]) - y - 2 * radius / std
    expected = expected.scatter(1, labels[:, None], 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # shares are floats
    wrong = torch.ones_like(found).scatter(1, labels[:, None], 0.0).bool()
    exact = y.gather(1, labels[:, None]) - y - 2 * (Fraction(radius) * 4).__float__()
    assert (found[wrong] <= exact[wrong] + 1e-6).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_sum_of_spreads_covers_rounding(seed):
    """A network in which every number is rounded, against its value in fractions."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 8, generator=generator, dtype=torch.float64) * 1e3
    offset = torch.randn(4, generator=generator, dtype=torch.float64) * 1e3
    factor = torch.randn((), generator=generator, dtype=torch.float64)
    x = torch.randn(1, 8, generator=generator, dtype=torch.float64) * 1e3
    spread = lipschitz.RULES[ops.Distance](ops.Distance(weight, ONE), Box(x, x), rounding=ROUNDING)
    spread = lipschitz.RULES[ops.Shift](ops.Shift(offset, True), spread, rounding=ROUNDING)
    spread = lipschitz.RULES[ops.Scale](ops.Scale(factor), spread, rounding=ROUNDING)
    for row in range(4):
        gaps = [abs(Fraction(a) - Fraction(b)) for a, b in
                zip(x[0].tolist(), weight[row].tolist(), strict=True)]  # fmt: skip
        exact = (max(gaps) - Fraction(float(offset[row]))) * Fraction(float(factor))
        assert Fraction(float(spread.lower[0, row])) < exact < Fraction(float(spread.upper[0, row]))
    assert spread.reach.item() < 1e-9


def test_other_operations_go_on_by_intervals():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), Distance(5, 4), nn.Linear(4, 4), nn.Sigmoid(), Distance(4, 3)
    )
    graph = trace(net.double().eval(), (6,))
    box = Box.ball(torch.rand(3, 6, dtype=torch.float64), 0.1)
    found, _ = interval.bounds(graph, box, rounding=ROUNDING, rules=lipschitz.RULES)
    for point in points(box, 100):
        y = graph(point)
        assert (y >= found.lower).all() and (y <= found.upper).all()
    assert lipschitz.applies(graph)
    assert not lipschitz.applies(trace(nn.Linear(2, 2), (2,)))
