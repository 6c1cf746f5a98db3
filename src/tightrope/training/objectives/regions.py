"""Where in the ball a loss is computed: SABR's small box, and single adversarial points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.attacks import CrossEntropy, Goal, Steps, pgd
from tightrope.box import Box
from tightrope.draws import uniform_like
from tightrope.training.batchnorm import FixedModel


def adversarial_points(
    model: FixedModel,
    box: Box,
    y: Tensor,
    *,
    steps: int,
    restarts: int = 1,
    step_size: float | None = None,
    last: bool = False,
    goal: Goal | None = None,
) -> Tensor:
    """Return the points of `box` with the highest cross-entropy that PGD finds.

    `step_size` is relative to the half-width of the box, by default `max(0.25, 2 / steps)`;
    `last` takes the end of the only restart instead of the best point; `goal` is what to maximise
    instead of the cross-entropy.
    """
    size = step_size or max(0.25, 2 / steps)
    return pgd(
        model.frozen,
        box,
        goal or CrossEntropy(y),
        steps=Steps(steps, size),
        restarts=restarts,
        keep="last" if last and restarts == 1 else "best",
    )


@dataclass(frozen=True)
class SmallBox:
    """SABR's region: a part of the ball around an adversarial point.

    Its half-width is `ratio` (the paper's lambda, tau / epsilon) times that of the clipped ball,
    per pixel; its centre is moved so that it stays inside the ball. The attack's `step_size` is
    relative to the half-width of the ball and drops by `step_decay` after 50, 80 and 90 % of the
    steps. It starts anywhere in the clipped "ball", or around the "input" as the authors do.
    """

    ratio: float
    steps: int
    restarts: int
    step_size: float
    step_decay: float
    start: str = "ball"

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Box:
        """Return the box of each sample."""
        ball = Box.ball(x, radius)
        if self.ratio == 1:
            return ball
        point = pgd(
            model.frozen,
            ball,
            CrossEntropy(y),
            steps=self._schedule(),
            restarts=self.restarts,
            starts=self._starts(x, ball),
        )
        half = self.ratio * ball.radius
        return Box.around(torch.clamp(point, ball.lower + half, ball.upper - half), half)

    def _starts(self, x: Tensor, ball: Box) -> list[Tensor]:
        """Draw `x + U(-1/2, 1/2) (u - l)`, which the attack clamps: weaker in clipped balls."""
        if self.start == "ball":
            return []
        width = ball.upper - ball.lower
        return [x + (uniform_like(x) - 0.5) * width for _ in range(self.restarts)]

    def _schedule(self) -> Steps:
        if self.step_decay == 1:
            return Steps(self.steps, self.step_size)
        # Half a step more keeps the rounding of the fractions from losing one.
        drops = tuple((math.ceil(part * self.steps) + 0.5) / self.steps for part in (0.5, 0.8, 0.9))
        return Steps(self.steps, self.step_size, self.step_decay, drops)
