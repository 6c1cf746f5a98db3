"""Hulls of groups of ReLUs: constraints hold for every real point, all of them are the hull."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from operator import mul

import numpy as np
import pytest
import scipy.spatial
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tightrope.domains.reduced import hulls
from tightrope.domains.reduced.hulls import Facets, directions, hull_constraints

pytestmark = pytest.mark.usefixtures("one_thread")


# --- exact arithmetic -----------------------------------------------------------------------


def determinant(m: list[list[int]]) -> int:
    if len(m) == 1:
        return m[0][0]
    minors = ([row[:j] + row[j + 1 :] for row in m[1:]] for j in range(len(m)))
    return sum((-1) ** j * m[0][j] * determinant(minor) for j, minor in enumerate(minors))


@lru_cache
def systems(normals: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], list, int]]:
    """Return the choices of planes that meet in one point, with cofactors and determinants."""
    size = len(normals[0])
    found = []
    for chosen in combinations(range(len(normals)), size):
        m = [list(normals[i]) for i in chosen]
        bottom = determinant(m)
        swap = [[[int(i == k) for i in range(size)] for k in range(size)] for _ in range(size)]
        cofactors = [
            [
                determinant([[*row[:j], e, *row[j + 1 :]] for row, e in zip(m, unit, strict=True)])
                for unit in swap[j]
            ]
            for j in range(size)
        ]
        if bottom:
            found.append((chosen, cofactors, bottom))
    return found


def exact_vertices(lower, upper, offsets) -> list[list[Fraction]]:
    """Return the vertices of all orthants' pieces of an octahedron within its box, exactly.

    By Cramer's rule in integers, after scaling all offsets by a common denominator.
    """
    size = len(lower)
    table = [tuple(int(x) for x in row) for row in directions(size)]
    units = [tuple(int(i == j) for j in range(size)) for i in range(size)]
    tightest = dict(zip(table, (Fraction(float(d)) for d in offsets), strict=True))
    for unit, low, high in zip(units, lower, upper, strict=True):
        opposite = tuple(-x for x in unit)
        tightest[unit] = min(tightest[unit], Fraction(float(high)))
        tightest[opposite] = min(tightest[opposite], -Fraction(float(low)))
    scale = max(d.denominator for d in tightest.values())
    inside = [(a, int(d * scale)) for a, d in tightest.items()]
    right = [d for _, d in inside] + [0] * size
    points = set()
    for chosen, cofactors, bottom in systems((*tightest, *units)):
        sign = 1 if bottom > 0 else -1
        ends = [sign * right[i] for i in chosen]
        h = [sum(map(mul, row, ends)) for row in cofactors]
        if all(sum(map(mul, a, h)) <= d * abs(bottom) for a, d in inside):
            points.add(tuple(Fraction(x, abs(bottom) * scale) for x in h))
    return [list(h) for h in points]


def assert_exact(facets: Facets, group: int, points: list[list[Fraction]]) -> None:
    for r in np.flatnonzero(facets.group == group):
        outputs, inputs = (
            [Fraction(float(x)) for x in t[r]] for t in (facets.outputs, facets.inputs)
        )
        for h in points:
            relu = [max(x, Fraction(0)) for x in h]
            value = sum(map(mul, inputs, h)) + sum(map(mul, outputs, relu))
            assert value + Fraction(float(facets.constant[r])) <= 0


# --- octahedra ------------------------------------------------------------------------------


def images(rng: np.random.Generator, count: int, size: int, inputs: int = 5):
    """Return bounds and offsets, all attained, of random linear images of boxes."""
    weight = rng.normal(size=(count, size, inputs))
    center = rng.normal(size=(count, size)) * 0.6
    table = directions(size)
    offsets = np.abs(np.einsum("dk,gki->gdi", table, weight)).sum(2) + center @ table.T
    spread = np.abs(weight).sum(2)
    lower, upper = center - spread, center + spread
    unstable = ((lower < 0) & (upper > 0)).all(1)
    return lower[unstable], upper[unstable], offsets[unstable]


@st.composite
def octahedra(draw, size: int):
    """Draw a group's bounds and offsets: all scales, ties with the box, near ties, cuts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scales = [10.0 ** draw(st.sampled_from([-8, -3, 0, 0, 0, 2, 8])) for _ in range(size)]
    if draw(st.booleans()):
        scales = [scales[0]] * size
    scale = np.array(scales)
    lower = -np.array(
        [draw(st.sampled_from([1.0, 0.5, 1e-9, rng.random() + 0.01])) for _ in scales]
    )
    upper = np.array([draw(st.sampled_from([1.0, 0.5, 1e-9, rng.random() + 0.01])) for _ in scales])
    lower, upper = (lower * scale)[None], (upper * scale)[None]
    box = hulls.box_offsets(lower, upper)
    kind = draw(st.sampled_from(["random", "box", "near", "infinite", "diamond", "opposite"]))
    inner = directions(size) @ (lower[0] * 0.3 + upper[0] * 0.7)
    share = rng.uniform(0, 1, box.shape)
    if kind == "box":
        share = np.ones_like(box)
    elif kind == "near":
        share = 1 - rng.choice([0, 1e-16, 1e-13, 1e-10, 1e-7], box.shape)
    elif kind == "diamond":
        share = np.full_like(box, 0.5)
    elif kind == "opposite":  # pairs of opposite planes that nearly touch
        share = rng.choice([0, 1e-15, 1e-9, 0.7], box.shape)
    offsets = inner + share * (box - inner)
    if kind == "infinite":
        offsets[rng.random(box.shape) < 0.5] = rng.choice([np.inf, np.nan, -np.inf])
    return lower, upper, offsets


