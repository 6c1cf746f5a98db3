"""Strict intervals, one source of error at a time, against known exact values.

Each rule gets numbers at which one kind of error is large and all others are not, in
floating-point arithmetic at its worst (`adverse`).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from adverse import DIRECTIONS, adverse
from exact import exact_values, fractions
from linear_helpers import EPS, wired
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import ops

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 2.0**-100  # lost in any sum with 1
NEARLY = (1 - 2.0**-10) * EPS  # lost as well, and nearly a unit
SMALLEST = 2.0**-1074
MANY = 200


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def filled(count: int, value: float) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64)


def first(count: int, one: float = 1.0, rest: float = TINY) -> Tensor:
    """Return one number and many that are nothing beside it."""
    return floats(one, *[rest] * (count - 1))


def assert_inside(op: ops.Op, lower: Tensor, upper: Tensor, *, close: float = 1e-10) -> None:
    """Check the image of a box against the exact images of its two corners."""
    box = Box(lower[None], upper[None])
    graph = wired(tuple(lower.shape), (op, (0,), ()))
    images = [exact_values(graph, corner)[1].flatten() for corner in (lower, upper)]
    least, most = np.minimum(*images), np.maximum(*images)
    for direction in DIRECTIONS:
        with adverse(direction), torch.no_grad():
            image = interval.RULES[type(op)](op, box, rounding=EPS)
        found = [fractions(t.flatten()) for t in image.corners]
        assert np.all(found[0] <= least) and np.all(most <= found[1]), direction
        assert np.all(least - found[0] <= close) and np.all(found[1] - most <= close), direction


def linear(weight: Tensor, bias: Tensor | None = None) -> ops.Linear:
    return ops.Linear(weight.view(1, -1), bias)


def convolution(weight: Tensor, bias: Tensor | None = None) -> ops.Conv2d:
    return ops.Conv2d(weight.view(1, -1, 1, 1), bias, (1, 1), (0, 0), (1, 1), 1)


# --- affine rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_long_sums_of_centres(sign: float) -> None:
    x = sign * first(MANY)
    assert_inside(linear(filled(MANY, 1.0)), x, x)
    assert_inside(convolution(filled(MANY, 1.0)), x.view(-1, 1, 1), x.view(-1, 1, 1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_long_sums_that_begin_with_a_bias(sign: float) -> None:
    x, bias = filled(MANY, sign * TINY), floats(sign)
    assert_inside(linear(filled(MANY, 1.0), bias), x, x)
    shape = (MANY, 1, 1)
    assert_inside(convolution(filled(MANY, 1.0), bias), x.view(shape), x.view(shape))


def test_long_sums_of_radii() -> None:
    radius = first(MANY, rest=NEARLY)
    assert_inside(linear(filled(MANY, 1.0)), -radius, radius)


PARTS = pytest.mark.parametrize("part", [0.4, 0.9])


@PARTS
def test_products_below_the_smallest_number(part: float) -> None:
    """Ten products of some part of the smallest number each."""
    x = filled(10, part * 2.0**-534)
    for sign in (1.0, -1.0):
        assert_inside(linear(filled(10, sign * 2.0**-540)), x, x)


def test_a_centre_below_the_smallest_number() -> None:
    """Half of the smallest number is no number, and a large weight magnifies what is lost."""
    x = floats(SMALLEST)
    assert_inside(linear(floats(2.0**90)), 0 * x, x)


def norm(count: int, *, weight: float, mean: float) -> ops.BatchNorm:
    variance = torch.arange(2.0, 2.0 + count, dtype=torch.float64)
    means = torch.full_like(variance, mean)
    return ops.BatchNorm(variance * weight, None, means, variance, 0.1, None, None)


@pytest.mark.parametrize("mean", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("x", [0.0, 1.0, -1.0])
def test_the_factors_of_batchnorm(mean: float, x: float) -> None:
    """What is left is the factors' own rounding: in the centre, in the mean or in both."""
    values = filled(300, x)
    assert_inside(norm(300, weight=1.0, mean=mean), values, values, close=1e-9)
    if mean == 0.0 and x:
        assert_inside(norm(300, weight=1.0, mean=mean), -values.abs(), values.abs(), close=1e-9)


def test_batchnorm_of_a_box_below_the_smallest_number() -> None:
    values = filled(4, SMALLEST)
    assert_inside(norm(4, weight=2.0**90, mean=0.0), 0 * values, values)


