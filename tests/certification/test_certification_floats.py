"""Networks that fool floats: nothing is verified that exact arithmetic refutes."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import product

import pytest
import torch
from effort import mostly_slow
from handmade import network, rational_margin, records, verdicts
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tightrope.certification.cascade import solve
from tightrope.certification.complete import bound_nodes
from tightrope.certification.problem import OpenProblem, robustness
from tightrope.certification.properties import Ball
from tightrope.certification.subjects import Subject

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = ("ibp", "crown-ibp", "alpha", "bab", "milp")
EXPONENTS = [24, 26, 30, 40, 52, 53, 54, 60, 100]


def assert_never_verified(net: nn.Sequential, x: Tensor, eps: Fraction, label: int = 0) -> None:
    """Check every stage alone, the usual cascade, and the solver of single problems."""
    for stage in STAGES:
        assert verdicts(net, x, [label], eps, stages=(stage,)) != ["verified"], stage
    cascade = ("ibp", "attack", "crown-ibp", "alpha", "bab")
    assert verdicts(net, x, [label], eps, stages=cascade) != ["verified"]
    subject = Subject.of(net, tuple(x.shape[1:]))
    (problem,) = robustness(subject, Ball(x, eps), torch.tensor([label]))
    assert not solve(subject, problem, timeout=20.0)


# --- large numbers that cancel --------------------------------------------------------------------


def absorbing(exponent: int) -> nn.Sequential:
    """`o_0 - o_1 = 1/2 - x`, computed as `(2^k - x) - 2^k + 1/2`."""
    big = 2.0**exponent
    return network(
        ([[0.0], [1.0]], [big, 0.0]),
        ([[1.0, -1.0], [1.0, 0.0]], [0.0, 0.0]),
        ([[1.0, -1.0], [0.0, 0.0]], [0.5, 0.0]),
    )


def telescope(exponent: int) -> nn.Sequential:
    """`o_0 - o_1 = 1/2 - x`, lost between the two classes' own sums."""
    big = 2.0**exponent
    return network(
        ([[0.0], [1.0]], [big, 0.0]),
        ([[1.0, -1.0], [1.0, 0.0]], [0.0, 0.0]),
        ([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.0]),
    )


def unstable_giant(exponent: int) -> nn.Sequential:
    """`o_0 - o_1 = 1/2 - x` beside a ReLU of size 2^k that bends, added and taken away."""
    big = 2.0**exponent
    return network(
        ([[big], [big], [1.0]], [-big / 4, -big / 4, 0.0]),
        ([[1.0, -1.0, -1.0], [0.0, 0.0, 0.0]], [0.5, 0.0]),
    )


def scaled_up_and_down(exponent: int) -> nn.Sequential:
    """`o_0 - o_1 = 1/2 - x`, with weights 2^k and 2^-k around a bias of one half."""
    big, small = 2.0**exponent, 2.0**-exponent
    return network(
        ([[small], [0.0]], [0.0, 1.0]),
        ([[big, big], [0.0, big]], [0.0, 0.0]),
        ([[-1.0, 1.0], [0.0, 0.0]], [0.5, 0.0]),
    )


FOOLING = [absorbing, telescope, unstable_giant, scaled_up_and_down]


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("build", FOOLING)
def test_a_violation_hidden_by_cancellation_is_never_verified(build, exponent: int) -> None:  # type: ignore[no-untyped-def]
    net = build(exponent)
    assert rational_margin(net, [Fraction(3, 8)], 0) == Fraction(1, 8)
    assert rational_margin(net, [Fraction(5, 8)], 0) == Fraction(-1, 8)
    assert_never_verified(net, torch.tensor([[0.375]]), Fraction(1, 4))


@pytest.mark.parametrize("build", FOOLING)
def test_the_same_networks_are_verified_where_digits_suffice(build) -> None:  # type: ignore[no-untyped-def]
    """The tests above say nothing about stages that never prove anything."""
    net, x = build(8), torch.tensor([[0.375]])
    for stage in ("alpha", "bab", "milp"):
        assert verdicts(net, x, [0], "1/16", stages=(stage,)) == ["verified"], stage


