"""Cuts and combinations of rows in bad arithmetic, against fractions."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from adverse import DIRECTIONS, adverse
from torch import Tensor

from tightrope.certification.search.clipping import KEPT, Boxes, clip, middles
from tightrope.certification.search.combining import combine
from tightrope.domains.boxes.bounding import RowBounds, smallest_values

pytestmark = pytest.mark.usefixtures("one_thread")

EACH_DIRECTION = pytest.mark.parametrize("direction", DIRECTIONS)
INF, NAN = math.inf, math.nan


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lines(slope: Tensor, constant: Tensor) -> RowBounds:
    """Return linear functions, [boxes, rows, inputs] and [boxes, rows], as bounds."""
    nothing = torch.zeros(len(slope), dtype=torch.long)
    return RowBounds(slope, constant, torch.zeros_like(constant), slope.abs(), nothing)


# --- cuts ---------------------------------------------------------------------------------------


@EACH_DIRECTION
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_cut_behind_a_long_sum(direction: str, sign: float) -> None:
    """`x + 300 small terms - 1.5 <= KEPT` limits x, and all of it is kept."""
    count = 300
    slope = torch.full((1, 1, count + 1), 1e-30, dtype=torch.float64)
    slope[0, 0, 0] = sign
    lower, upper = torch.ones(1, count + 1).double(), torch.ones(1, count + 1).double()
    upper[0, 0] = 2.0
    if sign < 0:
        lower[0, 0], upper[0, 0] = -2.0, -1.0
    boxes = Boxes(lower, upper, torch.ones(1, 1, dtype=torch.bool))
    with adverse(direction):
        found = clip(boxes, lines(slope, numbers(-1.5)[None]), torch.tensor([[0]]))
    exact = Fraction(1.5) + Fraction(KEPT) - count * Fraction(1e-30)
    end = float(found.upper[0, 0]) if sign > 0 else -float(found.lower[0, 0])
    assert 0 <= Fraction(end) - exact < Fraction(1, 10**12)


@EACH_DIRECTION
def test_a_cut_among_subnormal_numbers(direction: str) -> None:
    for share in (3, 7, 11, 13):
        constant = -1e-9 / share
        boxes = Boxes(numbers(0.0)[None], numbers(1e-316)[None], torch.ones(1, 1).bool())
        with adverse(direction):
            found = clip(
                boxes,
                lines(numbers(1e308)[None, None], numbers(constant)[None]),
                torch.zeros(1, 1).long(),
            )
        assert found.open.all()
        assert Fraction(float(found.upper)) >= (Fraction(KEPT) - Fraction(constant)) / Fraction(
            1e308
        )


def test_a_cut_keeps_boxes_without_width() -> None:
    point = numbers(0.25, -1.0)[None]
    boxes = Boxes(point, point, torch.ones(1, 1).bool())
    found = clip(
        boxes, lines(numbers(1.0, 1.0)[None, None], numbers(0.0)[None]), torch.zeros(1, 1).long()
    )
    assert found.open.all() and torch.equal(found.lower, point) and torch.equal(found.upper, point)


def test_middles_of_huge_numbers_lie_inside() -> None:
    for low, high in ((1.6e308, 1.7e308), (-1.7e308, -1.6e308), (-1.7e308, 1.7e308)):
        assert low < float(middles(numbers(low), numbers(high))) < high


def test_what_is_not_a_number_cuts_nothing() -> None:
    boxes = Boxes(numbers(-1.0)[None], numbers(1.0)[None], torch.ones(1, 1).bool())
    for slope, constant in ((1.0, NAN), (NAN, 1.0), (1.0, -INF), (0.0, NAN), (INF, 1.0)):
        bounds = lines(numbers(slope)[None, None], numbers(constant)[None])
        found = clip(boxes, bounds, torch.zeros(1, 1).long())
        assert found.open.all() and float(found.lower) == -1.0 and float(found.upper) == 1.0


# --- combinations -------------------------------------------------------------------------------


@EACH_DIRECTION
def test_combinations_at_the_point_where_rows_meet(direction: str) -> None:
    """Both rows are exactly 1 there, so that a combination of them is no more than that."""
    met = 0
    for up in range(2, 9):
        for down in range(2, 9):
            x = 1000.0 * up + down
            slope = numbers(up, -down)[None, :, None]
            constant = numbers(1.0 - up * x, 1.0 + down * x)[None]
            ends = numbers(x - 1)[None], numbers(x + 2)[None]
            bounds = replace(lines(slope, constant), lower=smallest_values(slope, constant, *ends))
            with adverse(direction):
                found = combine(bounds, *ends, torch.ones(1, 1).bool(), torch.tensor([[0, 1]]))
            at = Fraction(float(found.slope[0, 2])) * Fraction(x) + Fraction(
                float(found.constant[0, 2])
            )
            assert at <= 1
            assert Fraction(float(found.lower[0, 2])) <= 1
            met += float(found.lower[0, 2]) > 0.9
    assert met > 40


def test_combinations_have_weights_that_are_not_negative() -> None:
    """From one row to another of the same sign of slope there is nothing to gain on the way."""
    slope = numbers(1.0, 2.0)[None, :, None]
    for flip in (1.0, -1.0):
        constant = numbers(-1.0, -2.5)[None]
        ends = numbers(-1.0)[None], numbers(1.0)[None]
        bounds = replace(
            lines(flip * slope, constant),
            lower=smallest_values(flip * slope, constant, *ends),
        )
        found = combine(bounds, *ends, torch.ones(1, 1).bool(), torch.tensor([[0, 1]]))
        assert float(found.lower[0, 2]) <= -2.0
