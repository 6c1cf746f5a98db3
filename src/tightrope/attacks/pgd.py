"""Projected gradient ascent inside a box: the one attack loop.

Attacks differ by their landscape (what is maximised, and how it is evaluated), their box and
their steps. Networks they get are cut off from their parameters, so only gradients with respect
to the points are ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from tightrope.attacks.goals import Goal
from tightrope.box import Box, flat, spread
from tightrope.devices import launches
from tightrope.precision import search_precision

Network = Callable[[Tensor], Tensor]

WIDTH = 2.0  # of a box, in half-widths
EVERY = 5  # steps between two looks at who still moves, where looking is a wait


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


class View(NamedTuple):
    """What a landscape shows at some points: scores, the goals reached (if asked), the gradient."""

    scores: Tensor
    reached: Tensor | None
    gradient: Tensor | None


class Landscape(Protocol):
    """A score over points. It may remember the points it was asked about last."""

    def look(self, points: Tensor, *, gradient: bool = True) -> View:
        """Evaluate the points; the gradient belongs to the landscape and must not be changed."""

    def select(self, index: Tensor) -> Self:
        """Return the landscape of some of the samples."""


def pgd(
    network: Network,
    box: Box,
    goal: Goal,
    *,
    steps: Steps,
    restarts: int = 1,
    keep: Literal["best", "last"] = "best",
    stop: bool = False,
    starts: Sequence[Tensor] = (),
) -> Tensor:
    """Search each box for the point with the highest score and return it.

    Every restart begins at a uniform random point (the first ones at `starts`, if given) and
    takes `steps` sign-gradient steps, each followed by projection. `keep="best"` returns the
    highest-scoring point ever visited, start and end included; `keep="last"` the end of the
    last restart, which saves one evaluation. With `stop`, samples leave the batch as soon as
    their goal is reached.
    """
    box = box.detach()
    first = box.project(starts[0].detach()) if starts else box.sample()
    landscape = NetworkLandscape(network, goal, stop)
    if keep == "last":
        if restarts != 1 or stop:
            raise ValueError('keep="last" goes with one restart and without stop')
        return climb(landscape, box, first, steps, None)
    search = Search(first.clone(), stop=stop)
    for restart in range(restarts):
        if not len(search.alive):
            break
        narrowed = box[search.alive]
        if restart == 0:
            points = first
        elif restart < len(starts):
            points = narrowed.project(starts[restart].detach()[search.alive])
        else:
            points = narrowed.sample()
        climb(landscape.select(search.alive), narrowed, points, steps, search)
    return search.best


def starting_points(
    box: Box, given: Tensor | None, draw: Callable[[], Tensor], restarts: int
) -> Iterator[Tensor]:
    """Yield where each restart begins, [batch, count, ...]; the first at points that are `given`.

    They are moved into the box. All others are drawn, for the whole batch, so that the pieces in
    which it is searched have no influence on the points.
    """
    for restart in range(restarts):
        if restart or given is None:
            yield draw()
        else:
            lower, upper = (t.unsqueeze(1) for t in box.corners)
            inside = spread(box.lower, given.shape[1])  # in the memory order of the box
            yield torch.clamp(given, lower, upper, out=inside)


class Search:
    """The best point of each sample so far, and which samples are still searched.

    `best` is filled in place. With `stop`, samples leave when their goal is reached. With
    `settle`, they leave when a step leads nowhere, which makes it the last one anyway.
    """

    def __init__(self, best: Tensor, *, stop: bool = False, settle: bool = False) -> None:
        self.best = best
        self.score = best.new_full((len(best),), -torch.inf)
        self.stop, self.settle = stop, settle
        self.revive()

    def revive(self) -> None:
        """Search all samples again."""
        self.alive = torch.arange(len(self.best), device=self.best.device)

    def record(self, points: Tensor, view: View) -> Tensor | None:
        """Take note of `points`; return the positions that go on, or None if all do."""
        if launches(points) and not self.stop:
            self._choose(points, view.scores)
            return None
        better = view.scores > self.score[self.alive]
        if view.reached is not None and self.stop:
            better |= view.reached  # a broken sample keeps the point that broke it
        if len(self.alive) == len(self.best) and better.all():
            self.best.copy_(points)
            self.score.copy_(view.scores)
        else:
            rows = self.alive[better]
            self.best[rows] = points[better]
            self.score[rows] = view.scores[better]
        return None if view.reached is None or not self.stop else self._leave(~view.reached)

    def _choose(self, points: Tensor, scores: Tensor) -> None:
        """Keep the better points without asking which they are."""
        everything = len(self.alive) == len(self.best)
        best = self.best if everything else self.best[self.alive]
        before = self.score if everything else self.score[self.alive]
        better = (scores > before).view(-1, *(1 for _ in points.shape[1:]))
        torch.where(better, points, best, out=best)
        torch.fmax(before, scores, out=before)
        if not everything:
            self.best.index_copy_(0, self.alive, best)
            self.score.index_copy_(0, self.alive, before)

    def moving(self, points: Tensor, moved: Tensor) -> Tensor | None:
        """Return the positions whose step leads elsewhere, or None if all do."""
        return self._leave(flat(moved != points).any(1))

    def _leave(self, staying: Tensor) -> Tensor | None:
        if not launches(staying) and staying.all():
            return None
        going = staying.nonzero()[:, 0]
        if len(going) == len(staying):
            return None
        self.alive = self.alive[going]
        return going


def climb(
    landscape: Landscape, box: Box, points: Tensor, steps: Steps, search: Search | None
) -> Tensor:
    """Take all steps from `points`, telling `search` of every point visited."""
    way = 0.0
    every = EVERY if launches(points) else 1
    for number, size in enumerate(steps.sizes(), start=1):
        view = landscape.look(points)
        assert view.gradient is not None
        gradient = view.gradient
        going = search.record(points, view) if search else None
        if going is not None:
            points, gradient = points[going], gradient[going]
            box, landscape = box[going], landscape.select(going)
        moved = box.step(points, gradient, size)
        way += size
        # Before they can have crossed the box, hardly any points are at rest.
        looks = search is not None and search.settle and way >= WIDTH and number % every == 0
        going = search.moving(points, moved) if search and looks else None
        if going is not None:
            moved, box, landscape = moved[going], box[going], landscape.select(going)
        points = moved
        if not len(points):
            return points
    if search is not None:
        search.record(points, landscape.look(points, gradient=False))
    return points


@dataclass(frozen=True)
class NetworkLandscape:
    """The goal's score of a network's outputs, evaluated and differentiated by autograd."""

    network: Network
    goal: Goal
    tells: bool = False  # whether the goal is reached

    def look(self, points: Tensor, *, gradient: bool = True) -> View:
        """Evaluate the points."""
        slope = None
        with torch.set_grad_enabled(gradient), search_precision():
            points = points.detach().requires_grad_(gradient)
            logits = self.network(points)
            scores = self.goal(logits)
            if gradient:
                (slope,) = torch.autograd.grad(scores.sum(), points)
        reached = self.goal.reached(logits.detach()) if self.tells else None
        return View(scores.detach(), reached, slope)

    def select(self, index: Tensor) -> NetworkLandscape:
        """Return the landscape of some of the samples."""
        return NetworkLandscape(self.network, self.goal.select(index), self.tells)