def usable(lower, upper, offsets) -> np.ndarray:
    box = hulls.box_offsets(lower, upper)
    return np.where(np.isfinite(offsets), np.minimum(offsets, box), box)


# --- soundness ------------------------------------------------------------------------------


@given(octahedra(2))
@settings(max_examples=100, deadline=None)
def test_pairs_hold_at_exact_vertices(group) -> None:
    facets = hull_constraints(*group)
    points = exact_vertices(*(t[0] for t in group[:2]), usable(*group)[0])
    assert_exact(facets, 0, points)


@given(octahedra(3), st.sampled_from([3, 12]))
@settings(max_examples=40, deadline=None)
def test_triples_hold_at_exact_vertices(group, most) -> None:
    facets = hull_constraints(*group, most=most)
    points = exact_vertices(*(t[0] for t in group[:2]), usable(*group)[0])
    assert_exact(facets, 0, points)


@pytest.mark.slow
@given(octahedra(3))
@settings(max_examples=40, deadline=None)
def test_all_facets_of_triples_hold_at_exact_vertices(group) -> None:
    facets = hull_constraints(*group)
    points = exact_vertices(*(t[0] for t in group[:2]), usable(*group)[0])
    assert_exact(facets, 0, points)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_constraints_hold_at_sampled_points(size: int, scale: float) -> None:
    rng = np.random.default_rng(1)
    lower, upper, offsets = (scale * t for t in images(rng, 8, size))
    facets = hull_constraints(lower, upper, offsets)
    assert set(facets.group) == set(range(len(lower)))
    bounds = usable(lower, upper, offsets)
    for g in range(len(lower)):
        ends = np.stack([lower[g], np.zeros(size), upper[g]])
        corners = np.array(list(product(*ends.T)))
        random = rng.uniform(lower[g], upper[g], (4000, size))
        edge = random * (rng.random(random.shape) < 0.6)
        points = np.concatenate([corners, random, edge])
        points = points[(points @ directions(size).T <= bounds[g]).all(1)]
        assert len(points) > 50
        rows = facets.group == g
        values = np.maximum(points, 0) @ facets.outputs[rows].T + points @ facets.inputs[rows].T
        assert (values + facets.constant[rows]).max() <= 1e-15 * scale


def test_a_larger_constant_would_be_wrong() -> None:
    group = tuple(t[:1] for t in images(np.random.default_rng(2), 4, 2))
    facets = hull_constraints(*group)
    tight = Facets(**{**vars(facets), "constant": facets.constant + 1e-9})
    with pytest.raises(AssertionError):
        assert_exact(tight, 0, exact_vertices(*(t[0] for t in group)))


def test_computed_vertices_are_the_exact_ones() -> None:
    lower, upper, offsets = (t[:1] for t in images(np.random.default_rng(3), 4, 3))
    scaled, exponents = hulls._scaled(offsets)
    (computed,) = hulls._vertices(scaled)
    exact = np.array(exact_vertices(lower[0], upper[0], offsets[0]), float) / 2.0 ** exponents[0]
    apart = np.abs(computed[:, None] - exact).max(2)
    assert apart.min(1).max() < 1e-12
    assert apart.min(0).max() < 1e-12


# --- exactness ------------------------------------------------------------------------------


