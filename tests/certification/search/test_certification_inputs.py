"""Branch and bound over the inputs: exact answers, and what it is made of in fractions."""

from __future__ import annotations

import math
import random
import time
from fractions import Fraction

import pytest
import torch
from effort import mostly_slow
from instances import draw_instance
from test_certification_exact import check, targets
from torch import Tensor, nn

import tightrope as tr
from tightrope.answer import Answer, Cause, Verdict
from tightrope.box import Box
from tightrope.certification.problem import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refuter
from tightrope.certification.search.box_pool import BoxPool
from tightrope.certification.search.clipping import Boxes, clip, divisible, halve
from tightrope.certification.search.combining import combine
from tightrope.certification.search.inputs import (
    InputSearch,
    InputSettings,
    input_search,
    suits_input_splits,
)
from tightrope.certification.subjects import ATTACK, Subject
from tightrope.deadline import Deadline
from tightrope.domains.boxes.bounding import RowBounds, box_bounder, smallest_values

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = InputSettings(limit=4000)


def search(subject: Subject, problem: Problem, settings: InputSettings = FEW) -> Answer:
    unsafe = problem.unsafe
    bounder = box_bounder(subject.exact, problem.outer, unsafe.matrix, unsafe.offset)
    refuter = problem.refuter(subject)
    return InputSearch(bounder, problem.outer, unsafe.group, refuter, settings=settings).run(
        float("inf")
    )


@pytest.mark.parametrize("part", mostly_slow(range(24), 4))
def test_input_splits_are_exact(part: int) -> None:
    counts = {"verified": 0, "falsified": 0, "unknown": 0}
    for seed in range(6 * part, 6 * part + 6):
        instance = draw_instance(seed, most=32)
        for target in targets(instance, seed):
            problem = instance.problem(target - instance.minima)
            verdict = check(instance, problem, target, search(instance.subject, problem))
            counts[verdict] += 1
            # What a few thousand boxes leave open is next to zero.
            if verdict == "unknown":
                assert abs(float(target.min())) <= 1e-4 * instance.scale
    assert counts["verified"] >= 15 and counts["falsified"] >= 15 and counts["unknown"] <= 6


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, nn.LeakyReLU])
def test_other_activations_are_decided(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 6), activation(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        module[0].weight.mul_(4)
    subject = Subject.of(module, (2,))
    box = Box(torch.full((1, 2), -1.0).double(), torch.ones(1, 2).double())
    grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 201, dtype=torch.float64)] * 2)
    lowest = float(subject.outputs(grid).min())
    for shift, verdict in ((0.02, Verdict.VERIFIED), (-0.02, Verdict.FALSIFIED)):
        offset = torch.tensor([shift - lowest], dtype=torch.float64)
        unsafe = Unsafe(torch.ones(1, 1).double(), offset, torch.tensor([0]))

        def fails(point: Tensor, offset: Tensor = offset) -> bool:
            return float(subject.outputs(point[None])[0] + offset) <= 0

        found = search(subject, Problem(box, box, unsafe, fails))
        assert found.verdict is verdict, found.reason
        if found:
            assert found.bound is not None and 0 < found.bound <= shift + 1e-9


def small_problem(margin: float) -> tuple[Subject, Problem]:
    """Return |x| + |y| + margin > 0 on a square around zero, as a problem."""
    module = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        module[2].weight.fill_(1.0)
        module[2].bias.fill_(margin)
    subject = Subject.of(module, (2,))
    box = Box(torch.full((1, 2), -1.0).double(), torch.full((1, 2), 0.75).double())
    unsafe = Unsafe(torch.ones(1, 1).double(), torch.zeros(1).double(), torch.tensor([0]))
    fails = lambda point: float(subject.outputs(point[None])[0]) <= 0  # noqa: E731
    return subject, Problem(box, box, unsafe, fails)


def test_limits_end_the_search_with_what_is_known() -> None:
    subject, problem = small_problem(0.0)  # attained at zero, and no proof comes about
    blind = Problem(problem.outer, problem.inner, problem.unsafe, lambda point: False)
    found = search(subject, blind, InputSettings(limit=50))
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.MEMORY
    assert found.subproblems >= 50 and found.bound is not None and found.bound <= 0
    started = input_search(subject, blind)
    first = started.begin()
    assert first.subproblems == 1 and first.bound is not None and first.bound <= 0
    late = started.run(time.monotonic() - 1)
    assert late.cause is Cause.TIME and late.subproblems == 1


