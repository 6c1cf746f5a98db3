"""Hybrid zonotopes: DiffAI's values, what holds of all of them, and estimates by Cauchy vectors."""

from __future__ import annotations

import pytest
import torch
from enclosures import assert_inside
from fuzzed import zonotope_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval, zonotope
from tightrope.domains.error_terms import Errors, Own, Projected, Spread, own, projected
from tightrope.domains.hybrid import Zonotope
from tightrope.domains.strips import SLOPES, strip
from tightrope.graph import Graph, Node, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

RELU = Graph((Node("input", ops.Input(), (), (1,)), Node("relu", ops.Relu(), (0,), (1,))))
KINDS = {  # DiffAI's domains: H, Z, HRand and Box
    "h": {"fresh": False},
    "z": {},
    "random": {"fresh": False, "inputs": 2},
    "random z": {"inputs": 2},
    "box": {"fresh": False, "inputs": 0},
}


def double(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def relu_on(lower: float, upper: float, **kind: object) -> Zonotope:
    box = Box(double(lower), double(upper))
    return zonotope.propagate(RELU, box, errors=Errors(**kind))[1]


def ends(z: Zonotope) -> tuple[float, float]:
    return z.box.lower.item(), z.box.upper.item()


def small(seed: int = 0, *, hidden: int = 6) -> Graph:
    torch.manual_seed(seed)
    layers = [nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return trace(nn.Sequential(*layers, nn.Linear(hidden, 3)).double(), (3,)).detach()


# --- values of DiffAI's formulas, for a head of 1 and one generator of 2 ------------------------


@pytest.mark.parametrize(
    ("relu", "head", "rest", "generator", "expected"),
    [
        ("box", 1.5, 1.5, 0.0, (0, 3)),
        ("switch", 1.5, 0.5, 2.0, (-1, 4)),
        ("deepz", 1.125, 0.375, 1.5, (-0.75, 3)),
        ("smooth", 1.5, 0.75, 1.5, (-0.75, 3.75)),
    ],
)
def test_the_four_relus(relu, head, rest, generator, expected):
    slack = 1e-4 if relu == "smooth" else 1e-12  # its share has 1e-4 in the denominator
    found = relu_on(-1, 3, relu=relu, fresh=False)
    assert found.center.item() == pytest.approx(head, abs=slack)
    assert found.rest.item() == pytest.approx(rest, abs=slack)
    assert found.generators.flatten().tolist() == pytest.approx([generator], abs=slack)
    assert ends(found) == pytest.approx(expected, abs=slack)
    terms = relu_on(-1, 3, relu=relu)
    assert terms.rest is None
    assert terms.generators.flatten().tolist() == pytest.approx([generator, rest], abs=slack)


@pytest.mark.parametrize(
    ("relu", "expected"), [("box", (0, 1)), ("switch", (0, 1)), ("deepz", (-0.75, 1))]
)
def test_the_mirrored_neuron(relu, expected):
    for fresh in (True, False):
        assert ends(relu_on(-3, 1, relu=relu, fresh=fresh)) == pytest.approx(expected, abs=1e-12)


def test_smooth_shares_the_strips_of_slope_one_and_of_the_box():
    lower, upper = double(-1.0, -3.0, -0.5, -2.0), double(3.0, 1.0, 0.5, 1e-3)
    found = strip("smooth", Box(lower, upper))
    share = -lower / (upper - lower + 1e-4)
    torch.testing.assert_close(found.slope, 1 - share)
    mu = (1 - share) * -lower / 2 + share * upper / 2
    torch.testing.assert_close(found.middle, mu)
    torch.testing.assert_close(found.radius, mu)


@pytest.mark.parametrize("relu", SLOPES)
@pytest.mark.parametrize("negative", [0.0, 0.1, 1.0, 1.5])
def test_strips_hold_the_activation_and_have_finite_gradients(relu, negative):
    lower = double(-1.0, -3.0, -1.0, 0.0, 1.0, 0.0, -1e-300).requires_grad_()
    upper = double(3.0, 1.0, 0.0, 2.0, 2.0, 0.0, 1e-300).requires_grad_()
    lines = strip(relu, Box(lower, upper), negative=negative)
    for share in torch.linspace(0, 1, 41, dtype=torch.float64):
        x = (lower + share * (upper - lower)).detach()
        value = torch.where(x > 0, x, negative * x)
        assert ((value - lines.slope * x - lines.middle).abs() <= lines.radius + 1e-12).all()
    sum(part.sum() for part in lines).backward()
    assert lower.grad.isfinite().all() and upper.grad.isfinite().all()


def test_the_rest_goes_through_layers_like_a_box():
    """One layer, by hand: `W h + b`, `|W| beta`, `W E`."""
    linear = nn.Linear(2, 2).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
        linear.bias.copy_(torch.tensor([0.5, -1.0]))
    start = Zonotope(
        double(1, 2), {1: Spread(torch.tensor([[[1.0, 1.0]]]).double())}, double(0.25, 0.5)
    )
    graph = trace(linear, (2,))
    found = graph.propagate(zonotope.RULES, start, errors=Errors())[len(graph.nodes) - 1]
    assert found.center.tolist() == [[-2.5, 3.0]]
    assert found.rest.tolist() == [[1.25, 1.0]]
    assert found.generators.tolist() == [[[-1.0, 3.5]]]
    assert found.box.radius.tolist() == [[2.25, 4.5]]


# --- what holds of all of them -----------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), relu=st.sampled_from(sorted(SLOPES)))
def test_no_point_leaves_the_bounds_of_any_node(data, kind, relu):
    module = data.draw(networks(containing=ops.Relu))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    # Strips that do not go through the ends make zonotopes a few times larger than boxes.
    factor = 4.0 * 16 ** len(graph.relus)
    slack = {i: factor * e for i, e in zonotope_errors(graph, box, torch.float64).items()}
    every = range(len(graph.nodes))
    found = zonotope.bounds(graph, box, keep=every, errors=Errors(relu, **KINDS[kind]))[1]
    assert_inside(graph, found, points_in(box, 16), slack)


@pytest.mark.parametrize("relu", SLOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_margins_hold(kind, relu):
    graph = small()
    x, y = torch.rand(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    box = Box.ball(x, 0.2)
    found, seen = zonotope.margins(graph, box, y, keep=(2, 5), errors=Errors(relu, **KINDS[kind]))
    outputs = graph(box.repeat(500).sample()).view(5, 500, 3)
    own = outputs.gather(2, y.view(5, 1, 1).expand(-1, 500, 1))
    assert ((own - outputs).amin(1) >= found - 1e-12).all()
    assert found.gather(1, y[:, None]).abs().max() <= 1e-12
    assert seen.keys() == {2, 5}
    # Merged with the last layer they are never below differences of its outputs' bounds.
    outside = zonotope.bounds(graph, box, errors=Errors(relu, **KINDS[kind]))[0]
    if not kind.startswith("random"):
        apart = outside.lower.gather(1, y[:, None]) - outside.upper
        assert (found >= apart.scatter(1, y[:, None], 0.0) - 1e-9).all()


def test_boxes_are_intervals():
    """Without error terms and with the box's ReLU it is interval arithmetic."""
    graph, x = small(), torch.rand(4, 3, dtype=torch.float64)
    box, every = Box.ball(x, 0.1), range(6)
    found = zonotope.bounds(graph, box, keep=every, errors=Errors("box", fresh=False, inputs=0))[1]
    expected = interval.bounds(graph, box, keep=every)[1]
    for i in every:
        torch.testing.assert_close(found[i].lower, expected[i].lower)
        torch.testing.assert_close(found[i].upper, expected[i].upper)


def test_with_all_inputs_drawn_it_is_the_hybrid_zonotope():
    graph, x = small(), torch.rand(4, 3, dtype=torch.float64)
    box = Box.ball(x, 0.1)
    drawn = zonotope.bounds(graph, box, errors=Errors("switch", fresh=False, inputs=3))[0]
    whole = zonotope.bounds(graph, box, errors=Errors("switch", fresh=False))[0]
    torch.testing.assert_close(drawn.lower, whole.lower)
    torch.testing.assert_close(drawn.upper, whole.upper)


@pytest.mark.parametrize("relu", SLOPES)
def test_where_terms_are_kept_a_linear_map_is_tighter(relu):
    """Up to the second ReLU's inputs: Z in H in Box, neuron by neuron, for one relu."""
    graph, x = small(3), torch.rand(6, 3, dtype=torch.float64)
    box = Box.ball(x, 0.3)
    kinds = [Errors(relu, **KINDS[name]) for name in ("z", "h", "box")]
    before = [zonotope.bounds(graph, box, keep=(1, 3), errors=e)[1] for e in kinds]
    for i in (1, 3):
        radii = [found[i].radius for found in before]
        assert (radii[0] <= radii[1] + 1e-12).all()
    assert (before[1][1].radius <= before[2][1].radius + 1e-12).all()


def test_nesting_of_outputs_is_not_guaranteed():
    """METHODS of the field say Z in H in Box; a single neuron is a counterexample to H in Box."""
    wide, narrow = relu_on(-1, 3, relu="deepz", fresh=False), relu_on(-1, 3, relu="box")
    assert wide.box.lower.item() < narrow.box.lower.item() == 0.0


def test_a_zonotope_may_be_wider_than_a_hybrid_one():
    """Z in H fails, too: tighter bounds move centres, by which "switch" takes one strip or another.

    The third layer's neurons lie in [-3, 4] by Z and in [-4, 5] by H. What the last one reads has
    the centre 0 by Z, which keeps slope 1, and -1/2 by H, which takes the box.
    """
    weights = [
        ([[1.0]], [0.0]),
        ([[1.0], [2.0]], [2.0, 0.0]),
        ([[-1.0, 1.0], [-1.0, 1.0]], [0.0, 0.0]),
        ([[1.0, -2.0]], [2.0]),
    ]
    layers = []
    for weight, bias in weights:
        linear = nn.Linear(len(weight[0]), len(weight)).double()
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(weight))
            linear.bias.copy_(torch.tensor(bias))
        layers += [linear, nn.ReLU()]
    graph = trace(nn.Sequential(*layers), (1,)).detach()
    box = Box(double(-1.0), double(3.0))
    found = {}
    for kind in ("z", "h"):
        keep = (5, len(graph.nodes) - 1)
        out, seen = zonotope.bounds(graph, box, keep=keep, errors=Errors("switch", **KINDS[kind]))
        found[kind] = [(b.lower[0, 0].item(), b.upper[0, 0].item()) for b in (seen[5], out)]
    assert found["z"] == [(-3.0, 4.0), (-8.0, 16.0)]
    assert found["h"] == [(-4.0, 5.0), (0.0, 15.0)]


def test_every_relu_is_exact_on_stable_neurons():
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    with torch.no_grad():
        first.bias.copy_(torch.tensor([9.0, 9.0, -9.0, 9.0]))
    graph = trace(nn.Sequential(first, nn.ReLU(), second).double(), (3,)).detach()
    x = torch.rand(2, 3, dtype=torch.float64)
    weight = graph.nodes[3].op.weight * torch.tensor([1.0, 1.0, 0.0, 1.0]).double()
    radius = 0.1 * (weight @ graph.nodes[1].op.weight).abs().sum(1)
    for relu in SLOPES:
        for fresh in (True, False):
            box = Box.around(x, torch.full_like(x, 0.1))
            found = zonotope.bounds(graph, box, errors=Errors(relu, fresh=fresh))[0]
            torch.testing.assert_close(found.radius, radius.expand(2, 2))
            torch.testing.assert_close(found.center, graph(x))


# --- error terms -------------------------------------------------------------------------------


def test_own_terms_are_generators_without_being_written():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2, stride=2, padding=1, bias=False).double()
    group = own(torch.rand(4, 2, 3, 3, dtype=torch.float64), torch.rand(18) > 0.4)
    assert isinstance(group, Own)
    written, behind = group.spread(), group.through(conv)
    assert written.values.shape == (4, len(group.places), 2, 3, 3)
    torch.testing.assert_close(behind.values, written.through(conv).values)
    doubled = group.along(lambda t: -2 * t)
    torch.testing.assert_close(doubled.spread().values, -2 * written.values)
    torch.testing.assert_close(doubled.size(), 2 * group.size())


def test_cauchy_vectors_estimate_sums_of_absolute_values():
    """Of 4,001 numbers the median is within 10 % of the scale, ten standard deviations."""
    torch.manual_seed(0)
    radius = torch.rand(2, 5, dtype=torch.float64)
    matrix = torch.randn(3, 5, dtype=torch.float64)
    group = projected(radius, 4001, seed=0)
    assert isinstance(group, Projected)
    exact = own(radius).through(lambda t: t @ matrix.T)
    estimate = group.through(lambda t: t @ matrix.T).size()
    torch.testing.assert_close(estimate, exact.size(), rtol=0.1, atol=0)
    assert not torch.equal(estimate, exact.size())


def test_projected_bounds_come_near_the_exact_ones(monkeypatch):
    graph, x = small(1), torch.rand(4, 3, dtype=torch.float64)
    box = Box.ball(x, 0.2)
    monkeypatch.setattr(Errors, "_many", lambda e, radius: e.projections > 0)  # few terms
    found = zonotope.bounds(graph, box, errors=Errors(projections=4001, seed=0))[0]
    exact = zonotope.bounds(graph, box)[0]
    torch.testing.assert_close(found.radius, exact.radius, rtol=0.15, atol=0)
    torch.testing.assert_close(found.center, exact.center, rtol=0.15, atol=0.05)


def test_different_inputs_are_drawn_for_each_sample():
    torch.manual_seed(0)
    box = Box.ball(torch.rand(50, 30, dtype=torch.float64), 0.1, low=-1, high=2)
    groups, rest = Errors(fresh=False, inputs=7).of_input(box)
    (group,) = groups.values()
    correlated = group.size() > 0
    assert correlated.sum(1).tolist() == [7] * 50
    assert len({tuple(row) for row in correlated.tolist()}) == 50
    torch.testing.assert_close(rest, torch.where(correlated, 0.0, box.radius))