def largest(goal, facets: Facets, group: int, lower, upper) -> float:
    """Maximise `goal` over (y, h) subject to the constraints and the triangles."""
    size = len(lower)
    unit, zero = np.eye(size), np.zeros((size, size))
    slope = np.diag(upper / (upper - lower))
    rows = facets.group == group
    matrix = np.concatenate(
        [
            np.concatenate([facets.outputs[rows], facets.inputs[rows]], 1),
            np.concatenate([-unit, zero], 1),
            np.concatenate([-unit, unit], 1),
            np.concatenate([unit, -slope], 1),
        ]
    )
    right = np.concatenate(
        [-facets.constant[rows], np.zeros(2 * size), -lower * upper / (upper - lower)]
    )
    ranges = [*zip(np.zeros(size), upper, strict=True), *zip(lower, upper, strict=True)]
    result = linprog(-goal, matrix, right, bounds=ranges, method="highs")
    assert result.status == 0
    return -result.fun


@pytest.mark.parametrize("size", [2, 3])
def test_all_facets_and_triangles_are_the_hull(size: int) -> None:
    rng = np.random.default_rng(4)
    lower, upper, offsets = images(rng, 6, size)
    facets = hull_constraints(lower, upper, offsets)
    loose = 0
    for g in range(len(lower)):
        points = np.array(exact_vertices(lower[g], upper[g], offsets[g]), float)
        lifted = np.concatenate([np.maximum(points, 0), points], 1)
        nothing = facets[np.zeros(len(facets), bool)]
        for _ in range(8):
            goal = rng.normal(size=2 * size)
            true = (lifted @ goal).max()
            found = largest(goal, facets, g, lower[g], upper[g])
            assert true - 1e-6 <= found <= true + 1e-6
            loose += largest(goal, nothing, g, lower[g], upper[g]) > true + 1e-2
    assert loose > 10


def test_a_known_hull() -> None:
    # h in the box [-1, 1]^2 with |h1 + h2| <= 1 and |h1 - h2| <= 1: y1 + y2 <= 1 cuts best.
    lower, upper = -np.ones((1, 2)), np.ones((1, 2))
    facets = hull_constraints(lower, upper, np.ones((1, 8)))
    goal = np.array([1.0, 1.0, 0.0, 0.0])
    assert largest(goal, facets, 0, lower[0], upper[0]) == pytest.approx(1.0, abs=1e-9)


def test_few_facets_close_most_of_the_gap() -> None:
    rng = np.random.default_rng(5)
    lower, upper, offsets = images(rng, 5, 3)
    all_facets = hull_constraints(lower, upper, offsets)
    chosen = hull_constraints(lower, upper, offsets, most=40, smallest_cut=1e-6)
    assert np.bincount(chosen.group).max() == 40
    outer = np.concatenate([np.zeros_like(directions(3)), directions(3)], 1)
    gaps = []
    for g in range(len(lower)):
        rows = len(outer)
        base = Facets(np.full(rows, g), outer[:, :3], outer[:, 3:], -offsets[g], np.zeros(rows))
        for _ in range(8):
            goal = rng.normal(size=6)
            box, few, every = (
                largest(goal, Facets.join([base, f], 3), g, lower[g], upper[g])
                for f in (base, chosen, all_facets)
            )
            assert every - 1e-7 <= few <= box + 1e-7
            gaps.append((box - few, box - every))
    closed, possible = np.sum(gaps, 0)
    assert possible > 1
    assert closed > 0.9 * possible


def test_facets_on_one_neuron_are_left_out() -> None:
    facets = hull_constraints(*images(np.random.default_rng(6), 5, 3))
    involved = (facets.outputs != 0) | (facets.inputs != 0)
    assert (involved.sum(1) > 1).all()
    largest_coefficient = np.maximum(np.abs(facets.outputs), np.abs(facets.inputs)).max(1)
    assert np.allclose(largest_coefficient, 1)


def test_an_octahedron_that_adds_nothing_to_the_box() -> None:
    """The hull over a box is the product of the triangles: every cut is zero."""
    lower, upper = np.array([[-1.0, -2.0, -0.5]]), np.array([[2.0, 1.0, 0.5]])
    facets = hull_constraints(lower, upper, np.full((1, 26), np.inf), smallest_cut=1e-6)
    assert len(facets) == 0


# --- rounding -----------------------------------------------------------------------------------


