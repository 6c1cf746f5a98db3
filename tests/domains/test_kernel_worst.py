"""The compiled loop where its rounding errors are as large as they can be, against fractions.

Rows are written by hand, without any slack: nothing else covers what the loop itself rounds.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from adverse import DIRECTIONS, adverse

from tightrope.domains.boxes import kernel
from tightrope.domains.boxes.room import Array, Found, Rows, make_room

EPS = 2.0**-52
MANY = 400
EACH_DIRECTION = pytest.mark.parametrize("direction", DIRECTIONS)

# The sources of a row with their weights, and its bias.
Row = tuple[dict[int, float], float]


def rows_of(
    neurons: list[Row],
    rows: list[Row],
    *,
    slack: float = 0.0,
    left: float = 0.0,
    square: bool = False,
) -> Rows:
    """Return neurons, which read inputs and each other, and rows of a property."""
    every = neurons + rows
    count = [len(entries) for entries, _ in every]
    return Rows(
        len(neurons),
        np.cumsum([0, *count]).astype(np.int64),
        np.array([j for entries, _ in every for j in entries], np.int64),
        np.array([w for entries, _ in every for w in entries.values()], np.float64),
        np.array([bias for _, bias in every], np.float64),
        np.full(len(every), slack),
        np.full(len(every), left),
        np.full(len(every), square),
    )


def exact_row(rows: Rows, point: Array) -> Fraction:
    """Return the value of the one row of the property at a point."""
    values = [Fraction(x) for x in point.tolist()]
    for i in range(len(rows.bias)):
        span = range(rows.pointer[i], rows.pointer[i + 1])
        terms = (Fraction(rows.weight[p]) * values[rows.source[p]] for p in span)
        value = sum(terms, Fraction(rows.bias[i]))
        if i < rows.neurons and rows.square[i]:
            value = value * value
        elif i < rows.neurons and value < 0:
            value = Fraction(rows.left[i]) * value
        values.append(value)
    return values[-1]


def bound(rows: Rows, lower: Array, upper: Array, direction: str) -> Found:
    """Bound the rows on one box, all operations rounded in one direction."""
    inputs, count = len(lower), len(rows.bias) - rows.neurons
    room = make_room(rows, inputs, (rows.neurons + 1) * (inputs + 1 + rows.neurons))
    found = Found(
        np.empty((1, count, inputs)),
        np.empty((1, count)),
        np.empty((1, count)),
        np.empty((1, count, inputs)),
        np.empty(1, np.int64),
    )
    wanted = np.ones((1, count), bool)
    # Is compiled before it counts.
    kernel.bound_boxes(lower[None], upper[None], wanted, rows, room, found)
    with adverse(direction):
        kernel.bound_boxes(lower[None], upper[None], wanted, rows, room, found)
    return found


def check(rows: Rows, lower: Array, upper: Array, direction: str) -> Found:
    """Compare the line and its smallest value with the exact row at two corners."""
    found = bound(rows, lower, upper, direction)
    constant, least = Fraction(found.constant[0, 0]), Fraction(found.lower[0, 0])
    for point in (lower, upper):
        terms = (Fraction(a) * Fraction(x) for a, x in zip(found.slope[0, 0], point, strict=True))
        value = exact_row(rows, point)
        assert sum(terms, constant) <= value
        assert least <= value
    return found


def test_nothing_is_reordered() -> None:
    for function in (kernel.bound_boxes, kernel.compose, kernel.substitute, kernel.growth):
        assert function.targetoptions["fastmath"] == {"contract"}


def small_terms(first: int) -> Row:
    """Return the sum of many inputs in units that disappear beside 1."""
    return dict.fromkeys(range(first, first + MANY), 1e-30), 1e-20


@EACH_DIRECTION
def test_the_smallest_value_of_a_long_sum(direction: str) -> None:
    ones = np.ones(MANY)
    check(rows_of([small_terms(0)], [({MANY: 1.0}, 1.0)]), ones, ones, direction)


@EACH_DIRECTION
def test_the_sign_of_a_long_sum(direction: str) -> None:
    """A neuron that is negative somewhere, by less than many sums may be off, is not passed on."""
    last = MANY
    lower, upper = np.ones(MANY + 1), np.ones(MANY + 1)
    lower[last] = 0.5
    sign = ({MANY + 1: 1.0, last: -(1 + MANY // 2 * EPS)}, 1.0)
    rows = rows_of([small_terms(0), sign], [({MANY + 2: -1.0}, 0.0)])
    found = check(rows, lower, upper, direction)
    assert found.bent[0] == 1


@EACH_DIRECTION
def test_coefficients_of_many_forms(direction: str) -> None:
    neurons: list[Row] = [({0: 1.0}, 0.0)] * MANY
    row: dict[int, float] = {0: 1.0, **dict.fromkeys(range(1, MANY + 1), 1e-30)}
    check(rows_of(neurons, [(row, 0.0)]), np.ones(1), 2 * np.ones(1), direction)


@EACH_DIRECTION
def test_coefficients_of_many_bent_neurons(direction: str) -> None:
    neurons: list[Row] = [({0: 1.0}, 0.1)] * MANY
    neurons.append((dict.fromkeys(range(1, MANY + 1), 1e-30), 1e-20))
    # Beyond zero, so that lines stay as they are: improved ones have no slope here.
    rows = rows_of(neurons, [({0: 1.0, MANY + 1: 1.0}, 2.0)])
    found = check(rows, -np.ones(1), np.ones(1), direction)
    assert found.bent[0] == MANY and found.slope[0, 0, 0] >= 1


@EACH_DIRECTION
def test_forms_that_cancel(direction: str) -> None:
    """What is left of a sum may be smaller than what was rounded in it."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        weights, factors = generator.uniform(1, 2, (2, 9))
        neurons: list[Row] = [({0: w}, 0.0) for w in weights.tolist()]
        row = {0: -float(weights @ factors)}
        row.update({k + 1: f for k, f in enumerate(factors.tolist())})
        check(rows_of(neurons, [(row, 0.0)]), np.ones(1), 2 * np.ones(1), direction)


