"""Searches that take turns: exact answers however short the turns, and formulas as networks."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
import torch
from effort import mostly_slow
from test_certification_exact import agree
from torch import nn

import tightrope as tr
from tightrope.answer import Answer, Cause, falsified, undecided, verified
from tightrope.certification.complete import bound_nodes
from tightrope.certification.problem import OpenProblem
from tightrope.certification.search import turns
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.search.inputs import input_search
from tightrope.certification.search.turns import Turns
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.reduced.reduction import reduce

pytestmark = pytest.mark.usefixtures("one_thread")


def searches_in_turns(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
    """Both searches in turns, the first ones shorter than a round."""
    problem, unsafe = opened.problem, opened.problem.unsafe
    reduced = reduce(bound_nodes(subject, opened), unsafe.matrix, unsafe.offset)
    poor = SearchSettings(root_iterations=2, iterations=3, smallest_batch=2)
    search = BranchAndBound(reduced, unsafe.group, problem.refuter(subject), settings=poor)
    return Turns(search, lambda: input_search(subject, problem, opened.nodes)).run(deadline.end)


@pytest.mark.parametrize("part", mostly_slow(range(20), 2))
def test_searches_that_take_turns_are_exact(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FIRST", 1e-5)
    counts = agree(searches_in_turns, range(40_000 + 5 * part, 40_005 + 5 * part), most=32)
    assert sum(counts.values()) == 50
    assert counts["verified"] >= 8 and counts["falsified"] >= 8 and counts["unknown"] <= 6


class Clockwork:
    """A search that takes so many seconds, of which it remembers those that it had."""

    def __init__(self, seconds: float, answer: Answer) -> None:
        self.left, self.answer, self.ends = seconds, answer, []

    def run(self, deadline: float) -> Answer:
        """Let the time pass."""
        now = time.monotonic()
        self.ends.append(deadline - now)
        self.left -= deadline - now
        return undecided(Cause.TIME, subproblems=1) if self.left > 0 else self.answer


@pytest.mark.parametrize("answer", [verified(1.0, 5), falsified(torch.zeros(1), 5)])
def test_either_one_may_decide(answer: Answer) -> None:
    for first, second in ((1.0, math.inf), (math.inf, 1.0)):
        one, other = Clockwork(first, answer), Clockwork(second, answer)
        found = Turns(one, lambda other=other: other).run(time.monotonic() + 10.0)
        assert found.verdict is answer.verdict and found.subproblems >= 5
        lengths = [end for pair in itertools.zip_longest(one.ends, other.ends) for end in pair]
        lengths = [end for end in lengths if end is not None]
        wanted = [0.5, 0.5, 1.0, 1.0, 2.0, 2.0]
        assert lengths == pytest.approx(wanted[: len(lengths)], abs=0.1)


def test_who_is_at_its_end_leaves_the_time_to_the_other() -> None:
    for tired in (0, 1):
        full = Clockwork(0.1, undecided(Cause.MEMORY, subproblems=3))
        other = Clockwork(9.0, verified(1.0, 4))
        pair = (full, other) if tired == 0 else (other, full)
        found = Turns(pair[0], lambda pair=pair: pair[1]).run(time.monotonic() + 10.0)
        assert bool(found) and len(full.ends) == 1


def test_without_a_second_one_the_first_says_how_far_it_came() -> None:
    one = Clockwork(math.inf, verified(1.0))
    found = Turns(one, lambda: None).run(time.monotonic() + 1.0)
    assert found.cause is Cause.TIME


def formula(variables: int, clauses: int, seed: int) -> list[tuple[int, ...]]:
    """Return clauses that cannot all hold: the leaves of a tree of decisions."""
    generator, leaves = random.Random(seed), [()]
    while len(leaves) < clauses:
        leaf = leaves.pop(generator.randrange(len(leaves)))
        free = [j for j in range(1, variables + 1) if j not in map(abs, leaf)]
        chosen = generator.choice(free)
        leaves += [(*leaf, chosen), (*leaf, -chosen)]
    return leaves


def encoded(clauses: list[tuple[int, ...]], variables: int) -> nn.Module:
    """Return a network of two outputs: violated clauses, and how far inputs are from 0 and 1."""
    count = len(clauses)
    first, last = nn.Linear(variables, count + 2 * variables), nn.Linear(count + 2 * variables, 2)
    weight, bias = torch.zeros_like(first.weight), torch.zeros_like(first.bias)
    for k, clause in enumerate(clauses):
        bias[k] = 1 - sum(literal < 0 for literal in clause)
        for literal in clause:
            weight[k, abs(literal) - 1] = -1 if literal > 0 else 1
    names = torch.arange(variables)
    weight[count + names, names] = 1
    weight[count + variables + names, names] = 2
    bias[count + variables :] = -1
    out = torch.zeros_like(last.weight)
    out[0, :count], out[1, count : count + variables], out[1, count + variables :] = 1, 1, -1
    with torch.no_grad():
        first.weight.copy_(weight), first.bias.copy_(bias)
        last.weight.copy_(out), last.bias.zero_()
    return nn.Sequential(first, nn.ReLU(), last)


def test_formulas_are_decided_by_cutting_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that clipping shrinks are bounded again before they are cut: unit propagation."""
    net = encoded(formula(40, 200, 0), 40)
    box, zero = (torch.zeros(40), torch.ones(40)), torch.zeros(1)
    spec = tr.linear(torch.tensor([[1.0, 0.0]]), zero) | tr.linear(torch.tensor([[0.0, 1.0]]), zero)
    found = tr.verify(net, box=box, spec=spec, split="input", timeout=60.0)
    assert bool(found) and found.subproblems < 3000
    monkeypatch.setattr(turns, "FIRST", 1e-3)  # by itself the other search does not get there
    found = tr.verify(net, box=box, spec=spec, timeout=60.0)
    assert bool(found)
