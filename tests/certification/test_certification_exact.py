"""Complete methods against the exact minimum, which is found by trying all activation patterns."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from effort import mostly_slow
from handmade import network, records
from instances import Instance, draw_instance
from patterns import exact_minimum
from torch import Tensor, nn

from tightrope.answer import Answer
from tightrope.box import Box
from tightrope.certification.cascade import solve
from tightrope.certification.complete import bound_nodes, branch_and_bound, mixed_integer_program
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.problem import OpenProblem, Problem
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.refutation import Refuter
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.search.cutting import DUE
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.reduced.reduction import reduce
from tightrope.domains.reduced.splits import Subproblems
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = (0.0, 1e-9, -1e-9, 1e-7, -1e-7, 1e-5, -1e-5)
# Subproblems after which constraints are looked for, in searches that are over after some dozens.
OFTEN = (0, 4, 8, 16, 32, 64, 128)
# Plain float64 arithmetic of the oracle, and what no attack in float64 has to find.
NOISE, TINY = 1e-13, 1e-6


def targets(instance: Instance, seed: int) -> list[Tensor]:
    """Return the minima that the groups shall have: some close to zero, most anywhere."""
    generator = random.Random(seed)
    found = []
    for k in range(10):
        minima = [abs(generator.gauss(0, 0.5)) + 1e-3 for _ in instance.minima]
        chosen = generator.randrange(len(minima))
        near = NEAR[(seed + k) % len(NEAR)] * instance.scale
        minima[chosen] = near if k < 4 else generator.gauss(0, 0.3)
        found.append(torch.tensor(minima, dtype=torch.float64))
    return found


def check(instance: Instance, problem: Problem, target: Tensor, answer: Answer) -> str:
    """Compare an answer with the exact minimum; return the verdict."""
    exact = float(target.min())
    if bool(answer):
        assert answer.counterexample is None
        assert exact > -NOISE * instance.scale, f"verified, but the minimum is {exact}"
        assert 0 < answer.bound <= exact + NOISE * instance.scale
        return "verified"
    if answer.counterexample is not None:
        assert bool(instance.box.contains(answer.counterexample[None])[0])
        assert instance.worst(answer.counterexample, problem.unsafe) <= 0
        assert exact < NOISE * instance.scale, f"falsified, but the minimum is {exact}"
        return "falsified"
    assert answer.reason
    return "unknown"


Method = Callable[[Subject, OpenProblem, Deadline], Answer]


def agree(
    method: Method, seeds: range, *, most: int, single: bool = False, tiny: float = TINY
) -> dict[str, int]:
    """Decide the instances of some seeds and return how often which verdict came.

    A minimum that is not `tiny` must not stay unknown.
    """
    counts = {"verified": 0, "falsified": 0, "unknown": 0}
    for seed in seeds:
        instance = draw_instance(seed, most=most, single=single)
        nothing = torch.zeros_like(instance.minima)
        known = bound_nodes(instance.subject, OpenProblem(instance.problem(nothing))).known(0)
        for target in targets(instance, seed):
            problem = instance.problem(target - instance.minima)
            opened = OpenProblem(problem, nodes=known)
            answer = method(instance.subject, opened, Deadline.after(60.0))
            verdict = check(instance, problem, target, answer)
            counts[verdict] += 1
            if verdict == "unknown":
                assert abs(float(target.min())) <= tiny * instance.scale, (seed, answer)
    return counts


def impatient_search(
    subject: Subject, opened: OpenProblem, deadline: Deadline, cuts: str = "off"
) -> Answer:
    """Branch and bound with poor bounds: it has to split more, and is faster on small networks."""
    problem, unsafe = opened.problem, opened.problem.unsafe
    relaxation = bound_nodes(subject, opened)
    reduced = reduce(relaxation, unsafe.matrix, unsafe.offset)
    refuter = Refuter(subject, problem.inner, unsafe, problem.fails, climbers=2, steps=3)
    poor = SearchSettings(root_iterations=2, iterations=3, smallest_batch=2, cuts=cuts)
    return BranchAndBound(reduced, unsafe.group, refuter, settings=poor).run(deadline.end)


def regional_search(
    subject: Subject, opened: OpenProblem, deadline: Deadline, cuts: str = "off"
) -> Answer:
    """Branch and bound with poor bounds that bounds all neurons again after each split."""
    problem, unsafe = opened.problem, opened.problem.unsafe
    reduced = reduce(bound_nodes(subject, opened), unsafe.matrix, unsafe.offset)
    refuter = Refuter(subject, problem.inner, unsafe, problem.fails, climbers=2, steps=3)
    eager = SearchSettings(
        root_iterations=1, iterations=1, smallest_batch=2, region_depth=1, cuts=cuts
    )
    return BranchAndBound(reduced, unsafe.group, refuter, settings=eager).run(deadline.end)


@pytest.mark.parametrize("part", mostly_slow(range(40), 3))
def test_branch_and_bound_in_regions_is_exact(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DUE, "on", OFTEN)
    search = partial(regional_search, cuts="on" if part % 2 else "off")
    counts = agree(search, range(20_000 + 10 * part, 20_010 + 10 * part), most=32)
    assert sum(counts.values()) == 100
    assert counts["verified"] >= 20 and counts["falsified"] >= 20 and counts["unknown"] <= 10


# 180 networks with ten problems each, most of them among the slow tests, and 20 with more effort.
@pytest.mark.parametrize("part", mostly_slow(range(18), 6))
def test_branch_and_bound_is_exact(part: int) -> None:
    counts = agree(impatient_search, range(10 * part, 10 * part + 10), most=32)
    assert sum(counts.values()) == 100
    assert counts["verified"] >= 20 and counts["falsified"] >= 20 and counts["unknown"] <= 10


@pytest.mark.parametrize("part", mostly_slow(range(30), 3))
def test_branch_and_bound_with_cuts_is_exact(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constraints are chosen anew again and again, and closed subproblems make use of them."""
    used = 0
    monkeypatch.setitem(DUE, "on", OFTEN)
    proved = BranchAndBound._prove

    def watched(
        self: BranchAndBound, bound: Tensor, problems: Subproblems, promising: Tensor
    ) -> tuple[Tensor, Tensor]:
        nonlocal used
        found = proved(self, bound, problems, promising)
        used += int((found[0] & (problems.gamma > 0).any(1)).sum())
        return found

    monkeypatch.setattr(BranchAndBound, "_prove", watched)
    seeds = range(2000 + 10 * part, 2010 + 10 * part)
    counts = agree(partial(impatient_search, cuts="on"), seeds, most=32)
    assert sum(counts.values()) == 100
    assert counts["verified"] >= 20 and counts["falsified"] >= 20 and counts["unknown"] <= 10
    assert used >= 5 or part > 2  # other parts have few networks with pairs of neurons


