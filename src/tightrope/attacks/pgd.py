"""Projected gradient ascent inside a box: the one attack loop.

Attacks differ by their goal, their box and their steps. The network they get is cut off
from its parameters, so only gradients with respect to the points are ever computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tightrope.attacks.goals import Goal
from tightrope.box import Box

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Steps:
    """How an attack moves.

    `size` is the first step relative to the half-width of the box, per coordinate; after
    each milestone (a fraction of `count`) it is multiplied by `decay`.
    """

    count: int
    size: float = 0.25
    decay: float = 0.1
    milestones: tuple[float, ...] = ()

    def sizes(self) -> list[float]:
        """Return the relative size of each step."""
        drops = [int(m * self.count) for m in self.milestones]
        return [self.size * self.decay ** sum(i >= d for d in drops) for i in range(self.count)]


def pgd(
    network: Network,
    box: Box,
    goal: Goal,
    *,
    steps: Steps,
    restarts: int = 1,
    keep: Literal["best", "last"] = "best",
    stop: bool = False,
    start: Tensor | None = None,
) -> Tensor:
    """Search each box for the point with the highest score and return it.

    Every restart begins at a uniform random point (the first one at `start`, if given) and
    takes `steps` sign-gradient steps, each followed by projection. `keep="best"` returns the
    highest-scoring point ever visited, start and end included; `keep="last"` the end of the
    last restart, which saves one evaluation. With `stop`, samples leave the batch as soon as
    their goal is reached.
    """
    box = box.detach()
    first = box.sample() if start is None else box.project(start.detach())
    if keep == "last":
        if restarts != 1 or stop:
            raise ValueError('keep="last" goes with one restart and without stop')
        return _ascend(network, box, goal, first, steps, None)
    search = _Search(first, stop)
    for restart in range(restarts):
        if not len(search.alive):
            break
        narrowed = box[search.alive]
        points = first if restart == 0 else narrowed.sample()
        _ascend(network, narrowed, goal.select(search.alive), points, steps, search)
    return search.best


class _Search:
    """The best point of each sample so far, and which samples are still searched."""

    def __init__(self, start: Tensor, stop: bool) -> None:
        self.best = start.clone()
        self.score = start.new_full((len(start),), -torch.inf)
        self.alive = torch.arange(len(start), device=start.device)
        self.stop = stop

    def record(self, points: Tensor, scores: Tensor, reached: Tensor) -> Tensor | None:
        """Take note of `points`; return the positions that go on, or None if all do."""
        better = scores > self.score[self.alive]
        if self.stop:
            better |= reached  # a broken sample keeps the point that broke it
        rows = self.alive[better]
        self.best[rows] = points[better]
        self.score[rows] = scores[better]
        if not self.stop or not reached.any():
            return None
        going = (~reached).nonzero()[:, 0]
        self.alive = self.alive[going]
        return going


def _ascend(
    network: Network,
    box: Box,
    goal: Goal,
    points: Tensor,
    steps: Steps,
    search: _Search | None,
) -> Tensor:
    """Take all steps from `points`, telling `search` of every point visited."""
    for size in steps.sizes():
        logits, scores, gradient = _evaluate(network, goal, points)
        going = search.record(points, scores, goal.reached(logits)) if search else None
        if going is not None:
            if not len(going):
                return points
            points, gradient = points[going], gradient[going]
            box, goal = box[going], goal.select(going)
        points = box.project(torch.addcmul(points, gradient.sign_(), box.radius, value=size))
    if search is not None:
        with torch.no_grad():
            logits = network(points)
            search.record(points, goal(logits), goal.reached(logits))
    return points


def _evaluate(network: Network, goal: Goal, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        logits = network(points)
        scores = goal(logits)
        (gradient,) = torch.autograd.grad(scores.sum(), points)
    return logits.detach(), scores.detach(), gradient