@pytest.mark.parametrize("exponent", [20, 30, 40])
@pytest.mark.parametrize("build", FOOLING)
def test_bounds_of_such_networks_lie_below_the_exact_margin(build, exponent: int) -> None:  # type: ignore[no-untyped-def]
    net, x, eps = build(exponent), torch.tensor([[0.25]]), Fraction(1, 10)
    exact = rational_margin(net, [Fraction(1, 4) + eps], 0)
    for stage in ("ibp", "crown-ibp", "alpha", "bab"):
        (record,) = records(net, x, [0], eps, stages=(stage,))
        if record.margin is not None and record.verdict != "falsified":
            assert Fraction(record.margin) <= exact, stage


# --- margins of one ulp ---------------------------------------------------------------------------


@pytest.mark.parametrize("label_first", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_a_margin_of_one_ulp(ulps: int, scale: float, label_first: bool) -> None:
    """`o_y - o_i` is `(3/4 + ulps 2^-24 - x) s`, on the ball up to 3/4."""
    level = scale * (0.75 + ulps * 2.0**-24)
    weight, bias = [[-scale], [0.0]], [level, 0.0]
    if not label_first:
        weight, bias = weight[::-1], bias[::-1]
    net, label = network(([[1.0]], [0.0]), (weight, bias)), 0 if label_first else 1
    x, eps = torch.tensor([[0.5]]), Fraction(1, 4)
    assert (rational_margin(net, [Fraction(3, 4)], label) > 0) == (ulps > 0)
    if ulps <= 0:
        assert_never_verified(net, x, eps, label)
    else:
        # One ulp of float32 is plenty in float64.
        for stage in ("ibp", "crown-ibp", "alpha", "bab"):
            assert verdicts(net, x, [label], eps, stages=(stage,)) == ["verified"], stage


@pytest.mark.parametrize("digits", [7, 16, 17, 20, 29])
def test_a_radius_that_is_barely_too_large(digits: int) -> None:
    """The ball is the rational one: with 1/4 + 10^-digits the tie is crossed."""
    net = network(([[1.0]], [0.0]), ([[-1.0], [0.0]], [0.75, 0.0]))
    x = torch.tensor([[0.5]])
    assert_never_verified(net, x, Fraction(1, 4) + Fraction(1, 10**digits))


# --- huge biases and extreme ratios ---------------------------------------------------------------


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_huge_biases_that_cancel(exponent: int) -> None:
    """Two hidden layers shift by 2^k and back: `o_0 - o_1 = 1/2 - x` again."""
    big = 2.0**exponent
    net = network(
        ([[1.0], [0.0]], [big, 1.0]),
        ([[1.0, -big], [0.0, 1.0]], [0.0, 0.0]),
        ([[-1.0, 0.5], [0.0, 0.0]], [0.0, 0.0]),
    )
    assert rational_margin(net, [Fraction(5, 8)], 0) == Fraction(-1, 8)
    assert_never_verified(net, torch.tensor([[0.375]]), Fraction(1, 4))


def corners(x: Tensor, eps: Fraction) -> list[list[Fraction]]:
    """Return the corners of the exact ball, its centre and the middles of its faces."""
    ends = []
    for value in map(Fraction, x.flatten().tolist()):
        low, high = max(Fraction(0), value - eps), min(Fraction(1), value + eps)
        ends.append((low, (low + high) / 2, high))
    return [list(point) for point in product(*ends)]


NUMBERS = st.builds(
    lambda sign, digit, exponent: sign * digit * 2.0**exponent,
    st.sampled_from([-1, 1]),
    st.sampled_from([0, 0, 1, 1, 3]),
    st.sampled_from([0, 0, 0, -2, -30, 24, 30, 40, 53, 60]),
)


@settings(max_examples=30)
@given(st.data())
def test_mixed_magnitudes_in_all_stages(data: st.DataObject) -> None:
    check_mixed_magnitudes(data)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_mixed_magnitudes_in_all_stages_at_length(data: st.DataObject) -> None:
    check_mixed_magnitudes(data)


def check_mixed_magnitudes(data: st.DataObject) -> None:
    """Weights from 2^-30 to 2^60 in one network: floats forget small ones, fractions do not."""

    def layer(outputs: int, inputs: int) -> tuple[list[list[float]], list[float]]:
        row = st.lists(NUMBERS, min_size=inputs, max_size=inputs)
        weight = data.draw(st.lists(row, min_size=outputs, max_size=outputs))
        return weight, data.draw(st.lists(NUMBERS, min_size=outputs, max_size=outputs))

    net = network(layer(3, 2), layer(3, 3), layer(2, 3))
    x = torch.tensor([data.draw(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=2))])
    eps = data.draw(st.sampled_from([Fraction(1, 10), Fraction(1, 10**6), Fraction(1, 10**9)]))
    with torch.no_grad():
        logits = net(x)
    assume(bool(logits.isfinite().all()))
    label = int(logits.argmax(1))
    points = corners(x, eps)
    lowest = min(rational_margin(net, point, label) for point in points)
    for stage in ("crown-ibp", "alpha", "bab"):
        (record,) = records(net, x, [label], eps, stages=(stage,))
        event(f"{stage}: {record.verdict}")
        if record.verdict == "verified":
            assert lowest > 0, stage
            assert record.margin is not None and Fraction(record.margin) <= lowest


