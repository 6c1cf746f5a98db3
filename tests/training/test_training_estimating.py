"""Worst margins as the approximations estimate them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tightrope.attacks import CrossEntropy, Steps, pgd, worst_margin
from tightrope.box import Box
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, evaluation_model
from tightrope.training.estimating import estimated_margin, estimators
from tightrope.training.objectives import IBP, PGD

pytestmark = pytest.mark.usefixtures("one_thread")

ATTACK = PGD(steps=50, restarts=3)


def affine(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def model_of(module: nn.Module, x: Tensor) -> FixedModel:
    return evaluation_model(trace(module, tuple(x.shape[1:])), x)


def by_cross_entropy(model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Return the margins where an equal attack finds the largest cross-entropy."""
    steps = Steps(ATTACK.steps, milestones=(0.5, 0.8, 0.9))
    ball = Box.ball(x, radius)
    points = pgd(model.frozen, ball, CrossEntropy(y), steps=steps, restarts=ATTACK.restarts)
    return worst_margin(model.graph(points), y)


@torch.no_grad()
def test_the_attack_is_on_the_margin() -> None:
    """Class 1 gets 2 - 2x behind the true one, the other eight x + 0.1.

    The worst margin is 0, at 1. The cross-entropy grows towards 0, where eight classes are 0.1
    behind, from everywhere in the ball.
    """
    module = affine([[0.0], [2.0], *[[-1.0]] * 8], [0.0, -2.0, *[-0.1] * 8])
    x, y = torch.full((60, 1), 0.5), torch.zeros(60, dtype=torch.long)
    model = model_of(module, x)
    torch.manual_seed(0)
    found = estimated_margin(ATTACK, model, x, y, 0.5)
    other = by_cross_entropy(model, x, y, 0.5)
    torch.testing.assert_close(other, torch.full((60,), 0.1))
    assert (found <= other + 1e-6).all()
    at_the_worst = found.abs() < 1e-6
    assert at_the_worst.sum() > 30  # those with a start above 0.633
    torch.testing.assert_close(found[~at_the_worst], other[~at_the_worst])


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_cross_entropy_finds_no_worse_margins(seed: int) -> None:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU())
    module.append(nn.Linear(30, 10))
    x = torch.rand(200, 12)
    y, radius = module(x).argmax(1), 0.2
    model = model_of(module, x)
    found, other = (f(model, x, y, radius) for f in (by_margin, by_cross_entropy))
    exact_side = estimated_margin(IBP(), model, x, y, radius)
    assert (exact_side <= found + 1e-6).all()
    assert found.mean() < other.mean() and (found < other - 1e-4).sum() > (other < found).sum()


def by_margin(model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Tensor:
    return estimated_margin(ATTACK, model, x, y, radius)


@torch.no_grad()
def test_steps_shrink_towards_the_worst_point() -> None:
    """The margin is |x - 0.3|; steps of an eighth alone pass by its zero."""
    module = nn.Sequential(
        affine([[1.0], [-1.0]], [-0.3, 0.3]), nn.ReLU(), affine([[1.0, 1.0], [0.0, 0.0]], [0.0] * 2)
    )
    x, y = torch.full((40, 1), 0.5), torch.zeros(40, dtype=torch.long)
    torch.manual_seed(0)
    found = estimated_margin(ATTACK, model_of(module, x), x, y, 0.5)
    assert (found >= 0).all() and (found < 5e-3).all()


@torch.no_grad()
def test_bounds_by_hand() -> None:
    """The margins are 1 + x and -1 - x: nothing that any of these could miss or lose."""
    module = nn.Sequential(affine([[1.0]], [0.0]), nn.ReLU(), affine([[1.0], [0.0]], [1.0, 0.0]))
    x, y = torch.tensor([[0.5], [0.75]]), torch.tensor([0, 1])
    model = model_of(module, x)
    torch.manual_seed(0)
    for name, objective in estimators(1).items():
        if name != "sabr":
            found = estimated_margin(objective, model, x, y, 0.1)
            torch.testing.assert_close(found, torch.tensor([1.4, -1.85]), msg=name)
