"""The exact ball between its float boxes: compared with fractions, without any tolerance."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tightrope.certification.properties import Ball, parse_ball
from tightrope.errors import UserError

SMALLEST = 2.0**-149  # the smallest subnormal float32

FINE = Fraction(1, 2**51)  # a few roundings of float64 numbers up to 1

RADII = [Fraction(n, 255) for n in (1, 2, 8)] + [Fraction(1, n) for n in (1, 3, 10)]
RADII += [Fraction(1, 10**n) for n in (9, 30, 45, 320, 400)]

pixels = st.one_of(
    st.floats(0, 1, width=32, allow_subnormal=True),
    st.sampled_from([0.0, 1.0, 0.5, SMALLEST, 2.0**-126, 2.0**-127, 1 - 2.0**-24, 1 / 3]).map(
        lambda value: torch.tensor(value).item()
    ),
    st.integers(0, 255).map(lambda level: (torch.tensor(float(level)) / 255).item()),
)
radii = st.one_of(
    st.sampled_from(RADII),
    st.fractions(0, 1, max_denominator=10**6).filter(bool),
    st.floats(0, 1, exclude_min=True).map(Fraction),
    st.integers(1, 255).map(lambda level: Fraction(level, 255)),
)


def exact_ends(x: float, eps: Fraction) -> tuple[Fraction, Fraction]:
    return max(Fraction(0), Fraction(x) - eps), min(Fraction(1), Fraction(x) + eps)


def ends(tensors: tuple[torch.Tensor, torch.Tensor]) -> tuple[Fraction, Fraction]:
    lower, upper = tensors
    return Fraction(lower.item()), Fraction(upper.item())


def float32_step(value: Fraction, towards: float, steps: int) -> Fraction:
    tensor = torch.tensor(float(value), dtype=torch.float32)
    for _ in range(steps):
        tensor = torch.nextafter(tensor, torch.tensor(towards))
    return Fraction(tensor.item())


@settings(max_examples=400)
@given(pixels, radii)
@example(0.0, Fraction(1))
@example(1.0, Fraction(1))
@example(1.0, Fraction("1e-400"))
@example(SMALLEST, Fraction(1, 2**150))
@example(0.1 + 2**-30, Fraction(1, 10))
def test_outer_contains_the_exact_ball(x: float, eps: Fraction) -> None:
    x = torch.tensor(x, dtype=torch.float32).item()
    box = Ball(torch.tensor([x]), eps).outer()
    assert box.lower.dtype == box.upper.dtype == torch.float64
    (low, high), (exact_low, exact_high) = ends(box.corners), exact_ends(x, eps)
    assert 0 <= low <= exact_low
    assert exact_high <= high <= 1
    # ... and hardly more than that.
    assert exact_low - low <= FINE
    assert high - exact_high <= FINE


@settings(max_examples=400)
@given(pixels, radii)
@example(0.0, Fraction(1))
@example(1.0, Fraction(1))
@example(1.0, Fraction("1e-400"))
@example(SMALLEST, Fraction(1, 2**150))
@example(0.1 + 2**-30, Fraction(1, 10))
def test_inner_lies_in_the_exact_ball(x: float, eps: Fraction) -> None:
    x = torch.tensor(x, dtype=torch.float32).item()
    box = Ball(torch.tensor([x]), eps).inner()
    assert box.lower.dtype == box.upper.dtype == torch.float32
    (low, high), (exact_low, exact_high) = ends(box.corners), exact_ends(x, eps)
    assert exact_low <= low <= Fraction(x) <= high <= exact_high
    # ... and nearly fills it: two steps further out are outside, up to float64's rounding.
    assert low == 0 or float32_step(low, -1.0, 2) < exact_low + FINE
    assert high == 1 or float32_step(high, 2.0, 2) > exact_high - FINE


@given(st.lists(pixels, min_size=2, max_size=6), radii)
def test_a_batch_is_its_samples(values: list[float], eps: Fraction) -> None:
    x = torch.tensor(values).reshape(-1, 1)
    ball = Ball(x, eps)
    for i in range(len(x)):
        for box, alone in (
            (ball.outer()[slice(i, i + 1)], ball.select(torch.tensor([i])).outer()),
            (ball.inner()[slice(i, i + 1)], ball.select(torch.tensor([i])).inner()),
        ):
            assert torch.equal(box.lower, alone.lower)
            assert torch.equal(box.upper, alone.upper)


def test_a_radius_between_floats_is_not_rounded() -> None:
    """0.1 is neither float32's nor float64's nearest number, and the box knows."""
    ball = Ball(torch.tensor([0.5]), Fraction(1, 10))
    assert Fraction(ball.outer().upper.item()) > Fraction(6, 10)
    assert Fraction(ball.inner().upper.item()) < Fraction(6, 10)


@pytest.mark.parametrize("eps", ["1e-9", "1e-30", "1e-400"])
def test_a_tiny_ball_holds_its_centre_only(eps: str) -> None:
    x = torch.tensor([0.25, 0.5, 1.0])
    box = Ball(x, Fraction(eps)).inner()
    assert torch.equal(box.lower, x) and torch.equal(box.upper, x)
    assert bool(box.contains(x[:, None].T).all())


@pytest.mark.parametrize(
    ("x", "eps"),
    [
        (0.1, Fraction(1, 10)),  # the input is a little more than a tenth
        (0.5, Fraction(3, 2**55)),  # three quarters of the step to the next number
        (0.5, Fraction(3, 2**56)),  # and of that to the one before
        (0.7, Fraction(1, 3)),
    ],
)
def test_inner_of_float64_inputs(x: float, eps: Fraction) -> None:
    """Nothing but the box's own rounding is between it and the ball."""
    box = Ball(torch.tensor([x], dtype=torch.float64), eps).inner()
    (low, high), (exact_low, exact_high) = ends(box.corners), exact_ends(x, eps)
    assert exact_low <= low <= Fraction(x) <= high <= exact_high