@EACH_DIRECTION
def test_many_forms_that_cancel_among_themselves(direction: str) -> None:
    """Many more sums than what each form has lost by itself covers, and nothing else that does."""
    weights, factors = np.random.default_rng(3).uniform(1, 2, (2, 1600))
    neurons: list[Row] = [({0: w}, 0.0) for w in (*weights.tolist(), 1.0)]
    whole = [*factors.tolist(), -float(weights @ factors)]
    row = {k + 1: f for k, f in enumerate(whole)}
    check(rows_of(neurons, [(row, 0.0)]), np.ones(1), 2 * np.ones(1), direction)


@EACH_DIRECTION
@pytest.mark.parametrize("left", [0.0, 0.1])
def test_lines_of_bent_neurons(direction: str, left: float) -> None:
    generator = np.random.default_rng(1)
    for _ in range(20):
        ends = generator.uniform(0.1, 1, 2) * 10.0 ** generator.integers(-5, 5, 2)
        for weight in (1.0, -1.0):
            rows = rows_of([({0: 1.0}, 0.0)], [({1: weight}, 0.0)], left=left)
            check(rows, -ends[:1], ends[1:], direction)


@EACH_DIRECTION
@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.0])
def test_slack_of_neurons_counts(direction: str, weight: float, shift: float) -> None:
    """Passed on, bent or zero: each value may be off by what its row is."""
    # The bound of a bent one is positive, so that its line below stays what it was.
    rows = rows_of([({0: 1.0}, 3 * shift)], [({1: weight}, 3.0)], slack=0.25)
    off = Fraction(1, 4) + (Fraction(1, 4) if shift > 0 or (shift == 0 and weight > 0) else 0)
    found = bound(rows, -np.ones(1), 2 * np.ones(1), direction)
    constant = Fraction(found.constant[0, 0]) - 3
    line = [Fraction(found.slope[0, 0, 0]) * x + constant for x in (-1, 2)]
    if shift > 0:
        assert line[0] <= weight * 2 - off and line[1] <= weight * 5 - off
    elif shift == 0 and weight > 0:
        assert line[1] <= 2 - off and line[0] <= -off
    else:
        # The chord of [-1.25, 2.25], or nothing; the slack of what bends counts by its slope.
        assert line[1] <= (-2 if shift == 0 else 0) - Fraction(1, 4)
        assert shift < 0 or line[1] <= -2 - Fraction(1, 4) - Fraction(9, 14) * Fraction(1, 4)


