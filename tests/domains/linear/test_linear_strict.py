"""Strict linear bounds against exact arithmetic: no tolerance, in float32 and in float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import exact_values, fractions, inside
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_helpers import EFFORTS, OPERATIONS, output_rows, signed_rows
from lost_digits import cancelling, digits, eps
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.alpha import optimize_slopes
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import CROWN, Effort, relax
from tightrope.graph import Graph, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def row_bounds(found: Relaxation, matrix: Tensor) -> list[Tensor]:
    """Return bounds of the rows (batch of one) with default, optimised and random slopes."""
    rows = output_rows(found, matrix)
    start = optimize_slopes(found, found.output, rows, iterations=0)
    torch.manual_seed(0)
    tried = [
        {},
        optimize_slopes(found, found.output, rows, iterations=2),
        {i: torch.rand_like(t) for i, t in start.items()},
    ]
    return [found.lower(found.output, rows, slopes=slopes) for slopes in tried]


def assert_exact(graph: Graph, box: Box, points: Tensor, effort: Effort) -> None:
    """Check nodes and rows of the output at each point, in fractions."""
    dtype = box.lower.dtype
    found = relax(graph, box, effort=effort, rounding=eps(dtype))
    matrix = signed_rows(graph.output_shape[0], torch.Generator().manual_seed(0), dtype)
    bounds = [torch.where(torch.isfinite(b), b, -3e38) for b in row_bounds(found, matrix)]
    exact_matrix = fractions(matrix)
    for point in points:
        values = exact_values(graph, point)
        for i, exact in values.items():
            assert inside(found.boxes[i], exact), f"node {i}, {graph.nodes[i].op}"
        rows = exact_matrix @ values[found.output]
        for bound in bounds:
            assert np.all(fractions(bound) <= rows)


def check_random(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    module = data.draw(networks(containing=op, classes=3)).to(dtype)
    if data.draw(st.booleans()):
        module.append(nn.ReLU(), (len(module.steps),))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=1, dtype=dtype))
    points = points_in(box, 3, seed=data.draw(st.integers(0, 99)))
    effort = EFFORTS[data.draw(st.sampled_from(sorted(EFFORTS)))]
    assert_exact(graph, box, points, effort)


@BOTH
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_random_networks(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_random(op, dtype, data)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=40)
@given(data=st.data())
def test_random_networks_at_length(
    op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check_random(op, dtype, data)


def check_cancelling(dtype: torch.dtype, data: st.DataObject) -> None:
    graph, box = data.draw(cancelling(dtype))
    effort = EFFORTS[data.draw(st.sampled_from(sorted(EFFORTS)))]
    assert_exact(graph, box, points_in(box, 4), effort)


@BOTH
@settings(max_examples=30)
@given(data=st.data())
def test_cancellation(dtype: torch.dtype, data: st.DataObject) -> None:
    check_cancelling(dtype, data)


@pytest.mark.slow
@BOTH
@settings(max_examples=400)
@given(data=st.data())
def test_cancellation_at_length(dtype: torch.dtype, data: st.DataObject) -> None:
    check_cancelling(dtype, data)


# --- plain bounds fail, strict ones do not ------------------------------------------------------


def losing(dtype: torch.dtype) -> nn.Module:
    """`x + 0.3` by way of `x + 2^24`, where float32 has no fractions any more (2^53 in float64)."""
    big = 2.0 ** digits(dtype)
    layers: list[nn.Module] = []
    for bias in (big, 0.3, -big):
        layer = nn.Linear(1, 1).to(dtype)
        nn.init.constant_(layer.weight, 1.0)
        nn.init.constant_(layer.bias, bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@BOTH
def test_plain_bounds_are_violated_and_strict_ones_are_not(dtype: torch.dtype) -> None:
    """The reason for strict mode, and the proof that these tests would notice without it."""
    graph = trace(losing(dtype), (1,)).detach()
    violated = 0
    for x in (3.0, 1.0, 0.3):
        point = torch.tensor([[x]], dtype=dtype)
        exact = exact_values(graph, point[0])[len(graph.nodes) - 1][0]
        for sign in (1.0, -1.0):
            row = torch.tensor([[sign]], dtype=dtype)
            bounds = []
            for rounding in (0.0, eps(dtype)):
                found = relax(graph, Box(point, point), effort=CROWN, rounding=rounding)
                bound = found.lower(found.output, output_rows(found, row))
                bounds.append(Fraction(bound.item()))
            violated += bounds[0] > Fraction(sign) * exact
            assert bounds[1] <= Fraction(sign) * exact
    assert violated > 0, "plain bounds are wrong for some of these"


@BOTH
@pytest.mark.parametrize("shape", [(12,), (3, 2, 2)])
def test_coefficients_that_cancel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Two layers whose product loses all but a few bits, dense and as convolutions."""
    generator = torch.Generator().manual_seed(0)
    big, violated = 2.0 ** digits(dtype), 0
    for _ in range(20):
        size = torch.Size(shape).numel() if len(shape) == 1 else shape[0]
        up = torch.randint(-4, 5, (8, size), generator=generator).to(dtype)
        down = torch.randint(-4, 5, (2, 8), generator=generator).to(dtype)
        up[1::2] = up[::2] + torch.randint(-1, 2, (4, size), generator=generator) / big
        down[:, ::2] *= big
        down[:, 1::2] = -down[:, ::2] + torch.randint(-3, 4, (2, 4), generator=generator)
        if len(shape) == 1:
            layers = [nn.Linear(size, 8), nn.Identity(), nn.Linear(8, 2)]
        else:
            layers = [nn.Conv2d(size, 8, 1), nn.Conv2d(8, 2, 1), nn.Flatten()]
        for layer, weight in zip(
            [m for m in layers if hasattr(m, "weight")], (up, down), strict=True
        ):
            layer.to(dtype)
            layer.weight = nn.Parameter(weight.view_as(layer.weight))
        graph = trace(nn.Sequential(*layers), shape).detach()
        x = (torch.randn(1, *shape, generator=generator) * 3).to(dtype)
        assert_exact(graph, Box(x, x), x, EFFORTS["crown-ibp"])
        plain = relax(graph, Box(x, x), effort=EFFORTS["crown-ibp"])
        matrix = torch.eye(graph.output_shape[0], dtype=dtype)
        bound = plain.lower(plain.output, output_rows(plain, matrix))
        exact = exact_values(graph, x[0])[plain.output]
        violated += bool((fractions(bound) > exact).any())
    assert violated > 0, "plain bounds are wrong for some of these"


