"""No stage verifies what is not so, even in floating-point arithmetic at its worst."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from adverse import adverse
from exact import exact_values
from handmade import records
from torch import nn

from tightrope.box import Box
from tightrope.certification.cascade import solve
from tightrope.certification.complete import bound_nodes, branch_and_bound
from tightrope.certification.problem import Choices, OpenProblem, Problem, robustness
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 200
EPS = Fraction(1, 2**60)


def nearly_robust(excess: float) -> nn.Sequential:
    """`o_0 - o_1` is the sum of 200 inputs less 1, and the excess."""
    layer = nn.Linear(COUNT, 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [0.0]]).expand(2, COUNT))
        layer.bias.copy_(torch.tensor([excess, 1.0]))
    return nn.Sequential(layer, nn.Identity())


def sample() -> torch.Tensor:
    """One input is 1; the others are nothing beside it, and the radius is even less."""
    x = torch.full((1, COUNT), 2.0**-58, dtype=torch.float64)
    x[0, 0] = 1.0
    return x


ALMOST = -(2.0**-50)


def least_margin(excess: float) -> Fraction:
    """Return the least margin over the ball."""
    return sum((Fraction(v) - EPS for v in sample()[0].tolist()), Fraction(excess) - 1)


@pytest.mark.parametrize("stage", ["ibp", "crown-ibp", "alpha", "bab"])
def test_a_margin_just_below_zero_is_not_verified(stage: str) -> None:
    """Rounding up 200 times makes it 2^-45."""
    x = sample()
    assert -Fraction(1, 2**50) < least_margin(ALMOST) < 0
    with adverse("up"):
        (record,) = records(nearly_robust(ALMOST), x, [0], EPS, stages=(stage,))
    assert record.verdict != "verified"
    # With a little more it is robust, and rounding is no excuse.
    (record,) = records(nearly_robust(2.0**-30), x, [0], EPS, stages=(stage,))
    assert record.verdict == "verified"


def test_a_search_alone_does_not_verify_it_either() -> None:
    """With bounds that are known already, and without."""
    subject = Subject.of(nearly_robust(ALMOST), (COUNT,))
    (problem,) = robustness(subject, Ball(sample(), EPS), torch.tensor([0]))
    with adverse("up"):
        known = bound_nodes(subject, OpenProblem(problem)).known(0)
        for nodes in (None, known):
            opened = OpenProblem(problem, nodes=nodes)
            assert not branch_and_bound(subject, opened, Deadline.after(10.0))


def with_tiny_factor(mean: float, weight: float, sign: float) -> Subject:
    """Return `sign (w x - mean) f` with a factor f of one and a half of the smallest number."""
    first, norm, last = nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1)
    module = nn.Sequential(first, norm, last).double().eval()
    with torch.no_grad():
        for layer, value in ((first, weight), (last, sign)):
            layer.weight.fill_(value)
            layer.bias.zero_()
        norm.weight.fill_(3 * 5e-324)
        norm.running_var.fill_(4.0)
        norm.running_mean.fill_(mean)
    return Subject.of(module, (1,))


@pytest.mark.parametrize("stage", ["ibp", "crown-ibp", "crown", "alpha", "milp"])
@pytest.mark.parametrize("split", ["input", "relu"])
@pytest.mark.parametrize(("mean", "weight"), [(1e300, 1.0), (0.0, 1e300)])
def test_a_factor_of_batchnorm_that_underflows(
    stage: str, split: str, mean: float, weight: float
) -> None:
    """It is rounded by a third of itself: what it is multiplied by makes that matter."""
    box = Box(*(torch.tensor([[x]], dtype=torch.float64) for x in (1.0, 1.5)))
    for sign in (1.0, -1.0):
        subject = with_tiny_factor(mean, weight, sign)
        ends = [exact_values(subject.exact, corner[0]) for corner in box.corners]
        least = min(values[len(subject.exact.nodes) - 1][0] for values in ends)
        for share, holds in ((Fraction(1, 10**6), False), (-(10**280), True)):
            offset = torch.tensor([float(-least - abs(least) * share)], dtype=torch.float64)
            assert (least + Fraction(float(offset)) > 0) == holds
            unsafe = Unsafe(torch.ones(1, 1).double(), offset, torch.tensor([0]))
            problem = Problem(box, box, unsafe, lambda point: False)
            choices = Choices(split=split)
            found = solve(subject, problem, timeout=60.0, stages=(stage,), choices=choices)
            assert bool(found) == holds