@EACH_DIRECTION
def test_what_is_rounded_in_losses(direction: str) -> None:
    """Losses far larger than the numbers themselves add up to no less than their sum."""
    weights = [0.1 + 0.01 * k for k in range(60)]
    neurons: list[Row] = [({0: 1.0}, 0.0)] * 60
    rows = rows_of(neurons, [({k + 1: w for k, w in enumerate(weights)}, 0.0)])
    room = make_room(rows, 1, 2)
    room.kind[:], room.factor[:], room.length[:], room.begin[:] = kernel.PASSED, 1.0, 2, 0
    room.forms[:], room.size[:], room.loss[:] = 0.0, 0.0, 0.7
    with adverse(direction):
        _, loss, _ = kernel.compose(60, np.ones(1), np.ones(1), rows, room)
    assert Fraction(loss) >= sum(map(Fraction, weights), Fraction(0)) * Fraction(0.7)


@EACH_DIRECTION
def test_products_that_vanish(direction: str) -> None:
    """A coefficient too small for a float counts where the input is large."""
    rows = rows_of([({0: 1e-200}, 2e-100)], [({1: 1e-150}, -2e-250)])
    check(rows, -np.full(1, 1e100), np.full(1, 1e100), direction)


@EACH_DIRECTION
def test_constants_that_cancel(direction: str) -> None:
    generator = np.random.default_rng(2)
    for _ in range(2):
        biases, factors = generator.uniform(1, 2, (2, 1600))
        neurons: list[Row] = [({0: 1e-9}, b) for b in (*biases.tolist(), 1.0)]
        weights = [*factors.tolist(), -float(biases @ factors)]
        row = {k + 1: f for k, f in enumerate(weights)}
        check(rows_of(neurons, [(row, 0.0)]), np.zeros(1), np.ones(1) * 1e-9, direction)


def test_a_sign_within_the_slack_is_open() -> None:
    rows = rows_of([({0: 1.0}, 0.0)], [({1: -1.0}, 0.0)], slack=0.25)
    for end in (0.125, -0.125):
        lower, upper = min(end, 8 * end), max(end, 8 * end)
        found = bound(rows, np.full(1, lower), np.full(1, upper), "nearest")
        assert found.bent[0] == 1


@pytest.mark.parametrize("left", [0.0, 0.25])
@pytest.mark.parametrize("seed", range(6))
def test_small_networks(seed: int, left: float) -> None:
    generator = np.random.default_rng(seed)
    neurons: list[Row] = []
    for first, count in ((0, 2), (2, 4), (6, 4)):
        for _ in range(4):
            weights = generator.normal(size=count)
            entries = dict(enumerate(weights.tolist(), start=first))
            neurons.append((entries, float(generator.normal()) / 2))
    row = dict(enumerate(generator.normal(size=4).tolist(), start=10))
    rows = rows_of(neurons, [(row, 0.0)], left=left)
    for width in (0.1, 0.5, 1.0, 3.0):
        middle = generator.normal(size=2)
        lower, upper = middle - width, middle + width
        found = bound(rows, lower, upper, "nearest")
        for _ in range(30):
            point = generator.uniform(lower, upper)
            line = [
                Fraction(a) * Fraction(x) for a, x in zip(found.slope[0, 0], point, strict=True)
            ]
            value = sum(line, Fraction(found.constant[0, 0]))
            assert Fraction(found.lower[0, 0]) <= value <= exact_row(rows, point)


def test_a_row_that_reads_nothing_keeps_its_slack() -> None:
    """Its neurons are zero on the box: what is left is its constant, known up to the slack."""
    neurons: list[Row] = [({0: 1.0}, -4.0), ({1: 1e10}, 1.0)]
    rows = rows_of(neurons, [({1: 1.0, 2: 1.0}, 0.0)], slack=0.25)
    found = bound(rows, np.zeros(1), np.ones(1), "nearest")
    assert found.bent[0] == 0
    assert 0 <= 0.5 - found.lower[0, 0] < 1e-6