def test_a_full_pool_goes_into_depth() -> None:
    subject, problem = small_problem(1e-4)
    found = search(subject, problem, InputSettings(limit=4000, memory=1, least=1, most=2))
    assert found.verdict is Verdict.VERIFIED


def test_a_box_that_is_a_point() -> None:
    subject, problem = small_problem(1.0)
    point = problem.outer.upper
    alone = Problem(Box(point, point), Box(point, point), problem.unsafe, problem.fails)
    assert suits_input_splits(subject, alone)
    assert search(subject, alone).verdict is Verdict.VERIFIED
    subject, problem = small_problem(-2.0)
    alone = Problem(Box(point, point), Box(point, point), problem.unsafe, problem.fails)
    assert search(subject, alone).verdict is Verdict.FALSIFIED
    blind = Problem(Box(point, point), Box(point, point), problem.unsafe, lambda point: False)
    assert search(subject, blind).cause is Cause.TOO_CLOSE
    # A group of several rows: there is no input on which their combination could depend.
    unsafe = Unsafe(*(torch.cat((t, t)) for t in vars(problem.unsafe).values()))
    several = Problem(Box(point, point), Box(point, point), unsafe, lambda point: False)
    assert search(subject, several).cause is Cause.TOO_CLOSE


def test_numbers_that_are_not_finite_prove_nothing() -> None:
    subject, problem = small_problem(1.0)
    broken = Subject(subject.graph.map_tensors(lambda t: t * torch.nan), subject.run)
    blind = Problem(problem.outer, problem.inner, problem.unsafe, lambda point: False)
    found = search(broken, blind, InputSettings(limit=30))
    assert found.verdict is Verdict.UNKNOWN and found.cause is Cause.MEMORY


# --- what it is made of -------------------------------------------------------------------------


def random_boxes(count: int, inputs: int, generator: torch.Generator) -> Boxes:
    """Return boxes of all sizes, some of them without width in some coordinates."""
    lower = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    width = torch.rand(count, inputs, generator=generator, dtype=torch.float64)
    width = width * 10.0 ** torch.randint(-18, 3, (count, 1), generator=generator)
    width[torch.rand(count, inputs, generator=generator) < 0.2] = 0.0
    return Boxes(lower, lower + width, torch.ones(count, 1, dtype=torch.bool))


def corners_and_more(lower: Tensor, upper: Tensor, generator: torch.Generator) -> Tensor:
    share = torch.rand(20, len(lower), generator=generator, dtype=torch.float64)
    share[:10] = share[:10].round()
    return (lower + share * (upper - lower)).clamp(lower, upper)


