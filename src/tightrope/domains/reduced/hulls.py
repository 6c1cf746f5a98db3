"""Convex hulls of small groups of ReLU neurons, with constraints that hold for every real point.

A group of K neurons has pre-activations h in an octahedron `{h : a h <= d}`, one bound d for
each direction a with coefficients in {-1, 0, 1}. The hull of `{(h, relu(h))}` is described by
inequalities `outputs y + inputs h + constant <= 0`.

Why the constraints are sound. In each closed orthant relu is linear, so a linear function
of (h, relu(h)) has its maximum over the octahedron at a vertex of one of the pieces
`octahedron and orthant`. Such a vertex is where K of the planes `a h = d` and `h_i = 0` meet.
We compute the meeting point of every K planes and keep those in the octahedron within a
tolerance larger than all rounding errors: the kept points include an approximation of
every vertex. Relu moves no two points apart, so the lifted points are as close as the points.
Where the coefficients of a constraint come from (qhull, which may be off or fail) does not
matter then: its constant is set from the largest value at the kept points, plus an allowance
for the errors listed at `_CELL`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from tightrope.deadline import check_time

Floats = NDArray[np.float64]

_EPS = float(np.finfo(np.float64).eps)

# Each group is scaled by a power of two such that |d| < 1 (see `_scaled`). Then, with K <= 3,
# a meeting point is a sum of K offsets times integers of size <= 2, over an integer:
#   2 sums of terms below 6 in total, 1 division:                error <= 8 eps, `solved` below
#   its product with a direction: 2 sums and K solved errors; d + tolerance: 1 sum
#                                 exact vertices are exceeded by <= 24 + 4 eps, kept up to 64 eps
#   rounding to a multiple of _CELL = 256 eps:                    error <= 128 eps
#   evaluating 2 K products with coefficients c:                  error <= 8 eps sum|c|
# Numbers lost to underflow, here or by the scaling, are far below eps. The maximum over
# the exact vertices exceeds the computed one by less than (8 + 128 + 8 + 4) eps sum|c|, the 4
# for adding up allowance and constant: _CELL sum|c| covers it.
_KEPT = 64 * _EPS
_CELL = 256 * _EPS

# Noise in the points makes qhull fail more often than anything else, and a grid of this width,
# in units of the neurons' own ranges, removes it; but it also bends facets, which then come
# in pieces. So the points are tried as they are first.
_COARSE_CELL = 2.0**-30
_NOISE = 1e-9  # coefficients below this (in units of the neurons' ranges) are set to zero
_MANY, _FLAT = 16, 1e-6  # points whose facets are tried out; volumes of simplices that are none


@dataclass(frozen=True)
class Facets:
    """Inequalities `outputs y + inputs h + constant <= 0`, each on the neurons of one group."""

    group: NDArray[np.intp]  # [R], the group each inequality is about
    outputs: Floats  # [R, K]
    inputs: Floats  # [R, K]
    constant: Floats  # [R]
    cut: Floats  # [R], how far it cuts into what single neurons allow, see `_depths`

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Facets:
        """Select inequalities."""
        return Facets(*(values[rows] for values in vars(self).values()))

    @staticmethod
    def join(parts: list[Facets], size: int) -> Facets:
        """Return the inequalities of several lists on groups of `size` neurons as one."""
        empty, none = np.zeros((0, size)), np.zeros(0)
        parts = [Facets(np.zeros(0, np.intp), empty, empty, none, none), *parts]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return Facets(*(np.concatenate(column) for column in columns))


@lru_cache
def directions(size: int) -> Floats:
    """Return all 3^size - 1 directions [., size]: first one of each opposite pair, then the other.

    The second half is the negative of the first, in the same order.
    """
    every = [v for v in product((0.0, 1.0, -1.0), repeat=size) if any(v)]
    half = [v for v in every if next(filter(None, v)) > 0]
    table = np.array(half + [tuple(-x for x in v) for v in half]) + 0.0  # no negative zeros
    table.flags.writeable = False
    return table


def box_offsets(lower: Floats, upper: Floats) -> Floats:
    """Return upper bounds [groups, directions] over the boxes `lower <= h <= upper`, rounded up."""
    table = directions(lower.shape[1])
    most = np.maximum(table, 0) @ upper.T - np.maximum(-table, 0) @ lower.T
    single = np.abs(table).sum(1) == 1
    size = np.maximum(np.abs(lower), np.abs(upper)).sum(1)
    raised = np.where(single[:, None], most, np.nextafter(most + 4 * _EPS * size, np.inf))
    return np.ascontiguousarray(raised.T)


def hull_constraints(
    lower: Floats,
    upper: Floats,
    offsets: Floats,
    *,
    most: int | None = None,
    smallest_cut: float = -np.inf,
    chunk: int = 32,
) -> Facets:
    """Return inequalities that hold at (h, relu(h)) for all h in the groups' octahedra.

    `lower`, `upper`: [groups, K] with `lower < 0 < upper`, finite. `offsets`: upper bounds
    [groups, 3^K - 1] of the `directions`; one that is not finite, or is worse than what the
    box gives, is replaced by the box's. K is 2 or 3. Inequalities on a single neuron are left
    out, and those that cut off less than `smallest_cut`; `most` is the number of inequalities
    per group, those that cut off most. A group whose hull cannot be computed has none.
    """
    size = lower.shape[1]
    if size not in (2, 3):
        raise ValueError(f"groups have 2 or 3 neurons, not {size}")
    box = box_offsets(lower, upper)
    offsets = np.where(np.isfinite(offsets), np.minimum(offsets, box), box)
    parts = []
    for start in range(0, len(lower), chunk):
        check_time()
        scaled, exponents = _scaled(offsets[start : start + chunk])
        for index, points in enumerate(_vertices(scaled)):
            group, scale = start + index, -exponents[index]
            ends = np.ldexp(lower[group], scale), np.ldexp(upper[group], scale)
            facets = _group_facets(points, *ends, most=most, smallest_cut=smallest_cut)
            parts.append(_unscaled(facets, group, exponents[index]))
    return Facets.join(parts, size)


def _scaled(offsets: Floats) -> tuple[Floats, NDArray[np.intc]]:
    """Return the offsets over powers of two that make the largest of each group less than 1."""
    exponents = np.frexp(np.abs(offsets).max(1))[1]
    return np.ldexp(offsets, -exponents[:, None]), exponents


def _unscaled(facets: Facets, group: int, exponent: int) -> Facets:
    # A smaller constant is the weaker inequality: down covers a loss to underflow.
    constant = np.nextafter(np.ldexp(facets.constant, exponent), -np.inf)
    groups = np.full(len(facets), group, np.intp)
    return Facets(groups, facets.outputs, facets.inputs, constant, facets.cut)


# --- vertices -------------------------------------------------------------------------------


@lru_cache
def _meetings(size: int) -> tuple[NDArray[np.intp], Floats, Floats]:
    """Return all choices of K planes that meet in a point: planes, adjugates and determinants.

    Planes are numbered as the directions, followed by the K planes `h_i = 0`. All entries
    are small integers: rounding the result of a numerical inverse makes them exact.
    """
    normals = np.concatenate([directions(size), np.eye(size)])
    planes = np.array(list(combinations(range(len(normals)), size)))
    matrices = normals[planes]
    determinants = np.rint(np.linalg.det(matrices))
    planes, matrices = planes[determinants != 0], matrices[determinants != 0]
    determinants = determinants[determinants != 0]
    adjugates = np.rint(np.linalg.inv(matrices) * determinants[:, None, None])
    identity = np.eye(size) * determinants[:, None, None]
    assert np.array_equal(matrices @ adjugates, identity)
    return planes, adjugates, determinants


def _vertices(offsets: Floats) -> list[Floats]:
    """Return, per group, points on the grid of `_CELL` near all vertices of all pieces."""
    size = 2 if offsets.shape[1] == 8 else 3
    planes, adjugates, determinants = _meetings(size)
    ends = np.concatenate([offsets, np.zeros((len(offsets), size))], 1)[:, planes]
    solved = np.einsum("sij,gsj->gsi", adjugates, ends) / determinants[:, None]
    half = directions(size)[: offsets.shape[1] // 2]
    values = solved @ half.T
    above, below = np.split(offsets[:, None] + _KEPT, 2, axis=2)
    kept = ((values <= above) & (-values <= below)).all(2)
    rounded = np.rint(solved / _CELL)
    return [np.unique(rounded[g][kept[g]], axis=0) * _CELL for g in range(len(offsets))]


# --- facets ---------------------------------------------------------------------------------


def _group_facets(
    points: Floats, lower: Floats, upper: Floats, *, most: int | None, smallest_cut: float
) -> Facets:
    """Return the inequalities of one group, from all its vertices, in scaled units."""
    size = points.shape[1]
    # Powers of two near the neurons' ranges: coordinates of size one without rounding. A range
    # far below the grid of the points is left as it is: nothing is known about it.
    units = np.maximum(np.ldexp(1.0, np.frexp(np.maximum(-lower, upper))[1]), _CELL**2)
    normals = _normals(points / units)
    involved = (normals[:, :size] != 0) | (normals[:, size:] != 0)
    normals = normals[involved.sum(1) > 1]
    chosen, cuts = np.zeros(0, np.intp), np.zeros(0)
    if len(normals):
        depths = _depths(normals, points / units, lower / units, upper / units)
        cuts = depths.max(1)
        chosen = _chosen(depths, cuts, most=most, smallest_cut=smallest_cut)
    coefficients = normals[chosen] / np.tile(units, 2)
    coefficients /= np.abs(coefficients).max(1, keepdims=True)
    constant = np.zeros(0)
    if len(chosen):
        lifted = np.concatenate([np.maximum(points, 0), points], 1)
        reach = (coefficients @ lifted.T).max(1)
        constant = -(reach + _CELL * np.abs(coefficients).sum(1))
    group = np.zeros(len(chosen), np.intp)
    return Facets(group, coefficients[:, :size], coefficients[:, size:], constant, cuts[chosen])


def _normals(points: Floats) -> Floats:
    """Return unit normals (outputs, inputs) of the hull's facets: none if they are not found.

    They are looked for among (|h|, h) instead of (relu(h), h): the same hull in rounder
    coordinates.
    """
    size = points.shape[1]
    coarse = np.unique(np.rint(points / _COARSE_CELL), axis=0) * _COARSE_CELL
    # Joggling the input (QJ) copes with flat and degenerate points.
    for attempt, options, digits in (
        (points, "", 9),
        (points, "Qx", 9),
        (coarse, "Qx", 6),
        (coarse, "QJ", 6),
    ):
        lifted = np.concatenate([np.abs(attempt), attempt], 1)
        outer = _by_qhull(lifted, options) if options else _by_trial(lifted)
        if outer is None:
            continue
        # n |h| + m h = 2 n relu(h) + (m - n) h
        normals = np.concatenate([2 * outer[:, :size], outer[:, size:] - outer[:, :size]], 1)
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), _NOISE)
        normals[np.abs(normals) < _NOISE] = 0
        # A facet with many vertices comes as several simplices.
        _, first = np.unique(np.round(normals, digits), axis=0, return_index=True)
        return np.ascontiguousarray(normals[np.sort(first)])
    return np.zeros((0, 2 * size))


@lru_cache
def _simplices(count: int) -> NDArray[np.intp]:
    """Return all choices of four out of so many points."""
    return np.array(list(combinations(range(count), 4)), np.intp).reshape(-1, 4)


def _by_trial(points: Floats) -> Floats | None:
    """Return normals of the facets of a hull in four dimensions, None if it seems to be flat.

    Of a pair of neurons there are about a dozen points: those four that all others are on one side
    of are found sooner than Qhull is loaded.
    """
    if points.shape[1] != 4 or len(points) > _MANY:
        return None
    simplex = points[_simplices(len(points))]
    edges = simplex[:, 1:] - simplex[:, :1]  # [simplices, 3, 4]
    normals = np.stack(
        [(-1) ** k * _determinants(np.delete(edges, k, axis=2)) for k in range(4)], 1
    )
    length = np.linalg.norm(normals, axis=1)
    solid = length > _FLAT
    normals, simplex = normals[solid] / length[solid, None], simplex[solid]
    values = normals @ points.T - (normals * simplex[:, 0]).sum(1, keepdims=True)
    below, above = (values <= _NOISE).all(1), (values >= -_NOISE).all(1)
    if (below & above).any():
        return None
    outer = np.concatenate([normals[below], -normals[above]])
    return outer if len(outer) else None


def _determinants(matrices: Floats) -> Floats:
    """Return the determinants of matrices of three rows."""
    first, second, third = matrices[:, 0], matrices[:, 1], matrices[:, 2]
    return np.asarray((first * np.cross(second, third)).sum(1))


def _by_qhull(points: Floats, options: str) -> Floats | None:
    """Return normals of the facets of a hull, None if Qhull fails."""
    from scipy.spatial import ConvexHull, QhullError

    try:
        hull = ConvexHull(points, qhull_options=options)
    except (QhullError, ValueError):
        return None
    return np.asarray(hull.equations[np.isfinite(hull.equations).all(1), :-1])


# --- choice of facets -----------------------------------------------------------------------


def _depths(normals: Floats, points: Floats, lower: Floats, upper: Floats) -> Floats:
    """Return how far facets exclude points of the octahedron with single-neuron relaxations.

    The points [facets, points] are the vertices h with each y_i either relu(h_i) or on
    the chord over [l_i, u_i], at least one there. The largest depth of a facet is its cut: for
    given h the best y_i is one of the two, the best value is concave in h and linear in each
    orthant, so it is largest at a vertex. A cut of zero: the facet adds nothing to
    the octahedron and the triangles.
    """
    size = points.shape[1]
    outputs, inputs = normals[:, :size], normals[:, size:]
    relu = np.maximum(points, 0)
    slope = upper / np.maximum(upper - lower, np.finfo(np.float64).tiny)
    rise = np.maximum(slope * (points - lower) - relu, 0)
    exact = outputs @ relu.T + inputs @ points.T
    gaps = exact - exact.max(1, keepdims=True)
    subsets = np.array([s for s in product((0.0, 1.0), repeat=size) if any(s)])
    raised = np.einsum("si,fi,vi->fsv", subsets, outputs, rise, optimize=True)
    return (raised + gaps[:, None]).reshape(len(normals), -1)


def _chosen(
    depths: Floats, cuts: Floats, *, most: int | None, smallest_cut: float
) -> NDArray[np.intp]:
    """Return at most `most` facets, the ones that together exclude most, the best one first.

    The deepest facets of all are alike. Facets are added one by one instead: the one that
    raises the depth at which the points are excluded most, summed over the points.
    """
    deep = np.flatnonzero(cuts >= smallest_cut)
    deep = deep[np.argsort(-cuts[deep], kind="stable")]
    if most is None or len(deep) <= most:
        return deep
    excluded = np.maximum(depths[deep], 0).astype(np.float32)
    excluded = excluded[:, excluded.max(0) > 0]
    covered = np.zeros(excluded.shape[1], np.float32)
    order: list[int] = []
    gains = excluded.sum(1, dtype=np.float64)
    for _ in range(most):
        best = _most_gain(excluded, covered, gains)
        order.append(best)
        gains[best] = -np.inf
        covered = np.maximum(covered, excluded[best])
    return deep[order]


def _most_gain(depths: NDArray[np.float32], covered: NDArray[np.float32], gains: Floats) -> int:
    """Return the row that adds most to `covered`; `gains` are upper bounds, brought up to date.

    A row's gain never grows while others are added, so old gains rule out most rows.
    """
    while True:
        block = np.argsort(-gains)[:16]
        fresh = np.maximum(depths[block] - covered, 0).sum(1, dtype=np.float64)
        gains[block] = np.where(np.isfinite(gains[block]), np.minimum(fresh, gains[block]), -np.inf)
        best = int(block[np.argmax(gains[block])])
        if gains[best] >= gains.max():
            return best
