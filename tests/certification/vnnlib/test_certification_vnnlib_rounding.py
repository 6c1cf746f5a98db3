"""Bounds of inputs as floats: exactly what fractions say, and never past a deadline."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from tightrope.certification.vnnlib.specification import Case
from tightrope.deadline import Deadline, OutOfTimeError, until

TYPES = (torch.float32, torch.float64)


def hard(generator: random.Random) -> Fraction:
    """A number beside one of float32 or float64, halfway between two, or anything."""
    dtype = generator.choice(TYPES)
    start = torch.tensor(generator.uniform(-2, 2) * 10.0 ** generator.randint(-30, 3), dtype=dtype)
    after = torch.nextafter(start, torch.tensor(torch.inf, dtype=dtype))
    low, high = Fraction(start.item()), Fraction(after.item())
    share = generator.choice((Fraction(0), Fraction(1, 2), Fraction(generator.random())))
    tiny = Fraction(generator.choice((-1, 0, 0, 1)), 10 ** generator.randint(40, 60))
    return low + share * (high - low) + tiny


def cases(seed: int, count: int = 60) -> Case:
    generator = random.Random(seed)
    lower = [hard(generator) for _ in range(count)]
    upper = [generator.choice((x, x, x + abs(x) / 2**30, x + 1)) for x in lower]
    opened = [i for i in range(count) if lower[i] < upper[i] and generator.random() < 0.3]
    ends = frozenset(opened[::2]), frozenset(opened[1::2])
    return Case(tuple(lower), tuple(upper), (), *ends)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_ends_are_the_first_floats_inside_and_outside(seed: int, dtype: torch.dtype) -> None:
    case = cases(seed)
    outer = case.outer(dtype)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    for sign, bounds, found in ((1, case.lower, outer.lower), (-1, case.upper, outer.upper)):
        inside = torch.nextafter(found[0], sign * infinity)
        for bound, out, within in zip(bounds, found[0].tolist(), inside.tolist(), strict=True):
            assert sign * Fraction(out) <= sign * bound < sign * Fraction(within)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_points_are_contained_as_fractions_say(seed: int, dtype: torch.dtype) -> None:
    case = cases(seed).for_type(dtype)
    box = case.inner(dtype)
    assert box is not None
    infinity = torch.tensor(torch.inf, dtype=dtype)
    for corner, sign in ((box.lower[0], -1), (box.upper[0], 1)):
        assert case.contains(corner.tolist())
        beyond = torch.nextafter(corner, sign * infinity)
        for i, (there, out) in enumerate(zip(corner.tolist(), beyond.tolist(), strict=True)):
            assert case.admits(i, Fraction(there)) and not case.admits(i, Fraction(out))
            moved = corner.tolist()
            moved[i] = out
            assert not case.contains(moved)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_thin_inputs_have_the_nearest_float(dtype: torch.dtype) -> None:
    for seed in range(5):
        case = cases(seed)
        for i, value in case.for_type(dtype).fixed.items():
            middle = (case.lower[i] + case.upper[i]) / 2
            near = torch.tensor(float(value), dtype=dtype)
            for end in (-torch.inf, torch.inf):
                other = torch.nextafter(near, torch.tensor(end, dtype=dtype)).item()
                assert abs(value - middle) <= abs(Fraction(other) - middle)


def test_rounding_many_bounds_looks_at_the_clock() -> None:
    case = cases(0)
    with until(Deadline.after(-1)), pytest.raises(OutOfTimeError):
        case.for_type(torch.float32)