def test_vertices_between_the_cells_of_the_grid(monkeypatch) -> None:
    """The corner that a constraint touches is rounded to the grid, away from the constraint.

    The sum of two neurons is below 2, so that cells are twice as wide as in units of one.
    """
    monkeypatch.setattr(hulls, "_normals", lambda _points: np.ones((1, 4)))
    lower, upper = np.full((1, 2), -0.75), np.full((1, 2), 0.75 + 2 * 0.45 * hulls._CELL)
    facets = hull_constraints(lower, upper, np.full((1, 8), np.inf))
    assert len(facets) == 1
    assert_exact(facets, 0, exact_vertices(lower[0], upper[0], hulls.box_offsets(lower, upper)[0]))


@pytest.mark.parametrize("size", [2, 3])
def test_offsets_of_a_box_are_rounded_up(size: int) -> None:
    ends = [1.0, 2.0**-80, 2.0**-160][:size]
    lower, upper = -np.array([ends]), np.array([ends[::-1]])
    for a, found in zip(directions(size), hulls.box_offsets(lower, upper)[0], strict=True):
        exact = sum(
            Fraction(max(c, 0) * high) - Fraction(max(-c, 0) * low)
            for c, low, high in zip(a, lower[0], upper[0], strict=True)
        )
        assert Fraction(found) == exact if np.abs(a).sum() == 1 else Fraction(found) > exact


def test_constants_that_underflow_are_rounded_down() -> None:
    one = np.ones((1, 2))
    for constant in (-0.3, 0.3):
        facets = Facets(np.zeros(1, np.intp), one, one, np.array([constant]), np.zeros(1))
        found = hulls._unscaled(facets, 0, -1074).constant[0]
        assert Fraction(found) < Fraction(constant) * Fraction(2) ** -1074


def test_offsets_worse_than_the_box_are_those_of_the_box() -> None:
    lower, upper, offsets = (t[:1] for t in images(np.random.default_rng(10), 4, 2))
    some = directions(2)[:, 0] > 0
    worse = np.where(some, 10 * hulls.box_offsets(lower, upper), offsets)
    nothing = np.where(some, np.inf, offsets)
    found, expected = (hull_constraints(lower, upper, offsets) for offsets in (worse, nothing))
    assert len(found) > 0
    for name, values in vars(found).items():
        assert np.array_equal(values, getattr(expected, name)), name


# --- failures of the geometry ---------------------------------------------------------------


def test_qhull_failures_leave_a_group_without_constraints(monkeypatch) -> None:
    def fail(*_args, **_kwargs):
        raise scipy.spatial.QhullError("topology error")

    monkeypatch.setattr(scipy.spatial, "ConvexHull", fail)
    assert len(hull_constraints(*images(np.random.default_rng(7), 3, 3))) == 0


def test_joggled_input_is_the_last_resort(monkeypatch) -> None:
    group = tuple(t[:1] for t in images(np.random.default_rng(8), 3, 2))
    original = scipy.spatial.ConvexHull
    options = []

    def fail_first(points, qhull_options):
        options.append(qhull_options)
        if qhull_options != "QJ":
            raise scipy.spatial.QhullError("topology error")
        return original(points, qhull_options=qhull_options)

    monkeypatch.setattr(scipy.spatial, "ConvexHull", fail_first)
    monkeypatch.setattr(hulls, "_by_trial", lambda _points: None)
    facets = hull_constraints(*group)
    assert options == ["Qx", "Qx", "QJ"]
    assert len(facets) > 3
    assert_exact(facets, 0, exact_vertices(*(t[0] for t in group)))


def test_wrong_normals_still_give_constraints_that_hold(monkeypatch) -> None:
    rng = np.random.default_rng(9)
    group = tuple(t[:1] for t in images(rng, 3, 2))
    monkeypatch.setattr(hulls, "_normals", lambda _points: rng.normal(size=(30, 4)))
    facets = hull_constraints(*group)
    assert len(facets) == 30
    assert_exact(facets, 0, exact_vertices(*(t[0] for t in group)))


def test_flat_and_empty_octahedra() -> None:
    lower, upper = -np.ones((2, 2)), np.ones((2, 2))
    offsets = hulls.box_offsets(lower, upper)
    table = directions(2)
    flat = (np.abs(table) == 1).all(1) & (table.sum(1) == 0)  # h1 - h2 and h2 - h1
    offsets[0, flat] = 0.0
    offsets[1, flat] = -0.5  # h1 - h2 <= -0.5 and h2 - h1 <= -0.5
    facets = hull_constraints(lower, upper, offsets)
    assert exact_vertices(lower[1], upper[1], offsets[1]) == []
    assert not (facets.group == 1).any()
    assert_exact(facets, 0, exact_vertices(lower[0], upper[0], offsets[0]))
