"""Linear bounds, one source of error at a time, against known exact values.

Each network is so regular that one kind of error dominates all others: in floating-point
arithmetic at its worst (`adverse`), or because everything else cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from adverse import DIRECTIONS, adverse
from exact import exact_values, fractions
from linear_helpers import EPS, wired
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.bounded import relaxed
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.domains.linear.pulled import Form
from tightrope.graph import Graph, ops

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 2.0**-100  # lost in any sum with 1
MANY = 200


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def first(count: int, one: float = 1.0, rest: float = TINY) -> Tensor:
    """Return one number and many that are nothing beside it."""
    return floats(one, *[rest] * (count - 1))


def assert_below(graph: Graph, x: Tensor, row: Tensor, *, close: float = 1e-10) -> None:
    """Check the bounds of a row (or of several) of the output on the box that is one point, x."""
    matrix = row.view(-1, torch.Size(graph.output_shape).numel())
    exact = fractions(matrix) @ exact_values(graph, x)[len(graph.nodes) - 1].flatten()
    rows = Coefficients(matrix.view(-1, *graph.output_shape), None)
    for direction in DIRECTIONS:
        with adverse(direction):
            found = relax(graph, Box(x[None], x[None]), effort=CROWN_IBP, rounding=EPS)
            bound = fractions(found.lower(found.output, rows))
        assert np.all(bound <= exact), direction
        assert np.all(exact - bound <= close), direction


# --- the end: the smallest value over the box ---------------------------------------------------


def form(coefficients: Sequence[float], constant: float = 0.0, slack: float = 0.0) -> Form:
    rows = Coefficients(floats(*coefficients)[None], None)
    return Form(rows, floats(constant), floats(slack), {}, len(coefficients))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_long_sums_over_the_input(sign: float) -> None:
    x = first(MANY, sign, sign * TINY)
    exact = sum(map(Fraction, x.tolist())) * Fraction(sign)
    for direction in DIRECTIONS:
        with adverse(direction):
            bound = form([sign] * MANY).minimum(Box(x[None], x[None]), rounding=EPS)
        assert exact - Fraction(1, 10**12) < Fraction(bound.item()) <= exact


def test_a_constant_beside_a_small_input() -> None:
    x = floats(TINY)[None]
    for direction in DIRECTIONS:
        with adverse(direction):
            bound = form([1.0], constant=1.0).minimum(Box(x, x), rounding=EPS)
        assert 1 - 1e-12 < Fraction(bound.item()) <= 1 + Fraction(TINY)


def test_the_slack_is_taken_off() -> None:
    bound = form([1.0], slack=0.5).minimum(Box(floats(1.0)[None], floats(2.0)[None]), rounding=EPS)
    assert 0.49 < bound.item() <= 0.5


def test_a_product_below_the_smallest_number() -> None:
    """`1e-200 * -1e-200` is negative."""
    x = floats(-1e-200)[None]
    bound = form([1e-200]).minimum(Box(x, x), rounding=EPS)
    assert -1e-300 < bound.item() < 0


# --- sums of coefficients and constants ---------------------------------------------------------


def test_long_sums_of_a_linear_layer() -> None:
    """200 outputs, of which the first weighs 1."""
    layer = ops.Linear(first(MANY)[:, None], None)
    assert_below(wired((1,), (layer, (0,), (MANY,))), floats(1.0), torch.ones(MANY).double())


def test_long_sums_of_a_convolution() -> None:
    layer = ops.Conv2d(first(MANY).view(MANY, 1, 1, 1), None, (1, 1), (0, 0), (1, 1), 1)
    graph = wired((1, 1, 1), (layer, (0,), (MANY, 1, 1)))
    assert_below(graph, floats(1.0).view(1, 1, 1), torch.ones(MANY).double())


def test_long_sums_of_offsets() -> None:
    """The offsets of two operations cancel but for tiny parts; neither sum is exact."""
    there, back = first(MANY), first(MANY, -1.0)
    shape = (MANY,)
    graph = wired(shape, (ops.Shift(back), (0,), shape), (ops.Shift(there), (1,), shape))
    assert_below(graph, torch.zeros(MANY).double(), torch.ones(MANY).double())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_many_constants(sign: float) -> None:
    """Each small number is rounded against a large one that is taken away at last."""
    numbers = [-sign, *[TINY] * MANY, sign]
    steps = [(ops.Shift(floats(c)), (i,), (1,)) for i, c in enumerate(numbers)]
    assert_below(wired((1,), *steps), floats(0.0), floats(1.0))


def test_coefficients_that_underflow() -> None:
    """`1e-200 * 1e-200 * -1e300` is not zero."""
    layer = ops.Linear(floats(1e-200)[:, None], None)
    graph = wired((1,), (layer, (0,), (1,)), (layer, (1,), (1,)))
    assert_below(graph, floats(-1e300), floats(1.0), close=1e-6)


def test_many_paths_to_one_node() -> None:
    """The coefficients of 100 copies of the input cancel but for tiny ones."""
    graph = wired((1,), (ops.Concat(1), (0,) * 100, (100,)))
    assert_below(graph, floats(1.0), floats(1.0, *[TINY] * 98, -1.0))


# --- single products, against a path on which nothing is rounded --------------------------------

THIRD = 1 / 3  # a little less than a third


def beside(op: ops.Op, shape: tuple[int, ...]) -> Graph:
    """Return the network `(op(x), x)`, flat."""
    count = torch.Size(shape).numel()
    flat = ops.Reshape((count,))
    return wired(
        (count,),
        (ops.Reshape(shape), (0,), shape),
        (op, (1,), shape),
        (flat, (2,), (count,)),
        (ops.Concat(1), (3, 0), (2 * count,)),
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("op", "row"),
    [
        (ops.Scale(floats(3.0)), (THIRD, -1.0)),  # 3 * fl(1/3) is rounded to 1
        (ops.Scale(floats(3.0), divide=True), (1.0, -THIRD)),
        (ops.LeakyRelu(0.3), (1 / 0.3, -1.0)),
    ],
)
def test_a_rounded_product(op: ops.Op, row: tuple[float, float], sign: float) -> None:
    """Only the difference of a number and its rounded value is left of the row."""
    graph = beside(op, (1,))
    for x in (-1.0, -3.0) if isinstance(op, ops.LeakyRelu) else (1.0, -3.0):
        assert_below(graph, floats(x), sign * floats(*row))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_factors_of_batchnorm(sign: float) -> None:
    """Factors that are 1 but for rounding, on inputs that the network takes away again."""
    variance = torch.arange(2.0, 40.0, dtype=torch.float64)
    count = len(variance)
    nothing = torch.zeros(count, dtype=torch.float64)
    norm = ops.BatchNorm(variance.sqrt(), None, nothing, variance, 0.0, None, None)
    graph = beside(norm, (count,))
    unit = sign * torch.eye(count, dtype=torch.float64)
    assert_below(graph, torch.ones(count, dtype=torch.float64), torch.cat((unit, -unit), 1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_factor_of_an_average(sign: float) -> None:
    pool = ops.AvgPool((1, 3), (1, 3), (0, 0), False, True)
    shape = (1, 1, 3)
    graph = wired(
        (3,),
        (ops.Reshape(shape), (0,), shape),
        (pool, (1,), (1, 1, 1)),
        (ops.Reshape((1,)), (2,), (1,)),
        (ops.Concat(1), (3, 0), (4,)),
    )
    assert_below(graph, floats(1.0, 1.0, 1.0), sign * floats(1.0, -THIRD, -THIRD, -THIRD))


def test_sums_over_windows_of_a_max_pool() -> None:
    """All nine windows see the same largest input."""
    shape = (1, 5, 5)
    pool = ops.MaxPool((3, 3), (1, 1), (0, 0), (1, 1), False)
    graph = wired(
        (25,),
        (ops.Reshape(shape), (0,), shape),
        (pool, (1,), (1, 3, 3)),
        (ops.Reshape((9,)), (2,), (9,)),
        (ops.Concat(1), (3, 0), (34,)),
    )
    x = torch.zeros(25, dtype=torch.float64)
    x[12] = 1.0
    assert_below(graph, x, torch.cat((first(9), -x)))


# --- slopes and pools ---------------------------------------------------------------------------


@pytest.mark.parametrize(("slope", "other", "x"), [(-1.0, 2.0, -1.0), (2.0, -2.0, 1.0)])
def test_slopes_out_of_their_limits(slope: float, other: float, x: float) -> None:
    """`relu(x) + other x` on [-1, 1]: with such a slope, the line would cut the function."""
    graph = wired(
        (1,),
        (ops.Relu(), (0,), (1,)),
        (ops.Scale(floats(other)), (0,), (1,)),
        (ops.Add(), (1, 2), (1,)),
    )
    box = Box(floats(-1.0)[None], floats(1.0)[None])
    found = relax(graph, box, effort=CROWN_IBP, rounding=EPS)
    rows = Coefficients(floats(1.0)[None], None)
    bound = found.lower(found.output, rows, slopes={1: floats(slope)[None]})
    assert bound.item() <= exact_values(graph, floats(x))[3][0]


def test_a_line_that_does_not_pass_through_zero() -> None:
    """`-relu(x)` on [-1, 1] may be as low as -1."""
    box = Box(floats(-1.0)[None], floats(1.0)[None])
    found = relax(wired((1,), (ops.Relu(), (0,), (1,))), box, effort=CROWN_IBP, rounding=EPS)
    bound = found.lower(1, Coefficients(floats(-1.0)[None], None))
    assert -1 - 1e-12 < bound.item() <= -1


def test_what_padding_adds() -> None:
    graph = wired((1,), (ops.Pad((0, 1), -2.0), (0,), (2,)))
    assert_below(graph, floats(1.0), floats(1.0, 1.0))


def test_a_pool_whose_largest_input_is_not_known() -> None:
    """Minus the maximum of two inputs in [0, 1] and [0, 2] may be as low as -2."""
    shape = (1, 1, 2)
    pool = ops.MaxPool((1, 2), (1, 2), (0, 0), (1, 1), False)
    graph = wired(shape, (pool, (0,), (1, 1, 1)))
    boxes = {0: Box(floats(0.0, 0.0).view(1, *shape), floats(1.0, 2.0).view(1, *shape))}
    found = relaxed(graph, boxes, rounding=EPS)
    for sign, exact in ((-1.0, -2.0), (1.0, 0.0)):
        rows = Coefficients(floats(sign).view(1, 1, 1, 1), None)
        bound = found.lower(1, rows).item()
        assert exact - 1e-12 < bound <= exact