# --- squares ------------------------------------------------------------------------------------


@EACH_DIRECTION
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_squares(direction: str, sign: float) -> None:
    """Tangents and chords, at ends where the chord is exact and where the tangent touches."""
    generator = np.random.default_rng(1)
    for k in range(60):
        lower = generator.normal(size=1) * 10.0 ** generator.integers(-3, 4)
        upper = lower if k % 4 == 0 else lower + generator.uniform(0, 2, 1)
        neurons: list[Row] = [({0: float(generator.normal())}, float(generator.normal()))]
        rows = rows_of(neurons, [({1: sign}, 0.0)], square=True)
        found = check(rows, lower, upper, direction)
        assert found.bent[0] == 1
        middle = lower / 2 + upper / 2
        line = Fraction(found.slope[0, 0, 0]) * Fraction(middle[0]) + Fraction(found.constant[0, 0])
        assert line <= exact_row(rows, middle)


@EACH_DIRECTION
def test_tangents_of_large_squares(direction: str) -> None:
    """The slope and the intercept cancel to less than what was rounded in them."""
    for value in (1 / 3, 1e8 / 3, 1e-8 / 3):
        rows = rows_of([({0: 1.0}, 0.0)], [({1: 1.0}, 0.0)], square=True)
        check(rows, np.array([value]), np.array([value * (1 + 4 * EPS)]), direction)


@EACH_DIRECTION
def test_chords_of_large_squares(direction: str) -> None:
    for value in (1 / 3, 1e8 / 3, 1e-8 / 3):
        rows = rows_of([({0: 1.0}, 0.0)], [({1: -1.0}, 0.0)], square=True)
        check(rows, np.array([value]), np.array([value * (1 + 4 * EPS)]), direction)


@EACH_DIRECTION
def test_squares_of_squares(direction: str) -> None:
    neurons: list[Row] = [({0: 1.0}, 0.1), ({1: 1.0, 0: -0.3}, 0.2), ({1: 1.0, 2: -1.0}, 0.0)]
    for sign in (1.0, -1.0):
        rows = rows_of(neurons, [({3: sign, 1: 1.0}, 0.0)], square=True)
        check(rows, np.array([-0.5]), np.array([0.7]), direction)


@EACH_DIRECTION
def test_signs_of_squares(direction: str) -> None:
    """The square of a row that has both signs may be zero, which the neuron behind it sees."""
    neurons: list[Row] = [({0: 1.0}, 0.0), ({1: 1.0}, -0.5)]
    rows = rows_of(neurons, [({2: 1.0}, 0.0)])
    rows.square[0] = True
    lower, upper = -np.ones(1), np.full(1, 0.9)
    check(rows, lower, upper, direction)
    found = bound(rows, lower, upper, direction)
    assert Fraction(found.lower[0, 0]) <= 0 and found.bent[0] == 2


@EACH_DIRECTION
@pytest.mark.parametrize("left", [0.0, 0.25])
def test_improved_lines_stay_below(direction: str, left: float) -> None:
    """Bounds that stay negative move lines as far as they go."""
    generator = np.random.default_rng(5)
    for _ in range(20):
        first, second = generator.normal(size=(2, 4))
        neurons: list[Row] = [({0: w, 1: v}, 0.1) for w, v in zip(first, second, strict=True)]
        row = {k + 2: w for k, w in enumerate(generator.normal(size=4).tolist())}
        rows = rows_of(neurons, [(row, -20.0)], left=left)
        lower = -generator.uniform(0.1, 1, 2)
        upper = generator.uniform(0.1, 1, 2)
        check(rows, lower, upper, direction)
        swapped = np.array([lower[0], upper[1]]), np.array([upper[0], lower[1]])
        found = bound(rows, lower, upper, direction)
        for point in swapped:
            slopes = zip(found.slope[0, 0], point, strict=True)
            terms = (Fraction(a) * Fraction(x) for a, x in slopes)
            assert sum(terms, Fraction(found.constant[0, 0])) <= exact_row(rows, point)
