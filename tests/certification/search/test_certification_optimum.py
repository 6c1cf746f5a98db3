"""Exact worst margins, and the pool that the search keeps its subproblems in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from instances import Instance, draw_instance
from patterns import exact_minimum
from torch import nn

from tightrope.certification.problem import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.optimum import enclose
from tightrope.certification.search.pool import Pool
from tightrope.certification.subjects import Subject
from tightrope.domains.reduced.splits import Subproblems
from tightrope.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5


def rows_alone(instance: Instance) -> Problem:
    """Return the problem with every row in a group of its own."""
    problem = instance.problem(torch.zeros_like(instance.minima))
    unsafe = problem.unsafe
    return replace(problem, unsafe=replace(unsafe, group=torch.arange(len(unsafe.group))))


def exact(subject: Subject, problem: Problem) -> float:
    """Return the smallest row by trying all activation patterns."""
    rows = zip(problem.unsafe.matrix, problem.unsafe.offset.tolist(), strict=True)
    return min(exact_minimum(subject.exact, problem.outer, row, o)[0] for row, o in rows)


@pytest.mark.parametrize("seed", range(24))
def test_the_bracket_holds_the_exact_minimum(seed: int) -> None:
    instance = draw_instance(seed, most=64)
    problem = rows_alone(instance)
    found = enclose(instance.subject, problem, tolerance=TOLERANCE)
    truth = exact(instance.subject, problem)
    noise = 1e-9 * (1 + abs(truth))
    assert found.finished
    assert found.lower <= truth + noise
    assert found.upper >= truth - noise
    assert found.upper - found.lower <= TOLERANCE + noise
    outputs = instance.subject.outputs(found.point[None])[0].double()
    rows = problem.unsafe.matrix @ outputs + problem.unsafe.offset
    assert float(rows.min()) == found.upper
    assert problem.inner.contains(found.point[None]).all()


def test_a_start_point_is_where_the_search_begins() -> None:
    instance = draw_instance(3, most=64)
    problem = rows_alone(instance)
    start = problem.inner.lower
    found = enclose(instance.subject, problem, start=start, tolerance=TOLERANCE)
    again = enclose(instance.subject, problem, tolerance=TOLERANCE)
    assert found.finished and abs(found.upper - again.upper) <= 2 * TOLERANCE


def test_without_time_there_is_no_lower_end() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
    module.append(nn.Linear(40, 2))
    subject = Subject.of(module.double(), (8,))
    instance = draw_instance(0, most=64)
    box = replace(rows_alone(instance)).outer
    lower = torch.zeros(1, 8, dtype=torch.float64)
    wide = type(box)(lower, lower + 1)
    unsafe = Unsafe.misclassification(0, 2, torch.device("cpu"))
    problem = Problem(wide, wide, unsafe, lambda point: False)
    found = enclose(subject, problem, timeout=-1.0)
    assert not found.finished
    assert found.lower == -math.inf and math.isfinite(found.upper)


def test_other_bends_than_relus_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    instance = draw_instance(0, most=64)
    lower = torch.zeros(1, 2, dtype=torch.float64)
    box = type(instance.box)(lower, lower + 1)
    unsafe = Unsafe.misclassification(0, 2, torch.device("cpu"))
    with pytest.raises(UserError, match="ReLU"):
        enclose(Subject.of(module, (2,)), Problem(box, box, unsafe, lambda point: False))


# --- the pool -------------------------------------------------------------------------------------


def problems(numbers: list[int]) -> Subproblems:
    """Return subproblems that can be told apart by their row."""
    row = torch.tensor(numbers)
    wide = row[:, None].expand(-1, 3).float()
    return Subproblems(row, wide.to(torch.int8), wide, wide * 2, wide[:, :0], row * 0)


def test_the_lowest_bounds_leave_first_and_nothing_is_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = Pool(problems([0]), torch.tensor([0.5]))
    bounds, inside, taken = {0: 0.5}, {0}, 0
    for step in range(1, 40):
        new = [step * 10 + k for k in range(step % 7)]
        values = torch.rand(len(new), generator=generator)
        pool.add(problems(new), values)
        bounds.update(zip(new, values.tolist(), strict=True))
        inside.update(new)
        if step % 3 == 0:
            expected = sorted(inside, key=lambda i: bounds[i])[:5]
            found, bound = pool.take(5)
            assert sorted(found.row.tolist(), key=lambda i: bounds[i]) == expected
            assert torch.equal(found.alpha[:, 0], found.row.float())
            assert torch.equal(found.beta[:, 2], 2 * found.row.float())
            assert bound.tolist() == [pytest.approx(bounds[i]) for i in found.row.tolist()]
            inside.difference_update(expected)
            taken += len(expected)
        assert len(pool) == len(inside)
        if inside:
            assert pool.lowest == pytest.approx(min(bounds[i] for i in inside))
    assert taken > 40
    rest, _ = pool.take(1000)
    assert sorted(rest.row.tolist()) == sorted(inside)
    assert len(pool) == 0


def test_peek_leaves_the_pool_as_it_is() -> None:
    pool = Pool(problems([1, 2, 3]), torch.tensor([3.0, 1.0, 2.0]))
    assert pool.peek(2).row.tolist() == [2, 3]
    assert len(pool) == 3
    assert pool.bytes == 3 * (8 + 3 + 12 + 12 + 4 + 8)
