"""What tests of the PGD loop share: a network, goals, and an eye on evaluations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightrope.attacks import CrossEntropy, Goal, Margin, Steps, Targeted, pgd
from tightrope.box import Box
from tightrope.graph import Graph, trace

GOALS = {
    "cross-entropy": CrossEntropy,
    "margin": Margin,
    "targeted": lambda labels: Targeted(labels, (labels + 1) % 4),
}


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Graph]:
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    module = nn.Sequential(*layers).to(dtype).eval()
    return module, trace(module, (6,))


def batch(count: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.rand(count, 6, dtype=dtype), torch.randint(0, 4, (count,))


def attack(graph: Graph, box: Box, goal: Goal, steps: Steps, **options: object) -> Tensor:
    """The attack with a seed of its own, so that two calls draw the same points."""
    torch.manual_seed(3)
    return pgd(graph, box, goal, steps=steps, **options)


class Spy:
    """A network that remembers the points it was asked about."""

    def __init__(self, inner: Graph) -> None:
        self.inner = inner
        self.asked: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        return self.inner(x)