@pytest.mark.parametrize("part", range(2))
def test_branch_and_bound_with_its_own_settings_is_exact(part: int) -> None:
    counts = agree(branch_and_bound, range(1000 + 10 * part, 1010 + 10 * part), most=32)
    assert sum(counts.values()) == 100
    assert counts["verified"] >= 20 and counts["falsified"] >= 20 and counts["unknown"] <= 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
def test_branch_and_bound_is_exact_on_larger_ones(part: int) -> None:
    counts = agree(branch_and_bound, range(10_000 + 20 * part, 10_020 + 20 * part), most=512)
    assert sum(counts.values()) == 200


@pytest.mark.parametrize("part", range(2))
def test_mixed_integer_programs_are_exact(part: int) -> None:
    """Their groups have one row each: for several they prove the best row only."""
    seeds = range(5000 + 5 * part, 5005 + 5 * part)
    counts = agree(mixed_integer_program, seeds, most=32, single=True)
    assert counts["verified"] >= 5 and counts["falsified"] >= 5


@pytest.mark.parametrize("part", mostly_slow(range(4), 2))
def test_solving_from_beginning_to_end_is_exact(part: int) -> None:
    for seed in range(6000 + 6 * part, 6006 + 6 * part):
        instance = draw_instance(seed, most=32)
        for target in targets(instance, seed)[::3]:
            problem = instance.problem(target - instance.minima)
            found = solve(instance.subject, problem, timeout=60.0)
            assert check(instance, problem, target, found) == found.verdict
            if found.verdict == "unknown":
                assert abs(float(target.min())) <= TINY * instance.scale
            else:
                assert found.stage in DEFAULT_STAGES and not found.reason


# --- through the cascade ------------------------------------------------------------------------

EVERY = ("ibp", "attack", "crown-ibp", "alpha", "bab")


def exact_margin(module: nn.Module, x: Tensor, label: int, eps: Fraction) -> float:
    """Return the worst margin of one sample over its ball."""
    graph = trace(module, tuple(x.shape))
    box = Ball(x[None], eps).outer()
    rows = Unsafe.misclassification(label, graph.output_shape[0], x.device).matrix
    return min(exact_minimum(graph, box, row)[0] for row in rows)