def piecewise_minimum(net: nn.Sequential, low: Fraction, high: Fraction) -> Fraction:
    """Return the exact least margin of a network of one input and one hidden layer.

    It is attained where a ReLU bends or at an end.
    """
    first = net[1]
    assert isinstance(first, nn.Linear)
    places = {low, high}
    for (w,), b in zip(first.weight.tolist(), first.bias.tolist(), strict=True):
        if w:
            bend = -Fraction(b) / Fraction(w)
            if low < bend < high:
                places.add(bend)
    return min(rational_margin(net, [place], 0) for place in places)


@pytest.mark.parametrize("seed", mostly_slow(range(40), 14))
def test_exact_critical_points_of_extreme_networks(seed: int) -> None:
    """Random hidden layers with weights of all sizes, and a margin within float32's noise."""
    generator = random.Random(seed)
    width = generator.randint(1, 5)

    def number() -> float:
        size = 2.0 ** generator.choice([-20, -3, 0, 0, 1, 10, 24, 30])
        return float(torch.tensor(generator.gauss(0, 1) * size))

    weight = [[number()] for _ in range(width)]
    bias = [-w[0] * float(torch.tensor(generator.random())) for w in weight]
    bias = [float(torch.tensor(b)) for b in bias]
    last = [number() for _ in range(width)]
    eps, x = Fraction(1, 10), torch.tensor([[0.5]])
    low, high = Fraction(1, 2) - eps, Fraction(1, 2) + eps
    plain = network((weight, bias), ([last, [0.0] * width], [0.0, 0.0]))
    lowest = piecewise_minimum(plain, low, high)
    scale = max(1.0, max(abs(a * w[0]) for a, w in zip(last, weight, strict=True)))
    for nudge in (-1e-3, -1e-9, 0.0, 1e-9, 1e-3):
        level = float(torch.tensor(float(-lowest) + nudge * scale))
        if not math.isfinite(level):
            continue
        net = network((weight, bias), ([last, [0.0] * width], [level, 0.0]))
        exact = piecewise_minimum(net, low, high)
        subject = Subject.of(net, (1,))
        if int(subject.predict(x)[0]) != 0:
            continue
        for stage in ("alpha", "bab"):
            (record,) = records(net, x, [0], eps, stages=(stage,))
            if record.verdict == "verified":
                assert exact > 0
            if record.verdict != "falsified" and record.margin is not None:
                assert Fraction(record.margin) <= exact


def test_strict_bounds_of_hidden_neurons_hold_exactly() -> None:
    """The bounds that later stages build on are proved as well."""
    net, x = absorbing(40), torch.tensor([[0.25]])
    subject = Subject.of(net, (1,))
    (problem,) = robustness(subject, Ball(x, Fraction(1, 10)), torch.tensor([0]))
    box = bound_nodes(subject, OpenProblem(problem)).boxes[len(subject.exact.nodes) - 1]
    for place in (Fraction(15, 100), Fraction(1, 4), Fraction(35, 100)):
        value = Fraction(1, 2) - place
        assert Fraction(box.lower[0, 0].item()) <= value <= Fraction(box.upper[0, 0].item())
