"""The vector instructions that are written out: sums of rows."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from tightrope.attacks.kernels.lanes_kernel import (
    LANES,
    add_products,
    choose,
    gather,
    is_zero,
    scatter,
)
from tightrope.attacks.kernels.rows_kernel import add_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 25, 31, 48, 64, 98, 133])
def test_sums_of_rows(length: int, dtype: type) -> None:
    """A part of some rows is added to a part of the goal, and nothing else changes."""

    @njit
    def add(
        goal: np.ndarray,
        rows: np.ndarray,
        column: int,
        picks: np.ndarray,
        places: np.ndarray,
        amounts: np.ndarray,
        begin: int,
        end: int,
    ) -> None:
        add_rows(goal, rows, column, picks, places, amounts, begin, end)

    random = np.random.default_rng(length)
    goal, rows = random.random(length + 2).astype(dtype), random.random((5, length + 3))
    picks, places, amounts = np.array([4, 0, 2, 1]), np.array([3, 0, 2, 0, 1]), random.random(5)
    rows, amounts, before = rows.astype(dtype), amounts.astype(dtype), goal.copy()
    add(goal[1:-1], rows, 2, picks, places, amounts, 1, 4)
    before[1:-1] += amounts[1:4] @ rows[picks[places[1:4]], 2 : 2 + length]
    np.testing.assert_allclose(goal, before, rtol=1e-6)
    assert goal[0] == before[0] and goal[-1] == before[-1]
    add(goal[1:-1], rows, 2, picks, places, amounts, 3, 3)
    np.testing.assert_allclose(goal, before, rtol=1e-6)


# --- rows of 16 ---------------------------------------------------------------------------------

PLACES = np.array([3, 0, 2, 2, 1], np.int32)


def rows(count: int, dtype: type, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count * LANES).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("begin,end", [(0, 5), (1, 4), (2, 2)])
def test_gather(begin: int, end: int, dtype: type) -> None:
    """A row of a base plus listed rows, each times its factor; other rows stay."""

    @njit
    def run(goal, base, sources, places, factors, begin, end):  # type: ignore[no-untyped-def]
        gather(goal, 2, base, sources, places, factors, begin, end)

    goal, base, sources = (rows(4, dtype, seed) for seed in range(3))
    factors = np.random.default_rng(3).normal(size=5).astype(dtype)
    expected = goal.copy().reshape(4, LANES)
    expected[2] = base.reshape(4, LANES)[2]
    expected[2] += factors[begin:end] @ sources.reshape(4, LANES)[PLACES[begin:end]]
    run(goal, base, sources, PLACES, factors, begin, end)
    np.testing.assert_allclose(goal.reshape(4, LANES), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("begin,end", [(0, 5), (1, 4), (2, 2)])
def test_scatter(begin: int, end: int, dtype: type) -> None:
    """A row goes to listed places, which may repeat, behind an offset."""

    @njit
    def run(goal, sources, places, factors, begin, end):  # type: ignore[no-untyped-def]
        scatter(goal, 1, sources, 2, places, factors, begin, end)

    goal, sources = rows(6, dtype, 0), rows(4, dtype, 1)
    factors = np.random.default_rng(3).normal(size=5).astype(dtype)
    expected = goal.copy().reshape(6, LANES)
    for place, factor in zip(PLACES[begin:end], factors[begin:end], strict=True):
        expected[1 + place] += factor * sources.reshape(4, LANES)[2]
    run(goal, sources, PLACES, factors, begin, end)
    np.testing.assert_allclose(goal.reshape(6, LANES), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_zeros_and_choices(dtype: type) -> None:
    @njit
    def run(goal, left, right, kept, chosen):  # type: ignore[no-untyped-def]
        add_products(goal, 1, left, right)
        choose(kept, 1, left, chosen)
        return is_zero(left, 0), is_zero(left, 1)

    goal, left, right, kept = (rows(n, dtype, n) for n in (1, 2, 3, 4))
    left[:LANES] = 0
    chosen = (np.arange(LANES) % 3 == 0).astype(dtype)
    sums, before = goal + left[LANES:] * right[LANES : 2 * LANES], kept.copy()
    assert run(goal, left, right, kept, chosen) == (True, False)
    np.testing.assert_allclose(goal, sums, rtol=1e-5)
    before[LANES : 2 * LANES] = np.where(chosen > 0, left[LANES:], before[LANES : 2 * LANES])
    np.testing.assert_array_equal(kept, before)
    left[:LANES], left[5] = 0, np.nan
    assert run(goal, left, right, kept, chosen)[0] is False