# --- domains ----------------------------------------------------------------------------------

domains = st.one_of(
    st.none(),
    st.tuples(st.floats(-5, 0.5), st.floats(0.5, 5)).filter(lambda pair: pair[0] < pair[1]),
)


@settings(max_examples=200)
@given(st.floats(-5, 5, width=32), st.fractions(0, 7, max_denominator=1000).filter(bool), domains)
def test_boxes_enclose_the_ball_within_its_domain(
    x: float, eps: Fraction, domain: tuple[float, float] | None
) -> None:
    low, high = (Fraction(-100), Fraction(100)) if domain is None else map(Fraction, domain)
    if not low <= Fraction(x) <= high:
        with pytest.raises(UserError, match="domain="):
            parse_ball(torch.tensor([[x]]), eps, domain)
        return
    ball = parse_ball(torch.tensor([[x]]), eps, domain)
    lower, upper = max(low, Fraction(x) - eps), min(high, Fraction(x) + eps)
    outer, inner = ends(ball.outer().corners), ends(ball.inner().corners)
    assert outer[0] <= lower <= inner[0] <= Fraction(x) <= inner[1] <= upper <= outer[1]
    assert outer[0] >= low and outer[1] <= high


@pytest.mark.parametrize("domain", [(1, 0), (0, 0), (0,), "ab", (0, float("nan")), 3])
def test_bad_domains(domain: object) -> None:
    with pytest.raises(UserError, match="domain must be a pair"):
        parse_ball(torch.zeros(1, 1), 0.1, domain)  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [0, -1, "1e31", "nan"])
def test_bad_radii_without_a_domain(eps: object) -> None:
    with pytest.raises(UserError, match="eps"):
        parse_ball(torch.zeros(1, 1), eps, None)  # type: ignore[arg-type]
