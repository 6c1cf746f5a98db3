"""Radius and learning-rate schedules against their formulas."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightrope.training.schedules import RadiusSchedule, learning_rate
from tightrope.training.settings import Settings
from tightrope.training.trainer import radius_schedule

RAMPS = st.tuples(st.integers(0, 500), st.integers(0, 3000), st.floats(1e-4, 1.0))


def smooth(s, s0, s1, target, middle=0.25):
    """The smoothed ramp, for ramps of at least four iterations."""
    m = s0 + int((s1 - s0) * middle)
    a = target / ((s1 - m) * 4 * (m - s0) ** 3 + (m - s0) ** 4)
    if s <= s0:
        return 0.0
    if s <= m:
        return a * (s - s0) ** 4
    if s < s1:
        start = a * (m - s0) ** 4
        return start + (target - start) * (s - m) / (s1 - m)
    return target


def test_smooth_values_by_hand():
    # Ramp 10 .. 18: quarter 2, so A = 0.4 / (6 * 4 * 8 + 16) = 0.4 / 208.
    schedule = RadiusSchedule(0.4, 10, 18)
    unit = 0.4 / 208
    expected = {0: 0, 9: 0, 10: 0, 11: unit, 12: 16 * unit, 13: 48 * unit, 15: 112 * unit}
    expected |= {17: 176 * unit, 18: 0.4, 19: 0.4, 1000: 0.4}
    for iteration, radius in expected.items():
        assert schedule(iteration) == pytest.approx(radius, rel=1e-12, abs=0)


@pytest.mark.parametrize("start,length", [(0, 4), (0, 100), (234, 4680), (7, 401), (3, 5), (1, 7)])
def test_smooth_formula_at_every_iteration(start, length):
    schedule = RadiusSchedule(8 / 255, start, start + length)
    for s in range(start + length + 3):
        expected = smooth(s, start, start + length, 8 / 255)
        assert schedule(s) == pytest.approx(expected, rel=1e-12, abs=0), s


@pytest.mark.parametrize("middle", [0.1, 0.4, 1.0])
def test_the_curved_part_is_a_setting(middle):
    schedule = RadiusSchedule(8.8 / 255, 200, 1002, "smooth", middle)
    for s in range(1005):
        expected = smooth(s, 200, 1002, 8.8 / 255, middle)
        assert schedule(s) == pytest.approx(expected, rel=1e-12, abs=0), s
    settings = Settings.parse(
        {"epochs": 8, "warmup_epochs": 1, "annealing_epochs": 5, "annealing_middle": middle}
    ).resolve(normalize=False, network={})
    assert radius_schedule(settings, 7) == RadiusSchedule(0.1, 7, 42, "smooth", middle)


@given(RAMPS)
def test_smooth_is_continuous_with_a_continuous_slope(ramp):
    start, length, target = ramp
    quarter = length // 4
    if quarter < 2:
        return
    radius = RadiusSchedule(target, start, start + length)
    middle = start + quarter
    slope = radius(middle + 1) - radius(middle)
    # The fourth-power part has the height q/4 slope at its end, where its slope is the line's.
    assert radius(middle) == pytest.approx(slope * quarter / 4, rel=1e-6)
    left = radius(middle) - radius(middle - 1)
    assert left < slope
    share = 1 - (1 - 1 / quarter) ** 4  # what the last step adds to a fourth power
    assert left == pytest.approx(radius(middle) * share, rel=1e-6)
    # The line goes on with that slope and meets the target.
    for s in (middle + quarter, start + length - 1):
        assert radius(s + 1) - radius(s) == pytest.approx(slope, rel=1e-6)


@given(RAMPS, st.sampled_from(["smooth", "linear", "constant"]))
def test_every_kind_rises_from_zero_to_the_target(ramp, kind):
    start, length, target = ramp
    schedule = RadiusSchedule(target, start, start + length, kind)
    values = [schedule(s) for s in range(start + length + 2)]
    assert all(a <= b for a, b in itertools.pairwise(values))
    assert all(value == 0 for value in values[:start])
    assert values[start + length :] == [target, target]
    assert all(0 <= value <= target for value in values)
    if kind != "constant" and length > 1:
        assert values[start] == 0 and all(0 < v < target for v in values[start + 1 : -2])


@pytest.mark.parametrize(
    "length,expected",
    [
        (0, [0, 0, 1, 1, 1, 1, 1]),
        (1, [0, 0, 0, 1, 1, 1, 1]),
        (2, [0, 0, 0, 1 / 2, 1, 1, 1]),
        (3, [0, 0, 0, 1 / 3, 2 / 3, 1, 1]),
    ],
)
@pytest.mark.parametrize("kind", ["smooth", "linear"])
def test_ramps_too_short_for_a_quarter_are_lines(kind, length, expected):
    schedule = RadiusSchedule(1.0, 2, 2 + length, kind)
    assert [schedule(s) for s in range(7)] == pytest.approx(expected, rel=1e-12, abs=0)


def test_linear_and_constant():
    linear = RadiusSchedule(0.3, 4, 14, "linear")
    assert [linear(s) for s in (3, 4, 5, 9, 13, 14, 15)] == pytest.approx(
        [0, 0, 0.03, 0.15, 0.27, 0.3, 0.3], rel=1e-12, abs=0
    )
    constant = RadiusSchedule(0.3, 4, 14, "constant")
    assert [constant(s) for s in (0, 3, 4, 5, 14)] == [0, 0, 0.3, 0.3, 0.3]


def test_learning_rate_drops_at_each_decay_epoch():
    rates = [learning_rate(5e-4, epoch, (50, 60), 0.2) for epoch in (0, 49, 50, 59, 60, 69)]
    assert rates == pytest.approx([5e-4, 5e-4, 1e-4, 1e-4, 2e-5, 2e-5], rel=1e-12)
    assert learning_rate(0.1, 1000, (), 0.2) == 0.1
    assert learning_rate(0.1, 0, (0,), 0.5) == 0.05
