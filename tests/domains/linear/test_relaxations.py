"""Lines enclose activations: on dense samples, and in strict mode in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import exact_values, fractions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.relaxations import Lines, free_slopes, lines, unstable
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.graph import Node

pytestmark = pytest.mark.usefixtures("one_thread")

BENT = [ops.Relu(), *(ops.LeakyRelu(s) for s in (0.0, 0.01, 0.3, 1.0, 2.5))]
CURVED = [ops.Sigmoid(), ops.Tanh()]
ALL = pytest.mark.parametrize("op", [*BENT, *CURVED], ids=lambda op: f"{op}"[:20])
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

# Ends of intervals: zero, denormals, tiny, ordinary, saturated, huge.
ENDS = (0.0, 1e-320, 1e-40, 1e-12, 1e-6, 0.3, 1.0, 2.0, 5.0, 20.0, 90.0, 800.0, 1e6)


def intervals(dtype: torch.dtype) -> Box:
    """All pairs of ends and slivers around each of them, [1, n]."""
    ends = torch.tensor([-e for e in ENDS] + list(ENDS), dtype=torch.float64).to(dtype)
    pairs = torch.cartesian_prod(ends, ends)
    pairs = pairs[pairs[:, 0] <= pairs[:, 1]]
    unit = torch.finfo(dtype).eps
    slivers = [torch.stack((ends, ends + width), 1) for width in (unit, 1e-7, 1e-5, 1e-3)]
    pairs = torch.cat((pairs, *slivers))
    return Box(pairs[None, :, 0].contiguous(), pairs[None, :, 1].contiguous())


def samples(box: Box, count: int = 17) -> Tensor:
    """Points of each interval, [count, n]: both ends, zero where inside, and between."""
    lower, upper = box.corners
    shares = torch.linspace(0, 1, count - 1, dtype=lower.dtype)[:, None]
    inside = box.project(lower + shares * (upper - lower))
    return torch.cat((inside, box.project(torch.zeros_like(lower))))


def one_node(op: ops.Op, size: int) -> Graph:
    return Graph((Node("x", ops.Input(), (), (size,)), Node("f", op, (0,), (size,))))


def assert_encloses(op: ops.Op, box: Box, found: Lines, points: Tensor, slack: Tensor) -> None:
    value = POINT_RULES[type(op)](op, points)
    below = found.lower_slope * points + found.lower_intercept
    above = found.upper_slope * points + found.upper_intercept
    assert torch.isfinite(below).all() and torch.isfinite(above).all()
    assert (below <= value + slack).all()
    assert (value <= above + slack).all()


def assert_encloses_exactly(op: ops.Op, found: Lines, points: Tensor) -> None:
    """Check lines against exact values without any tolerance."""
    line = [fractions(t[0]) for t in found]
    graph = one_node(op, points.shape[1])
    for row in points:
        h, value = fractions(row), exact_values(graph, row)[1]
        assert np.all(line[0] * h + line[1] <= value), f"below {op}"
        assert np.all(value <= line[2] * h + line[3]), f"above {op}"


@ALL
@BOTH
def test_plain_lines_enclose(op: ops.Op, dtype: torch.dtype) -> None:
    box = intervals(dtype)
    unit = torch.finfo(dtype).eps
    size = torch.maximum(box.lower.abs(), box.upper.abs())
    steep = max(1.0, getattr(op, "slope", 1.0))
    slack = 16 * unit * (steep * size + 1) if op in CURVED else 4 * unit * steep * size + 1e-44
    assert_encloses(op, box, lines(op, box), samples(box, 60), slack)


@ALL
@BOTH
def test_strict_lines_enclose_exactly(op: ops.Op, dtype: torch.dtype) -> None:
    """Bent functions are linear between the ends and zero, so for them this is a proof."""
    box = intervals(dtype)
    found = lines(op, box, rounding=torch.finfo(dtype).eps)
    assert_encloses_exactly(op, found, samples(box, 8 if op in BENT else 16))


@BOTH
@pytest.mark.parametrize("op", CURVED)
def test_strict_lines_hold_where_they_touch(op: ops.Op, dtype: torch.dtype) -> None:
    """The points at which the function has the slope of its line are the critical ones."""
    box = intervals(dtype)
    found = lines(op, box, rounding=torch.finfo(dtype).eps)
    points = []
    for slope in (found.lower_slope.double(), found.upper_slope.double()):
        if isinstance(op, ops.Sigmoid):
            root = torch.sqrt((1 - 4 * slope).clamp(min=0))
            touch = torch.log(((1 - root) / (1 + root)).clamp(min=1e-300))
        else:
            touch = -torch.atanh(torch.sqrt((1 - slope).clamp(0, 1)).clamp(max=1 - 1e-15))
        points += [box.project(s * touch.to(dtype)) for s in (1.0, -1.0)]
    assert_encloses_exactly(op, found, torch.cat(points))


def test_strict_is_needed() -> None:
    """Without rounding some line of these intervals is violated, so the test above can fail."""
    box, op = intervals(torch.float32), ops.Relu()
    with pytest.raises(AssertionError):
        assert_encloses_exactly(op, lines(op, box), samples(box, 8))


@settings(max_examples=60)
@given(data=st.data())
def test_random_intervals(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([*BENT, *CURVED]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    width = 32 if dtype == torch.float32 else 64
    number = st.floats(-1e6, 1e6, width=width)
    ends = sorted((data.draw(number), data.draw(number)))
    lower, upper = torch.tensor(ends, dtype=dtype).view(2, 1, 1)
    box = Box(lower, upper)
    found = lines(op, box, rounding=torch.finfo(dtype).eps)
    assert_encloses_exactly(op, found, samples(box, 20))


@BOTH
@pytest.mark.parametrize("slope", [0.01, 0.3, 1.7])
def test_stable_leaky_neurons_keep_their_slope_to_the_last_bit(
    slope: float, dtype: torch.dtype
) -> None:
    box = Box(torch.tensor([[-3.0, 1.0]], dtype=dtype), torch.tensor([[-1.0, 2.0]], dtype=dtype))
    for rounding in (0.0, torch.finfo(dtype).eps):
        found = lines(ops.LeakyRelu(slope), box, rounding=rounding)
        expected = torch.tensor([[slope, 1.0]], dtype=dtype)
        assert found.lower_slope.dtype == dtype
        assert torch.equal(found.lower_slope, expected)
        assert torch.equal(found.upper_slope, expected)
        assert not found.lower_intercept.any() and not found.upper_intercept.any()


@pytest.mark.parametrize("slope", [0.0, 0.2, 3.0])
def test_the_free_line_follows_the_wider_side(slope: float) -> None:
    """The adaptive choice: of the two lines through the origin, the one with less area."""
    box = Box(torch.tensor([[-1.0, -3.0]]), torch.tensor([[3.0, 1.0]]))
    found = lines(ops.LeakyRelu(slope), box)
    free = found.lower_slope if slope <= 1 else found.upper_slope
    assert torch.equal(free, torch.tensor([[1.0, slope]]))


def test_chord_of_relu() -> None:
    box = Box(torch.tensor([[-1.0]]), torch.tensor([[3.0]]))
    found = lines(ops.Relu(), box)
    assert found.upper_slope.item() == 0.75 and found.upper_intercept.item() == 0.75


@BOTH
@pytest.mark.parametrize("op", CURVED)
def test_curved_lines_are_tight(op: ops.Op, dtype: torch.dtype) -> None:
    """Each line touches the function somewhere, on intervals of ordinary size."""
    lower = torch.tensor([[-4.0, -2.0, -1.0, 0.5, -3.0, -0.5, -0.1]], dtype=dtype)
    upper = torch.tensor([[-1.0, 0.5, 3.0, 2.0, 3.0, 0.5, 4.0]], dtype=dtype)
    box = Box(lower, upper)
    found = lines(op, box, rounding=torch.finfo(dtype).eps)
    points = samples(box, 2000)
    value = POINT_RULES[type(op)](op, points)
    below = value - found.lower_slope * points - found.lower_intercept
    above = found.upper_slope * points + found.upper_intercept - value
    assert (below.amin(0) < 1e-3).all() and (above.amin(0) < 1e-3).all()


def test_free_slopes_are_those_of_unstable_bent_neurons() -> None:
    box = Box(torch.tensor([[-1.0, 0.0, -1.0, -1.0]]), torch.tensor([[1.0, 1.0, 0.0, 2.0]]))
    expected = torch.tensor([[True, False, False, True]])
    assert torch.equal(unstable(box), expected)
    for op in (ops.Relu(), ops.LeakyRelu(0.5)):
        free = free_slopes(op, box)
        assert free is not None and torch.equal(free, expected)
    for op in (ops.LeakyRelu(1.5), ops.Sigmoid(), ops.Tanh()):
        assert free_slopes(op, box) is None


@pytest.mark.parametrize("op", BENT)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_any_free_slope_is_sound(op: ops.Op, share: float) -> None:
    left = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
    if left > 1:
        assert free_slopes(op, intervals(torch.float64)) is None
        return
    slope = Fraction(left) + Fraction(share) * (1 - Fraction(left))
    for h in (Fraction(-3), Fraction(0), Fraction(1, 3)):
        assert slope * h <= max(h, Fraction(left) * h)


@pytest.mark.parametrize("op", [*BENT, *CURVED])
def test_bounds_that_are_not_numbers_give_no_usable_lines(op: ops.Op) -> None:
    nan = torch.tensor([[float("nan")] * 3])
    for box in (Box(nan, nan), Box(-torch.ones_like(nan), nan), Box(nan, torch.ones_like(nan))):
        found = lines(op, box)
        assert not torch.isfinite(found.lower_slope + found.lower_intercept).any()
        assert not torch.isfinite(found.upper_slope + found.upper_intercept).any()
    box = Box(torch.tensor([[-torch.inf]]), torch.tensor([[torch.inf]]))
    infinite = lines(op, box)
    h = torch.tensor([[-1e30], [0.0], [1e30]])
    value = POINT_RULES[type(op)](op, h)
    below = infinite.lower_slope * h + infinite.lower_intercept
    above = infinite.upper_slope * h + infinite.upper_intercept
    # Not a number is fine (it is no bound), a wrong number is not.
    assert not (below > value).any() and not (above < value).any()