@pytest.mark.parametrize("mean", [0.0, 1e300])
def test_batchnorm_with_a_factor_below_the_smallest_number(mean: float) -> None:
    """A large input, or a large mean, meets what was lost of the factor."""
    values = filled(4, 1e300 if not mean else 0.0)
    assert_inside(norm(4, weight=SMALLEST, mean=mean), values, values, close=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_long_sums_of_an_average(sign: float) -> None:
    pool = ops.AvgPool((15, 15), (15, 15), (0, 0), False, True)
    x = sign * first(225).view(1, 15, 15)
    assert_inside(pool, x, x)


@pytest.mark.parametrize(
    "op",
    [
        ops.Shift(floats(1.0)),
        ops.Shift(floats(-1.0), subtract=True),
        ops.LeakyRelu(0.3),
        ops.Scale(floats(0.3)),
        ops.Scale(floats(-0.3)),
        ops.Scale(floats(0.3), divide=True),
    ],
)
def test_single_roundings(op: ops.Op) -> None:
    x = floats(TINY, -TINY, 0.7, -0.7, -1.1, -3.0, SMALLEST, -SMALLEST)
    assert_inside(op, x, x)
    assert_inside(op, x - 1, x + 1)


@pytest.mark.parametrize("op", [ops.Add(), ops.Sub()])
def test_sums_of_two_boxes(op: ops.Op) -> None:
    (low, high), (other_low, other_high) = (1.0, 2.0), (TINY, 3 + TINY)
    boxes = [Box(floats(low)[None], floats(high)[None])]
    boxes.append(Box(floats(other_low)[None], floats(other_high)[None]))
    ends = [Fraction(other_low), Fraction(other_high)]
    if isinstance(op, ops.Sub):
        ends = [-ends[1], -ends[0]]
    for direction in DIRECTIONS:
        with adverse(direction):
            image = interval.RULES[type(op)](op, *boxes, rounding=EPS)
        assert Fraction(image.lower.item()) <= Fraction(low) + ends[0]
        assert Fraction(image.upper.item()) >= Fraction(high) + ends[1]


def test_a_box_around_a_centre_has_corners_between_numbers() -> None:
    graph = wired((1,), (ops.Reshape((1,)), (0,), (1,)))
    box = Box.around(floats(1.0)[None], floats(TINY)[None])
    image, _ = interval.bounds(graph, box, rounding=EPS)
    assert image.lower.item() < 1 < image.upper.item()


# --- margins ------------------------------------------------------------------------------------


def assert_margin(layer: ops.Linear, lower: Tensor, upper: Tensor, exact: Fraction) -> None:
    """Check the margin of class 0 over class 1."""
    box = Box(lower[None], upper[None])
    for direction in DIRECTIONS:
        with adverse(direction), torch.no_grad():
            found = interval.linear_margins(layer, box, torch.tensor([0]), rounding=EPS)
        assert Fraction(found[0, 1].item()) <= exact, direction
        assert exact - Fraction(found[0, 1].item()) <= 1e-10
        assert found[0, 0].item() == 0


def two_rows(row: Tensor, bias: Tensor | None = None) -> ops.Linear:
    return ops.Linear(torch.stack((row, torch.zeros_like(row))), bias)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_long_sums_of_margins(sign: float) -> None:
    x = first(MANY)
    exact = sum(map(Fraction, x.tolist())) * Fraction(sign)
    assert_margin(two_rows(filled(MANY, sign)), x, x, exact)


def test_long_sums_of_radii_in_margins() -> None:
    radius = first(MANY, rest=NEARLY)
    exact = -sum(map(Fraction, radius.tolist()))
    assert_margin(two_rows(filled(MANY, 1.0)), -radius, radius, exact)


def test_differences_of_rows_and_biases_are_rounded() -> None:
    """`(1 + t) x + (1 + t)`: both differences lose t, and so does the sum."""
    layer = ops.Linear(floats(1.0, -TINY)[:, None], floats(1.0, -TINY))
    exact = 1 + Fraction(TINY)
    assert_margin(layer, floats(1.0), floats(1.0), 2 * exact)
    assert_margin(layer, floats(TINY), floats(TINY), exact * Fraction(TINY) + exact)


@PARTS
def test_margins_below_the_smallest_number(part: float) -> None:
    x = filled(10, part * 2.0**-534)
    exact = -(Fraction(2) ** -540) * sum(map(Fraction, x.tolist()))
    assert_margin(two_rows(filled(10, -(2.0**-540))), x, x, exact)
    x = floats(SMALLEST)
    assert_margin(two_rows(floats(-(2.0**90))), 0 * x, x, -(Fraction(2) ** 90) * Fraction(SMALLEST))


def test_margins_of_outputs_are_rounded_down() -> None:
    """A network without a linear layer at its end: `1 - t` is not 1."""
    graph = wired((2,), (ops.Relu(), (0,), (2,)))
    x = floats(1.0, TINY)[None]
    for direction in DIRECTIONS:
        with adverse(direction):
            margins, _ = interval.margins(graph, Box(x, x), torch.tensor([0]), rounding=EPS)
        assert Fraction(margins[0, 1].item()) <= 1 - Fraction(TINY)