@pytest.mark.parametrize("seed", range(5))
def test_halves_cover_the_box_and_nothing_else(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes = random_boxes(50, 3, generator)
    huge = Boxes(
        -torch.full((1, 3), 1.7e308, dtype=torch.float64),
        torch.full((1, 3), 1.7e308, dtype=torch.float64),
        boxes.open[:1],
    )
    tiny = torch.full((1, 3), 5e-324, dtype=torch.float64)
    for some in (
        boxes,
        huge,
        Boxes(-tiny, tiny, boxes.open[:1]),
        Boxes(tiny, 2 * tiny, boxes.open[:1]),
    ):
        coordinate = torch.randint(3, (len(some),), generator=generator)
        halves = halve(some, coordinate)
        first, second = halves[: len(some)], halves[len(some) :]
        rows = torch.arange(len(some))
        for half in (first, second):
            assert (half.lower >= some.lower).all() and (half.upper <= some.upper).all()
            assert (half.lower <= half.upper).all()
        assert (first.upper[rows, coordinate] == second.lower[rows, coordinate]).all()
        assert (first.lower == some.lower).all() and (second.upper == some.upper).all()
        others = torch.ones_like(some.lower, dtype=torch.bool)
        others[rows, coordinate] = False
        assert (first.upper == some.upper)[others].all() and (second.lower == some.lower)[
            others
        ].all()
        smaller = (first.upper < some.upper)[rows, coordinate] & (second.lower > some.lower)[
            rows, coordinate
        ]
        assert (smaller == divisible(some)[rows, coordinate]).all()


def linear_bounds(boxes: Boxes, rows: int, generator: torch.Generator) -> RowBounds:
    """Return linear functions that are about zero somewhere in their boxes."""
    count, inputs = boxes.lower.shape
    slope = torch.randn(count, rows, inputs, generator=generator, dtype=torch.float64)
    slope = slope * 10.0 ** torch.randint(-12, 6, (count, 1, 1), generator=generator)
    slope[torch.rand(count, rows, inputs, generator=generator) < 0.1] = 0.0
    share = torch.rand(count, rows, inputs, generator=generator, dtype=torch.float64)
    point = boxes.lower[:, None] + share * (boxes.upper - boxes.lower)[:, None]
    constant = -(slope * point).sum(2)
    lower = smallest_values(slope, constant, boxes.lower, boxes.upper)
    return RowBounds(slope, constant, lower, slope.abs(), torch.zeros(count, dtype=torch.long))


def exact_rows(bounds: RowBounds, box: int, point: Tensor) -> list[Fraction]:
    exact = [Fraction(t) for t in point.tolist()]
    found = []
    for slope, constant in zip(
        bounds.slope[box].tolist(), bounds.constant[box].tolist(), strict=True
    ):
        if not math.isfinite(constant):
            found.append(Fraction(-(10**400)))
            continue
        terms = (Fraction(a) * x for a, x in zip(slope, exact, strict=True))
        found.append(sum(terms, Fraction(constant)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_clips_keep_every_counterexample(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes = random_boxes(60, 3, generator)
    boxes = Boxes(boxes.lower, boxes.upper, torch.rand(60, 2, generator=generator) < 0.7)
    members = torch.tensor([[0, 1], [2, 2]])
    bounds = linear_bounds(boxes, 3, generator)
    clipped = clip(boxes, bounds, members)
    assert not (clipped.open & ~boxes.open).any()
    assert (clipped.lower >= boxes.lower).all() and (clipped.upper <= boxes.upper).all()
    shrunk = kept = 0
    for b in range(60):
        for point in corners_and_more(boxes.lower[b], boxes.upper[b], generator):
            rows = exact_rows(bounds, b, point)
            for g in boxes.open[b].nonzero()[:, 0].tolist():
                if any(rows[r] > 0 for r in members[g].tolist()):
                    continue
                kept += 1
                assert clipped.open[b, g]
                assert (clipped.lower[b] <= point).all() and (point <= clipped.upper[b]).all()
        shrunk += int((clipped.upper - clipped.lower < boxes.upper - boxes.lower)[b].any())
    assert kept > 50 and shrunk > 4


@pytest.mark.parametrize("seed", range(3))
def test_a_clip_ends_where_the_line_is_zero(seed: int) -> None:
    """The cut is within rounding of the exact one, and never inside of it."""
    generator = random.Random(seed)
    slope, lower, upper = generator.uniform(0.1, 9), -generator.random(), generator.random()
    constant = -slope * (lower + 0.3 * (upper - lower))
    boxes = Boxes(
        *(torch.tensor([[t]], dtype=torch.float64) for t in (lower, upper)), torch.ones(1, 1).bool()
    )
    number = lambda t: torch.tensor([[t]], dtype=torch.float64)  # noqa: E731
    nothing = torch.zeros(1, dtype=torch.long)
    bounds = RowBounds(
        number(slope)[None], number(constant), number(0.0), number(0.0)[None], nothing
    )
    found = clip(boxes, bounds, torch.tensor([[0]]))
    exact = -Fraction(constant) / Fraction(slope)
    assert 0 <= Fraction(float(found.upper)) - exact < 2e-9 / slope + 1e-15


@pytest.mark.parametrize("seed", range(5))
def test_combinations_lie_below_the_largest_row(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes = random_boxes(40, 3, generator)
    still = torch.rand(40, 2, generator=generator) < 0.8
    members = torch.tensor([[0, 1, 2], [2, 3, 2]])
    bounds = linear_bounds(boxes, 4, generator)
    wider = combine(bounds, boxes.lower, boxes.upper, still, members)
    assert wider.slope.shape[1] == 6
    assert (wider.lower[:, 4:][~still] == -torch.inf).all()
    better = 0
    for b, g in still.nonzero().tolist():
        best = float(bounds.lower[b, members[g]].max())
        better += float(wider.lower[b, 4 + g]) > best + 1e-12 * abs(best)
        for point in corners_and_more(boxes.lower[b], boxes.upper[b], generator)[8:12]:
            rows = exact_rows(wider, b, point)
            assert rows[4 + g] <= max(rows[r] for r in members[g].tolist())
    assert better > 5


def test_the_pool_takes_the_lowest_or_the_highest() -> None:
    bound = torch.tensor([3.0, 1.0, 2.0])
    boxes = Boxes(bound[:, None], bound[:, None] + 1, torch.ones(3, 1, dtype=torch.bool))
    pool = BoxPool(boxes[:2], bound[:2])
    pool.add(boxes[2:], bound[2:])
    assert pool.lowest == 1.0 and len(pool) == 3 and pool.bytes > 0
    assert pool.take(1, deep=False).lower.tolist() == [[1.0]]
    assert pool.take(1, deep=True).lower.tolist() == [[3.0]]
    assert pool.take(5, deep=False).lower.tolist() == [[2.0]] and not len(pool)


# --- probes -------------------------------------------------------------------------------------


class Needle(nn.Module):
    """Minus one but on a small square, where it is one; in between there is no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        near = torch.relu(1 - 40 * torch.relu((x - 0.3).abs().amax(1, keepdim=True) - 0.01))
        return near.clamp(max=1.0) * 2 - 1


def probing(network: nn.Module, inner: Box) -> Refuter:
    subject = Subject.__new__(Subject)
    subject.input_shape = (2,)
    subject.__dict__.update(attacked=network, neurons=10, work=10, device=torch.device("cpu"))
    unsafe = Unsafe(-torch.ones(1, 1).double(), torch.zeros(1).double(), torch.tensor([0]))
    return Refuter(subject, inner, unsafe, lambda point: float(network(point[None])) >= 0)


def test_probes_find_what_has_no_gradient() -> None:
    inner = Box(torch.zeros(1, 2), torch.ones(1, 2))
    torch.manual_seed(0)
    point = probing(Needle(), inner).probe(4096)
    assert point is not None and float(Needle()(point[None])) >= 0
    assert bool(inner.contains(point[None])[0])


def test_moves_along_single_coordinates_climb_where_signs_are_flat() -> None:
    class Stairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.98 - (20 * (x - 0.777).abs()).ceil().amax(1, keepdim=True) / 20

    inner = Box(torch.zeros(1, 2), torch.ones(1, 2))
    torch.manual_seed(0)
    steep = lambda x: Stairs()(x) - 0.9 + 0 * x.sum(1, keepdim=True)  # noqa: E731
    point = probing(steep, inner).probe(2)  # type: ignore[arg-type]
    assert point is not None


def test_probes_look_at_no_more_points_at_once_than_fit() -> None:
    seen = []

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x.square().sum(1, keepdim=True) * 0 - 1

    refuter = probing(Flat(), Box(torch.zeros(1, 2), torch.ones(1, 2)))
    refuter.subject.__dict__["neurons"] = ATTACK // 200
    assert 1 < refuter.subject.points_at_once < 50
    assert refuter.probe(300, deadline=Deadline.after(60.0)) is None
    assert sum(seen) > 2 * 4 * 256  # points, and moves of 256 of them
    assert max(seen) <= refuter.subject.points_at_once


@pytest.mark.parametrize("inputs", [8, 300])
def test_boxes_of_many_inputs_are_not_probed(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have too many directions, whatever users choose to split."""
    probed = []

    def noted(self: Refuter, count: int, **_: object) -> None:
        probed.append(count)

    monkeypatch.setattr(Refuter, "probe", noted)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.rand(inputs, dtype=torch.float64)
    asked = tr.linear([1.0, 0.0], -float(module(x)[0].detach()) - 1e-3)  # false at x
    found = tr.verify(module, box=(x - 1e-4, x + 1e-4), spec=asked, split="input", timeout=20.0)
    assert found.verdict == "falsified"
    assert bool(probed) == (inputs == 8)


@pytest.mark.parametrize("margin", [0.05, -0.05])
def test_rows_that_groups_share_are_bounded_once(margin: float) -> None:
    """Two groups have a row in common that is never positive; each is decided by its other one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    subject = Subject.of(module, (2,))
    box = Box(-torch.ones(1, 2).double(), torch.ones(1, 2).double())
    outputs = subject.outputs(box.sample(4000)[0])
    matrix = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    lowest = outputs.amin(0).tolist()
    offset = torch.tensor([0.05 - lowest[0], -1.0, margin - lowest[1], -1.0], dtype=torch.float64)
    unsafe = Unsafe(matrix, offset, torch.tensor([0, 0, 1, 1]))

    def fails(point: Tensor) -> bool:
        rows = matrix @ subject.outputs(point[None])[0] + offset
        return bool((rows.view(2, 2) <= 0).all(1).any())

    problem = Problem(box, box, unsafe, fails)
    found = input_search(subject, problem)
    assert found.rows == 3
    answer = found.run(float("inf"))
    assert answer.verdict is (Verdict.VERIFIED if margin > 0 else Verdict.FALSIFIED)
    assert search(subject, problem).verdict is answer.verdict
