"""Boxes and lines of functions of one number, against mpmath: no tolerance."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath as mp
import pytest
import torch
from effort import mostly_slow
from function_values import DIGITS, FUNCTIONS, VALUES, exactly
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.curves import function_box
from tightrope.domains.linear.curves import function_lines, parallel_lines
from tightrope.domains.linear.lines import Lines
from tightrope.graph import ops
from tightrope.graph.functions import curve

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = torch.finfo(torch.float64).eps
EVERY = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture(autouse=True)
def _digits() -> object:
    with mp.workdps(DIGITS):
        yield


def intervals(op: ops.Function, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw intervals: ordinary, tiny, huge, subnormal, points, at bends and turning points."""
    generator = torch.Generator().manual_seed(seed)
    shape = curve(op)
    marks = torch.tensor([0.0, *shape.bends, *shape.turns, 20.0], dtype=torch.float64)

    def normal() -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    mark = marks[torch.randint(len(marks), (count,), generator=generator)]
    far = 10 ** (300 * (2 * uniform() - 1))
    small = 10 ** (-16 * uniform())
    kinds = [
        (normal(), normal().abs()),
        (5 * normal(), 10 ** (-12 * uniform())),
        (30 * normal(), 30 * normal().abs()),
        (far, far * uniform()),
        (1e-310 * normal(), 1e-310 * normal().abs()),
        (mark + small * normal(), small),
        (mark + normal().abs() / 2, normal().abs() / 2),
        (1e5 * normal(), 10 ** (3 * uniform())),
        (3 * normal(), torch.zeros(count, dtype=torch.float64)),
    ]
    which = torch.arange(count) % len(kinds)
    center, radius = (torch.stack(t)[which, torch.arange(count)] for t in zip(*kinds, strict=True))
    lower, upper = center - radius, center + radius
    # Mostly where the function has values.
    moved = uniform() < 0.9
    if shape.floor == 0:
        ends = torch.stack((lower.abs(), upper.abs())).sort(0).values
        lower, upper = torch.where(moved, ends[0], lower), torch.where(moved, ends[1], upper)
    if shape.pole is not None:
        hit = (lower <= 0) & (upper >= 0) & moved
        far_end = torch.maximum(lower.abs(), upper.abs())
        lower, upper = torch.where(hit, far_end / 10, lower), torch.where(hit, far_end, upper)
    return lower, upper


def below(slope: Tensor, intercept: Tensor, place: float) -> object:
    """Return the exact value of a line, or minus infinity where there is none."""
    if not math.isfinite(float(intercept)):
        return mp.mpf(float(intercept))
    return mp.mpf(float(slope)) * mp.mpf(place) + mp.mpf(float(intercept))


def places(op: ops.Function, l: float, u: float, generator: torch.Generator) -> list[float]:  # noqa: E741
    """Return points of an interval: its ends and middle, random ones, bends and turns."""
    shape = curve(op)
    inside = [min(max(l + t * (u - l), l), u) for t in torch.rand(6, generator=generator).tolist()]
    marks = [t for t in (*shape.bends, *shape.turns, 20.0, 2.0) if l <= t <= u]
    return [l, u, l / 2 + u / 2, *inside, *marks]


def check(op: ops.Function, lower: Tensor, upper: Tensor, lines: Lines, box: Box) -> int:
    """Compare with exact values; return how many were compared."""
    shape, generator, compared = curve(op), torch.Generator().manual_seed(0), 0
    for i in range(len(lower)):
        l, u = float(lower[i]), float(upper[i])  # noqa: E741
        if not bool(shape.defined(lower[i], upper[i])):
            assert float(box.lower[i]) == -math.inf and float(box.upper[i]) == math.inf
            continue
        for h in places(op, l, u, generator):
            value = exactly(op, h)
            assert mp.mpf(float(box.lower[i])) <= value <= mp.mpf(float(box.upper[i])), (l, u, h)
            assert below(lines.lower_slope[i], lines.lower_intercept[i], h) <= value, (l, u, h)
            assert below(lines.upper_slope[i], lines.upper_intercept[i], h) >= value, (l, u, h)
            compared += 1
    return compared


@EVERY
@pytest.mark.parametrize("seed", mostly_slow(range(40), 1))
def test_boxes_and_lines_hold_exactly(name: str, seed: int) -> None:
    op = FUNCTIONS[name]
    lower, upper = intervals(op, 180, seed)
    lines = function_lines(op, lower, upper, EPS)
    box = function_box(op, Box(lower, upper), rounding=EPS)
    assert check(op, lower, upper, lines, box) > 1000


@EVERY
def test_float32_holds_as_well(name: str) -> None:
    op = FUNCTIONS[name]
    numbers = torch.tensor(op.parameters, dtype=torch.float32).tolist()
    op = replace(op, parameters=tuple(numbers))
    lower, upper = (t.float().clamp(-1e38, 1e38) for t in intervals(op, 180, 1000))
    eps = torch.finfo(torch.float32).eps
    lines = function_lines(op, lower, upper, eps)
    box = function_box(op, Box(lower, upper), rounding=eps)
    assert check(op, lower, upper, lines, box) > 1000