class ManyShifts(nn.Module):
    """A large number that is added first and taken away last, with small ones between."""

    def __init__(self, big: float, count: int) -> None:
        super().__init__()
        self.big, self.count = big, count

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.big
        for k in range(self.count):
            x = x + (0.3 + 0.6 * (k % 2))
        return x + self.big


@BOTH
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_partial_sums_that_cancel(sign: float, dtype: torch.dtype) -> None:
    """Each small number is rounded against the large one, and none of that shows at the end."""
    module = ManyShifts(sign * 2.0 ** (digits(dtype) - 1), 200)
    graph = trace(module, (1,)).detach()
    x = torch.tensor([[0.5]], dtype=dtype)
    exact = exact_values(graph, x[0])[len(graph.nodes) - 1][0]
    violated = 0
    for direction in (1.0, -1.0):
        row = torch.tensor([[direction]], dtype=dtype)
        for rounding in (0.0, eps(dtype)):
            found = relax(graph, Box(x, x), effort=EFFORTS["crown"], rounding=rounding)
            bound = Fraction(found.lower(found.output, output_rows(found, row)).item())
            if rounding:
                assert bound <= Fraction(direction) * exact
            else:
                violated += bound > Fraction(direction) * exact
    assert violated > 0


@BOTH
def test_products_that_underflow(dtype: torch.dtype) -> None:
    """A coefficient below the smallest number meets a large input."""
    small, large = (1e-30, 1e37) if dtype == torch.float32 else (1e-200, 1e300)
    layers = [nn.Linear(1, 1, bias=False).to(dtype) for _ in range(2)]
    for layer in layers:
        nn.init.constant_(layer.weight, small)
    graph = trace(nn.Sequential(*layers), (1,)).detach()
    for value in (large, -large):
        x = torch.full((1, 1), value, dtype=dtype)
        assert_exact(graph, Box(x, x), x, EFFORTS["crown-ibp"])


@BOTH
@pytest.mark.parametrize("slope", [0.01, 0.3, 1.7])
def test_leaky_slopes_are_exact(slope: float, dtype: torch.dtype) -> None:
    """A slope rounded to another type is off by more than the rounding errors."""
    graph = trace(nn.Sequential(nn.LeakyReLU(slope)), (3,)).detach()
    box = Box(
        torch.tensor([[-3.0, -2.0, 1.0]], dtype=dtype),
        torch.tensor([[-3.0, 1.0, 2.0]], dtype=dtype),
    )
    assert_exact(graph, box, points_in(box, 8), EFFORTS["crown"])


@BOTH
def test_a_box_given_by_centre_and_radius(dtype: torch.dtype) -> None:
    """The true corners of such a box need not be floating-point numbers; they count, too."""
    center = torch.ones(1, 1, dtype=dtype)
    box = Box.around(center, center * eps(dtype) / 8)
    graph = trace(nn.Sequential(nn.ReLU()), (1,)).detach()
    found = relax(graph, box, rounding=eps(dtype))
    rows = output_rows(found, torch.tensor([[1.0], [-1.0]], dtype=dtype))
    lower = found.lower(found.output, rows)
    radius = Fraction(eps(dtype)) / 8
    assert Fraction(lower[0].item()) <= 1 - radius
    assert -Fraction(lower[1].item()) >= 1 + radius


@settings(max_examples=30)
@given(data=st.data())
def test_strict_bounds_are_not_much_lower(data: st.DataObject) -> None:
    """What strict mode takes off is small unless large numbers cancel."""
    allowed = {ops.Linear, ops.Relu, ops.Conv2d, ops.LeakyRelu, ops.Add, ops.AvgPool}
    module = data.draw(networks(allowed=allowed, classes=3))
    graph = trace(module, module.input_shape).detach()
    box = Box.ball(torch.rand(1, *module.input_shape, dtype=torch.float64), 0.1)
    bounds = []
    for rounding in (0.0, eps(torch.float64)):
        found = relax(graph, box, effort=EFFORTS["crown"], rounding=rounding)
        bounds.append(found.lower(found.output, output_rows(found, torch.eye(3).double())))
    largest = max(float(t.max()) for t in found.terms.values())
    assert (bounds[1] <= bounds[0] + 1e-12 * largest).all()
    assert (bounds[0] - bounds[1] <= 1e-9 * largest).all()