@pytest.mark.parametrize("stages", [EVERY, ("bab",), ("crown-ibp", "alpha"), ("alpha", "milp")])
def test_the_cascade_agrees_with_the_exact_worst_margin(stages: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(len(stages))
    seen = set()
    for seed in range(5):
        torch.manual_seed(seed)
        module = nn.Sequential(
            *(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
        ).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
            x = torch.rand(4, 3, generator=generator)
            labels = module(x).argmax(1).tolist()
        eps = Fraction(1, [100, 20, 10, 5, 3][seed % 5])
        points: dict[int, Tensor] = {}
        for record in records(module, x, labels, eps, stages=stages, points=points):
            exact = exact_margin(module, x[record.index], labels[record.index], eps)
            seen.add(record.verdict)
            if record.verdict == "verified":
                assert exact > 0 and record.margin is not None and record.margin <= exact + 1e-12
            elif record.verdict == "falsified":
                point = points[record.index]
                ball = zip(point.tolist(), x[record.index].tolist(), strict=True)
                assert all(abs(Fraction(a) - Fraction(b)) <= eps and 0 <= a <= 1 for a, b in ball)
                with torch.no_grad():
                    assert int(module(point[None]).argmax()) != record.label
                assert exact < 1e-6
            elif stages[-1] in ("bab", "milp"):
                assert abs(exact) < 1e-5, f"unknown, but the worst margin is {exact}"
            elif record.margin is not None:
                assert record.margin <= exact + 1e-12
    assert {"verified"} < seen


# --- counterexamples that attacks miss ------------------------------------------------------------


def corner_bump(inputs: int, width: float, seed: int) -> tuple[nn.Sequential, list[float]]:
    """Return a network that is constant but for one corner of the unit box, and that corner.

    There, within a distance of `width`, class 1 wins.
    """
    generator = random.Random(seed)
    corner = [generator.choice([0.0, 1.0]) for _ in range(inputs)]
    weight = [1.0 if c else -1.0 for c in corner]
    # The sum of `weight x` is at its largest, the number of ones, in that corner.
    net = network(
        ([weight, [0.0] * inputs], [width - sum(corner), 1.0]),
        ([[-2.0 / width, 1.0], [0.0, 0.0]], [0.0, 0.0]),
    )
    return net, corner


def inner_bump(width: float, place: tuple[float, float]) -> nn.Sequential:
    """Return a network of two inputs where class 1 wins only close to one point.

    `tent(x) = relu(x - p + w) - 2 relu(x - p) + relu(x - p - w)` peaks at p with w; the last
    hidden layer cuts the sum of two tents off at 1.5 w.
    """
    first_weight, first_bias = [], []
    for i, p in enumerate(place):
        for shift in (-width, 0.0, width):
            first_weight.append([1.0 if j == i else 0.0 for j in range(2)])
            first_bias.append(-p - shift)
    tents = [1.0, -2.0, 1.0, 1.0, -2.0, 1.0]
    zeros = [[0.0] * 6] * 5
    return network(
        (first_weight, first_bias),
        ([tents, *zeros], [-1.5 * width, 1.0, -1.0, -1.0, -1.0, -1.0]),
        ([[-4.0 / width, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6], [0.0, 0.0]),
    )


@pytest.mark.parametrize("width", [2.0**-5, 2.0**-10])
@pytest.mark.parametrize("inputs", [2, 6, 20])
def test_a_counterexample_in_a_corner_is_found(inputs: int, width: float) -> None:
    for seed in range(3):
        net, corner = corner_bump(inputs, width, seed)
        x = torch.full((1, inputs), 0.5)
        with torch.no_grad():
            outputs = net(torch.tensor([corner]))[0]
        assert outputs[0] < outputs[1]
        proofs = ("ibp", "crown-ibp", "alpha", "bab")
        (record,) = records(net, x, [0], "1/2", stages=proofs)
        assert (record.verdict, record.stage) == ("falsified", "bab")
        # A little less than the whole box leaves the corner out, and is safe.
        (record,) = records(net, x, [0], "0.46", stages=EVERY)
        assert record.verdict == "verified"


@pytest.mark.parametrize("width", [2.0**-5, 2.0**-10])
def test_a_counterexample_around_one_inner_point_is_found(width: float) -> None:
    generator = random.Random(0)
    for _ in range(3):
        place = (generator.randint(8, 56) / 64, generator.randint(8, 56) / 64)
        net = inner_bump(width, place)
        with torch.no_grad():
            assert int(net(torch.tensor([place])).argmax()) == 1
            assert int(net(torch.tensor([[0.0, 0.0]])).argmax()) == 0
        subject = Subject.of(net, (2,))
        box = Box(torch.zeros(1, 2), torch.ones(1, 2))
        problem = Problem(
            box.map(torch.Tensor.double),
            box,
            Unsafe.misclassification(0, 2, torch.device("cpu")),
            lambda point, net=net: int(net(point[None]).argmax()) != 0,
        )
        answer = branch_and_bound(subject, OpenProblem(problem), Deadline.after(60.0))
        assert not answer and answer.counterexample is not None
        assert (answer.counterexample - torch.tensor(place)).abs().max() < width


def test_without_branching_planted_counterexamples_stay_open() -> None:
    net = inner_bump(2.0**-10, (0.25, 0.625))
    x = torch.full((1, 2), 0.5)
    (record,) = records(net, x, [0], "1/2", stages=("ibp", "attack", "crown-ibp", "alpha"))
    assert record.verdict == "unknown" and record.margin is not None and record.margin < 0
