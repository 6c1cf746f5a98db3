"""Strict bounds of subproblems, one source of error at a time, against known exact values.

Each network is so small, or so regular, that its value is known, and so tight that nothing but
the room for one kind of error keeps the bound below it: in floating-point arithmetic at its worst
(`adverse`), with parameters out of their limits, or with products that underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from adverse import DIRECTIONS, adverse
from linear_helpers import EPS
from small_reduced import Neuron, Number, Row, exact_rows, floats, reduced, subproblem
from torch import Tensor

from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Cuts

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 2.0**-100  # lost in any sum with 1
NEARLY = (1 - 2.0**-10) * EPS  # lost as well, and nearly a unit


def assert_below(
    layers: Sequence[Sequence[Neuron]],
    rows: Sequence[Row],
    x: Sequence[Number],
    *,
    box: tuple[Sequence[Number], Sequence[Number]] | None = None,
    weights: Tensor | None = None,
    cuts: Cuts | None = None,
    gamma: Sequence[Number] = (),
    close: float,
) -> None:
    """Check the bound of the first row, or of a combination, against its value at a point.

    The box is that point unless another one is given; the bound is no more than `close` lower.
    """
    values = exact_rows(layers, rows, x)
    exact = values[0]
    if weights is not None:
        exact = sum(
            (Fraction(w) * v for w, v in zip(weights.tolist(), values, strict=True)), Fraction(0)
        )
    given = None if weights is None else weights[None]
    problem = subproblem(layers, gamma=gamma)
    for direction in DIRECTIONS:
        network = reduced(layers, rows, *(box or (x, x)))
        with adverse(direction):
            bound = strict_bounds(network, problem, given, cuts)
        assert Fraction(bound.item()) <= exact, direction
        assert exact - Fraction(bound.item()) <= close, direction


# --- parameters out of their limits -------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "slope", "x"),
    [(-1.0, 2.0, -1.0), (2.0, -2.0, 1.0)],
)
def test_alpha_out_of_its_limits(alpha: float, slope: float, x: float) -> None:
    """`relu(x) + slope x` on [-1, 1]: with such an alpha, the line would cut the function."""
    layers = [[Neuron([1.0], alpha=alpha)]]
    row = Row([slope], [1.0])
    assert_below(layers, [row], [x], box=([-1.0], [1.0]), close=2.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_beta_out_of_its_limits(sign: int) -> None:
    """`-x` where `x >= 0`: a negative multiplier would take the constraint for its opposite."""
    layers = [[Neuron([1.0], sign=sign, beta=-1.0)]]
    assert_below(layers, [Row([-float(sign)])], [sign], box=([-1.0], [1.0]), close=1e-12)


def test_gamma_out_of_its_limits() -> None:
    """`-relu(x)` with the constraint `-y <= 0`."""
    cuts = Cuts(floats([[-1.0]]), floats([[0.0]]), floats([0.0]))
    layers = [[Neuron([1.0])]]
    row = Row([0.0], [-1.0])
    assert_below(layers, [row], [1.0], box=([-1.0], [1.0]), cuts=cuts, gamma=[-1.0], close=1e-12)


# --- the lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [1.0, 2.0**-11, 2.0**-40])
def test_a_small_coefficient_takes_the_chord(coefficient: float) -> None:
    """`-c relu(x)` on [-1, 1]."""
    row = Row([0.0], [-coefficient])
    assert_below([[Neuron([1.0])]], [row], [1.0], box=([-1.0], [1.0]), close=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_split_neurons_are_linear(sign: int) -> None:
    """`-relu(x)` where the sign of x is known."""
    layers, row = [[Neuron([1.0], sign=sign)]], Row([0.0], [-1.0])
    assert_below(layers, [row], [max(sign, 0)], box=([-1.0], [1.0]), close=1e-12)


# --- what the matrices are off by ---------------------------------------------------------------


def test_the_slack_of_a_neuron() -> None:
    """Its value may be half a unit less than the matrices say."""
    layers = [[Neuron([1.0], slack=0.5, lower=-1.0, upper=2.0, sign=1)]]
    network = reduced(layers, [Row([0.0], [1.0])], [1.0], [1.0])
    assert strict_bounds(network, subproblem(layers)).item() <= 0.5


def test_the_slack_of_a_row() -> None:
    row = Row([1.0], slack=0.5)
    for weights in (None, floats([[1.0]])):
        bound = strict_bounds(reduced([[]], [row], [1.0], [1.0]), subproblem([[]]), weights)
        assert 0.49 < bound.item() <= 0.5


# --- rounding -----------------------------------------------------------------------------------


def test_long_sums_over_the_input() -> None:
    """200 inputs of which the first is 1 and the others are nothing beside it."""
    x = [1.0] + [TINY] * 199
    assert_below([[]], [Row([1.0] * 200)], x, close=1e-12)
    assert_below([[]], [Row([-1.0] * 200)], [-1.0] + [-TINY] * 199, close=1e-12)


def test_long_sums_over_rows() -> None:
    """200 rows, combined, of which the first is 1 and the others are nothing beside it."""
    rows = [Row([1.0])] + [Row([TINY])] * 199
    assert_below([[]], rows, [1.0], weights=torch.ones(200, dtype=torch.float64), close=1e-12)


def test_long_sums_over_neurons() -> None:
    """Coefficients of the input add up over 400 neurons, each of which is (nearly) zero.

    The first neuron is `x_0 - x_1` at a point where both are 1; the sums over the others round
    up at every step, in the coefficients of both inputs.
    """
    count = 400
    other = Neuron([TINY, TINY], lower=-1.0, upper=2 * TINY, sign=1)
    layers = [[Neuron([1.0, -1.0], lower=-1.0, upper=TINY, sign=1)] + [other] * (count - 1)]
    assert_below(layers, [Row([0.0, 0.0], [1.0] * count)], [1.0, 1.0], close=1e-11)


def test_long_sums_of_intercepts() -> None:
    """A neuron in front, 800 behind it: its coefficient, the constants and intercepts all add up.

    The value of the first neuron behind is exactly 0; the one in front and all others are at
    their upper bounds, where their chords touch.
    """
    count, little = 800, 2.0**-10
    first = Neuron([1.0], lower=-14.0, upper=2.0)
    zero = Neuron([0.0], [1.0], constant=-2.0, lower=-TINY, upper=TINY, sign=1)
    other = Neuron([0.0], [0.5], constant=-little, lower=-0.5, upper=1.0 - little)
    layers = [[first], [zero] + [other] * count]
    row = Row([0.0], [0.0, -1.0] + [-3 * NEARLY] * count)
    assert_below(layers, [row], [2.0], close=1e-11)


def test_products_that_underflow() -> None:
    """`1e-200 * 1e-200 * 1e300` is not zero."""
    layers = [[Neuron([-1e-200], constant=2e100, lower=-1.0, upper=2e100, sign=1)]]
    assert_below(layers, [Row([0.0], [1e-200], constant=-1e-100)], [1e300], close=1e-6)


# --- rounding of multi-neuron constraints -------------------------------------------------------


def loop(count: int) -> list[float]:
    """Return numbers that cancel but for tiny ones; added up in a bad order they do not."""
    return [1.0, *[TINY] * count, -1.0]


def test_long_sums_of_constraints_on_outputs() -> None:
    """Multiples of `y_0 <= y_1`, at a point where both are 1."""
    layers = [[Neuron([1.0], alpha=1.0)] * 2]
    factors = floats(loop(60))
    nothing = torch.zeros(62, 2, dtype=torch.float64)
    cuts = Cuts(torch.stack((factors, -factors), 1), nothing, nothing[:, 0])
    assert_below(layers, [Row([0.0])], [1.0], cuts=cuts, gamma=[1.0] * 62, close=1e-12)


def test_long_sums_of_constraints_on_inputs() -> None:
    """Multiples of `h_0 <= h_1`, at a point where both are -1."""
    layers = [[Neuron([1.0], upper=TINY)] * 2]
    factors = floats(loop(60))
    on_inputs = torch.stack((factors, -factors), 1)
    nothing = torch.zeros(62, dtype=torch.float64)
    cuts = Cuts(torch.zeros(62, 2, dtype=torch.float64), on_inputs, nothing)
    assert_below(layers, [Row([0.0])], [-1.0], cuts=cuts, gamma=[1.0] * 62, close=1e-12)
