"""Strict bounds of subproblems where single terms matter, against fractions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from adverse import DIRECTIONS, adverse
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.subproblems import Branches
from tightrope.domains.branches.tightening import tighten
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.graph import trace
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 2.0**-52
EACH_DIRECTION = pytest.mark.parametrize("direction", DIRECTIONS)


def bounder_of(
    activation: nn.Module, row: list[float], *, lower: float, upper: float, offset: float = 0.0
) -> GraphBounder:
    """Return the bounder of one row of many activations of one input each."""
    module = nn.Sequential(nn.Identity(), activation).double()
    graph = trace(module, (len(row),)).detach()
    box = Box(*(torch.full((1, len(row)), t, dtype=torch.float64) for t in (lower, upper)))
    relaxation = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING)
    matrix = torch.tensor([row], dtype=torch.float64)
    return GraphBounder(relaxation, matrix, torch.tensor([offset], dtype=torch.float64))


def problem_of(
    bounder: GraphBounder, *, alpha: float = 0.0, beta: float = 0.0, sign: int = 0
) -> Branches:
    """Return one subproblem; with a sign, the first neuron is split."""
    root = bounder.root(torch.zeros(1, dtype=torch.long))
    root = replace(root, alpha=torch.full_like(root.alpha, alpha))
    if not sign:
        return root
    split = root.split(torch.zeros(1, dtype=torch.long), sign)
    return replace(split, beta=torch.full_like(split.beta, beta))


def strict(bounder: GraphBounder, problem: Branches, direction: str = "nearest") -> Fraction:
    with adverse(direction):
        return Fraction(float(bounder.strict(problem)))


@pytest.mark.parametrize("alpha", [-9.0, -0.5, 0.0, 0.3, 1.0, 1.5, 9.0])
@pytest.mark.parametrize("left", [0.0, 0.25])
def test_slopes_are_moved_back_into_their_limits(alpha: float, left: float) -> None:
    """A row `f(x) + ...` on [-1, 2] is no less than at its ends, whatever slope is tried."""
    bounder = bounder_of(nn.LeakyReLU(left), [1.0], lower=-1.0, upper=2.0)
    bound = strict(bounder, problem_of(bounder, alpha=alpha))
    lines = [max(min(alpha, 1.0), left) * x for x in (-1.0, 2.0)]
    assert bound <= -left
    assert bound <= Fraction(min(lines)) + Fraction(1, 10**12)
    assert bound >= -1 - Fraction(1, 10**12)


@pytest.mark.parametrize("beta", [-5.0, -0.5, 0.0, 0.2, 0.5, 5.0])
@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("left", [0.0, 0.25])
@pytest.mark.parametrize("sign", [1, -1])
def test_multipliers_are_moved_back_into_their_limits(
    beta: float, weight: float, left: float, sign: int
) -> None:
    bounder = bounder_of(nn.LeakyReLU(left), [weight], lower=-1.0, upper=2.0)
    bound = strict(bounder, problem_of(bounder, beta=beta, sign=sign))
    ends = (0.0, 2.0) if sign > 0 else (0.0, -left)
    assert bound <= Fraction(min(weight * y for y in ends))
    if beta <= 0:  # it is the bound without the split's multiplier
        slope = weight * (1.0 if sign > 0 else left)
        assert abs(bound - Fraction(min(slope * x for x in (-1.0, 2.0)))) < Fraction(1, 10**12)


class Copies(nn.Module):
    """Puts a value beside itself, so that many neurons read one input without any long sum."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), 1)


@EACH_DIRECTION
def test_what_many_neurons_add(direction: str) -> None:
    """Each intercept but the first is rounded away beside it."""
    graph = trace(nn.Sequential(*[Copies() for _ in range(9)], nn.ReLU()).double(), (1,)).detach()
    box = Box(*(torch.full((1, 1), t, dtype=torch.float64) for t in (-2.0, 2.0)))
    relaxation = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING)
    row = [-1.0, *[-0.99 * EPS] * 511]
    matrix = torch.tensor([row], dtype=torch.float64)
    bounder = GraphBounder(relaxation, matrix, matrix.new_zeros(1))
    bound = strict(bounder, problem_of(bounder), direction)
    assert bound <= sum((Fraction(w) for w in row), Fraction(0)) * 2


@EACH_DIRECTION
def test_the_sum_with_a_large_offset(direction: str) -> None:
    for offset in (1e16, 3e17, -1e16):
        bounder = bounder_of(nn.ReLU(), [1.0], lower=-1.0, upper=1.0, offset=offset)
        bounder.matrix.fill_(-1 / 3)
        bound = strict(bounder, problem_of(bounder), direction)
        assert bound <= Fraction(-1 / 3) + Fraction(offset)


def test_split_neurons_have_no_intercept() -> None:
    bounder = bounder_of(nn.ReLU(), [-1.0], lower=-1.0, upper=2.0)
    for sign, least in ((1, -2), (-1, 0)):
        bound = strict(bounder, problem_of(bounder, sign=sign))
        assert least - Fraction(1, 10**12) <= bound <= least


def test_chords_are_above() -> None:
    bounder = bounder_of(nn.ReLU(), [-1.0], lower=-1.0, upper=2.0)
    for alpha in (0.0, 1.0):
        bound = strict(bounder, problem_of(bounder, alpha=alpha))
        assert -2 - Fraction(1, 10**12) <= bound <= -2


@EACH_DIRECTION
def test_multipliers_that_nearly_cancel(direction: str) -> None:
    """`left * weight` is rounded, and the multiplier takes almost all of it away."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        left, weight = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        bounder = bounder_of(nn.LeakyReLU(left), [-weight], lower=-1e9, upper=1.0)
        problem = problem_of(bounder, sign=-1)
        problem = replace(problem, beta=torch.full((1, 1), left * weight, dtype=torch.float64))
        bound = strict(bounder, problem, direction)
        # -weight * left * x >= 0 for x <= 0; without rounding, nothing is left of it.
        assert bound <= 0


@EACH_DIRECTION
def test_a_long_minimum(direction: str) -> None:
    """Each product with the input but the first is rounded beside it."""
    row = [1.0, *[1e-30] * 300]
    bounder = bounder_of(nn.ReLU(), row, lower=1.0, upper=2.0)
    bound = strict(bounder, problem_of(bounder), direction)
    assert bound <= sum((Fraction(w) for w in row), Fraction(0))


def test_lines_are_not_rounded() -> None:
    for k in range(1, 9):
        bounder = bounder_of(nn.ReLU(), [-1.0], lower=-0.1 * k, upper=0.3)
        assert strict(bounder, problem_of(bounder)) <= -Fraction(0.3)


def test_neurons_bounded_again_keep_their_range() -> None:
    """`10 relu(x) - 4.5` takes all of [-4.5, 5.5]."""
    first, second = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    with torch.no_grad():
        first.weight.fill_(1.0)
        first.bias.zero_()
        second.weight.fill_(10.0)
        second.bias.fill_(-4.5)
    graph = trace(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), (1,)).detach()
    box = Box(*(torch.full((1, 1), t, dtype=torch.float64) for t in (-1.0, 1.0)))
    relaxation = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING)
    bounder = GraphBounder(relaxation, torch.ones(1, 1).double(), torch.zeros(1).double())
    last = max(bounder.exact.layers)
    (better,) = tighten(bounder, {last: torch.tensor([0])}, iterations=2)
    found = better.relaxation.boxes[graph.nodes[last].inputs[0]]
    assert float(found.lower) <= -4.5 and float(found.upper) >= 5.5