@EVERY
def test_lines_are_close_on_small_intervals(name: str) -> None:
    """Their distance shrinks with the square of the width."""
    op = FUNCTIONS[name]
    middle = torch.tensor([0.3, 0.7, 1.9, 2.6], dtype=torch.float64)
    middle = middle[middle < curve(op).defect_from]
    lower, upper = middle - 1e-3, middle + 1e-3
    lines = function_lines(op, lower, upper, EPS)
    gap = (lines.upper_slope - lines.lower_slope) * middle
    gap = gap + lines.upper_intercept - lines.lower_intercept
    bend = torch.linspace(-1e-3, 1e-3, 201, dtype=torch.float64)[:, None] + middle
    slopes = curve(op).derivative(bend)
    change = slopes.amax(0) - slopes.amin(0)
    assert bool((gap <= 2e-3 * change + 1e-12).all())


@EVERY
def test_parallel_lines_hold(name: str) -> None:
    """In plain arithmetic, for zonotopes."""
    op = FUNCTIONS[name]
    lower, upper = torch.tensor([0.3, 0.1, 1.0, 2.0]).double(), torch.tensor([0.4, 4.0, 1.0, 9.0])
    upper = upper.double()
    slope, low, high = parallel_lines(op, lower, upper)
    at = lower + (upper - lower) * torch.linspace(0, 1, 101).double()[:, None]
    value = curve(op).value(at)
    scale = 1e-9 * (1 + value.abs().amax()) + curve(op).defect
    assert bool((slope * at + low <= value + scale).all())
    assert bool((slope * at + high >= value - scale).all())


@EVERY
def test_curvature_and_turns_are_right(name: str) -> None:
    """The rows' claims, at many points: signs of second and first derivatives, by mpmath."""
    op = FUNCTIONS[name]
    shape = curve(op)
    lowest = 2e-3 if shape.floor == 0 else -12.0
    grid = torch.linspace(lowest, 12.0, 97, dtype=torch.float64) + 1e-3
    tiny = mp.mpf(10) ** -20

    def derivative(x: float, order: int) -> object:
        return mp.diff(lambda t: VALUES[op.name](t, *op.parameters), mp.mpf(x), order)

    checked = set(shape.bends)
    for start, end, sign in shape.pieces(grid, grid):
        signs = torch.as_tensor(sign).expand(97).tolist()
        for x, a, b, s in zip(grid.tolist(), start.tolist(), end.tolist(), signs, strict=True):
            if a == b == x and x not in checked:
                checked.add(x)
                assert s * derivative(x, 2) >= -tiny, x
                assert s or abs(derivative(x, 2)) < tiny
    slopes = [derivative(x, 1) for x in grid.tolist()]
    turns = [t.tolist() for t in shape.turning_points(grid[:-1], grid[1:])]
    changes = 0
    for i, (x, y) in enumerate(zip(grid.tolist(), grid.tolist()[1:], strict=False)):
        if slopes[i] * slopes[i + 1] < 0 and not (shape.pole is not None and x < shape.pole < y):
            assert any(x < t[i] < y for t in turns), (x, y)
            changes += 1
    assert changes >= len(shape.turns)


def test_what_has_no_value_says_nothing() -> None:
    l, u = torch.tensor([-1.0, 0.0, -2.0]).double(), torch.tensor([1.0, 1.0, -1.0]).double()  # noqa: E741
    log = function_box(ops.Function("log"), Box(l, u), rounding=EPS)
    assert log.lower.tolist() == [-math.inf] * 3 and log.upper.tolist()[::2] == [math.inf] * 2
    assert 0 <= float(log.upper[1]) < 1e-12
    pole = function_box(ops.Function("reciprocal"), Box(l, u), rounding=EPS)
    assert pole.lower.tolist()[:2] == [-math.inf] * 2 and pole.upper.tolist()[:2] == [math.inf] * 2
    assert abs(float(pole.lower[2]) + 1) < 1e-12


def test_an_argument_is_never_below_its_least() -> None:
    op = ops.Function("reciprocal", least=1.0)
    l, u = torch.tensor([-5.0, 0.5]).double(), torch.tensor([4.0, 0.75]).double()  # noqa: E741
    box = function_box(op, Box(l, u), rounding=EPS)
    assert bool((box.upper < 1 + 1e-12).all()) and abs(float(box.lower[0]) - 0.25) < 1e-12
    lines = function_lines(op, l, u, EPS)
    assert float(lines.upper_slope[0] * 1.0 + lines.upper_intercept[0]) >= 1.0
    assert float(lines.lower_slope[0] * 4.0 + lines.lower_intercept[0]) <= 0.25
