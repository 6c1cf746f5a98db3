"""Strict mode against exact arithmetic: no tolerance, in float32 as well as in float64.

Bounds with `rounding` claim to contain the exact real-number values. Here these are computed as
fractions, for random networks and for networks made to lose digits.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from exact import exact_values, fractions, inside
from hypothesis import given, settings
from hypothesis import strategies as st
from lost_digits import BOTH, assert_exact_margins, assert_exactly_inside, cancelling, digits, eps
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import dense, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS = [op for op in ops.ALL_OPS if op is not ops.Input]


# --- random networks --------------------------------------------------------------------------


def check_random(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    module = data.draw(networks(containing=op, classes=3)).to(dtype)
    if data.draw(st.booleans()):  # no linear layer at the end to merge the margins with
        module.append(nn.ReLU(), (len(module.steps),))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=1, dtype=dtype))
    points = points_in(box, 4, seed=data.draw(st.integers(0, 99)))
    assert_exactly_inside(graph, box, points)
    assert_exact_margins(graph, box, points)


@BOTH
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_random_networks(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_random(op, dtype, data)


@BOTH
@settings(max_examples=20)
@given(data=st.data())
def test_convolutions_as_matrices(dtype: torch.dtype, data: st.DataObject) -> None:
    """Small convolutions of large batches are dense products: their bounds are as strict."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "SMALLEST_PRODUCT", 0)
        check_random(ops.Conv2d, dtype, data)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=80)
@given(data=st.data())
def test_random_networks_at_length(
    op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check_random(op, dtype, data)


def check_cancelling(dtype: torch.dtype, data: st.DataObject) -> None:
    graph, box = data.draw(cancelling(dtype))
    points = points_in(box, 6)
    assert_exactly_inside(graph, box, points)
    assert_exact_margins(graph, box, points)


@BOTH
@settings(max_examples=20)
@given(data=st.data())
def test_cancellation(dtype: torch.dtype, data: st.DataObject) -> None:
    check_cancelling(dtype, data)


@pytest.mark.slow
@BOTH
@settings(max_examples=600)
@given(data=st.data())
def test_cancellation_at_length(dtype: torch.dtype, data: st.DataObject) -> None:
    check_cancelling(dtype, data)


def losing_linear(dtype: torch.dtype) -> nn.Module:
    """`x` by way of `x + 2^24`, where float32 has no odd numbers any more (2^53 in float64)."""
    big = 2.0 ** digits(dtype)
    up, down = nn.Linear(1, 1).to(dtype), nn.Linear(1, 2).to(dtype)
    with torch.no_grad():
        up.weight.fill_(1.0)
        up.bias.fill_(big)
        down.weight.copy_(torch.tensor([[1.0], [0.0]]))
        down.bias.copy_(torch.tensor([-big, 0.0], dtype=dtype))
    return nn.Sequential(up, nn.ReLU(), down)


class LosingShift(nn.Module):
    """The same with constants."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.big = 2.0 ** digits(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.big - self.big


@BOTH
@pytest.mark.parametrize("build", [losing_linear, LosingShift])
def test_plain_bounds_are_violated_and_strict_ones_are_not(build: type, dtype: torch.dtype) -> None:
    """The reason for strict mode, and the proof that these tests would notice without it."""
    graph = trace(build(dtype), (1,)).detach()
    # 2^24 + 3 is rounded up to 2^24 + 4, 2^24 + 1 down to 2^24.
    for value in (3.0, 1.0):
        point = torch.tensor([[value]], dtype=dtype)
        box = Box(point, point)
        exact = exact_values(graph, point[0])[len(graph.nodes) - 1]
        assert exact[0] == Fraction(value)
        plain, _ = interval.bounds(graph, box)
        assert not inside(plain, exact)
        assert_exactly_inside(graph, box, point)


@BOTH
def test_plain_margins_are_violated_and_strict_ones_are_not(dtype: torch.dtype) -> None:
    graph = trace(losing_linear(dtype), (1,)).detach()
    point = torch.tensor([[3.0]], dtype=dtype)
    plain, _ = interval.margins(graph, Box(point, point), torch.tensor([0]))
    assert plain[0, 1].item() == 4.0  # but the margin is 3
    strict, _ = interval.margins(graph, Box(point, point), torch.tensor([0]), rounding=eps(dtype))
    assert strict[0, 1].item() <= 3.0
    assert_exact_margins(graph, Box(point, point), point)


@BOTH
def test_margins_of_nearly_equal_rows(dtype: torch.dtype) -> None:
    """Rows that agree but for one bit: the merged layer keeps the bit, strictly."""
    big = 2.0 ** digits(dtype)
    layer = nn.Linear(2, 3, bias=False).to(dtype)
    rows = [[big, 1.0], [big, 0.0], [-big, 1.0]]
    layer.weight = nn.Parameter(torch.tensor(rows, dtype=dtype))
    graph = trace(nn.Sequential(layer), (2,)).detach()
    box = Box(torch.tensor([[1.0, 1.0]], dtype=dtype), torch.tensor([[3.0, 2.0]], dtype=dtype))
    lower, _ = interval.margins(graph, box, torch.tensor([0]), rounding=eps(dtype))
    assert 0.999 < lower[0, 1].item() <= 1.0  # o_0 - o_1 = x_1 lies in [1, 2]
    assert_exact_margins(graph, box, points_in(box, 6))


@BOTH
def test_margins_of_one_layer_that_cancels(dtype: torch.dtype) -> None:
    """Nothing but the merged layer itself rounds, and loses all but a few bits."""
    generator = torch.Generator().manual_seed(0)
    big = 2.0 ** digits(dtype)
    violated = 0
    for _ in range(20):
        layer = nn.Linear(12, 4).to(dtype)
        small = torch.randint(-9, 10, (4, 12), generator=generator).to(dtype)
        small[:, :4] = torch.randint(-4, 5, (4, 4), generator=generator) * big
        order = torch.randperm(12, generator=generator)
        layer.weight = nn.Parameter(torch.cat((small[:, :6], -small[:, :6]), 1)[:, order])
        layer.bias = nn.Parameter(small[:, 7].clone())
        x = torch.randint(1, 9, (1, 12), generator=generator).to(dtype)
        graph = trace(nn.Sequential(layer), (12,)).detach()
        assert_exact_margins(graph, Box(x, x), x)
        plain, _ = interval.margins(graph, Box(x, x), torch.tensor([0]))
        exact = exact_values(graph, x[0])[1]
        violated += bool((exact[0] - exact < fractions(plain[0])).any())
    assert violated > 0, "plain margins are wrong for some of these"


@BOTH
def test_margins_without_a_linear_layer_round_down(dtype: torch.dtype) -> None:
    graph = trace(nn.Sequential(nn.ReLU()), (2,)).detach()
    x = torch.tensor([[1.0, 2.0 ** -(digits(dtype) + 2)]], dtype=dtype)
    assert x[0, 0] - x[0, 1] == 1.0  # rounded up
    assert_exact_margins(graph, Box(x, x), x)
