"""APGD (Croce and Hein 2020): ascent whose steps shrink by themselves, with momentum.

As in AutoAttack: steps of the sign of the gradient, first of twice the radius, and halved at
checkpoints where the loss has not risen often enough or nothing better was found since the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks.pgd import Network
from tightrope.box import Box, flat
from tightrope.deadline import check_time

STEPS = 100
MOMENTUM = 0.25  # share of the last move in the next one
ENOUGH = 0.75  # share of the steps between checkpoints that have to raise the loss
TINY = 1e-12

# One number per sample, of logits; larger is worse for the network.
LossOfLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ball:
    """Inputs [batch, ...], the boxes around them that points must lie in, and their labels.

    `domain` is the range of values that inputs can have at all.
    """

    x: Tensor
    box: Box
    labels: Tensor
    domain: tuple[float, float] = (-torch.inf, torch.inf)

    def __getitem__(self, index: Tensor) -> Ball:
        """Select samples."""
        return Ball(self.x[index], self.box[index], self.labels[index], self.domain)

    @property
    def radius(self) -> Tensor:
        """The radius of each ball; where the domain cuts one side off, the other side has it."""
        sides = torch.maximum(self.box.upper - self.x, self.x - self.box.lower)
        return flat(sides).amax(1).view(-1, *(1 for _ in self.x.shape[1:]))

    def misled(self, logits: Tensor) -> Tensor:
        """Return which samples are misclassified."""
        return logits.argmax(1) != self.labels


def cross_entropy(labels: Tensor) -> LossOfLogits:
    """Return the cross-entropy of the true class."""
    return lambda logits: F.cross_entropy(logits, labels, reduction="none")


def dlr(labels: Tensor) -> LossOfLogits:
    """Return the difference-of-logits ratio `-(z_y - max z_i) / (z_(1) - z_(3))`."""

    def loss(logits: Tensor) -> Tensor:
        ranked = logits.sort(1, descending=True).values
        true = logits.gather(1, labels[:, None])[:, 0]
        other = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
        return -(true - other) / (ranked[:, 0] - ranked[:, 2] + TINY)

    return loss


def targeted_dlr(labels: Tensor, targets: Tensor) -> LossOfLogits:
    """Return `-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2)`; of fewer classes, `z_t - z_y`."""

    def loss(logits: Tensor) -> Tensor:
        pair = logits.gather(1, torch.stack((targets, labels), 1))
        gap = pair[:, 0] - pair[:, 1]
        if logits.shape[1] < 4:
            return gap
        ranked = logits.sort(1, descending=True).values
        return gap / (ranked[:, 0] - (ranked[:, 2] + ranked[:, 3]) / 2 + TINY)

    return loss


def checkpoints(steps: int) -> list[int]:
    """Return after how many steps the size is looked at: 22, 41, 57, ... of 100."""
    window, least, fewer = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
    found: list[int] = []
    while (found[-1] if found else 0) + window <= steps:
        found.append((found[-1] if found else 0) + window)
        window = max(window - fewer, least)
    return found


def apgd(network: Network, ball: Ball, loss: LossOfLogits, *, steps: int = STEPS) -> Tensor:
    """Return the last misclassified point of each sample, or the one with the highest loss."""
    climb = _Climb(network, ball, loss, steps)
    for k in range(steps):
        check_time()
        climb.step(k)
    return torch.where(climb.rows(climb.broken), climb.fooling, climb.best)


class _Climb:
    """The state of one run: where each sample is, the best so far, the size of its steps."""

    def __init__(self, network: Network, ball: Ball, loss: LossOfLogits, steps: int) -> None:
        self.network, self.ball, self.loss = network, ball, loss
        self.box = ball.box.detach()
        noise = torch.rand_like(ball.x) * 2 - 1
        largest = flat(noise.abs()).amax(1).view_as(ball.radius)
        self.points = self.box.project(ball.x + ball.radius * noise / largest)
        self.before = self.points
        self.fooling = self.points
        self.broken = torch.zeros(len(ball.x), dtype=torch.bool, device=ball.x.device)
        value, self.gradient = self._look(self.points)
        self.best, self.best_value, self.best_gradient = self.points, value, self.gradient
        self.size = 2 * ball.radius
        self.ends = checkpoints(steps)
        # One row per step. The first is compared with the last, which is zero until then.
        self.values = value.new_zeros(steps, len(value))
        self.last_value = value
        self.halved = torch.ones_like(self.broken)

    def rows(self, chosen: Tensor) -> Tensor:
        """Return a choice of samples in the shape of their inputs."""
        return chosen.view(-1, *(1 for _ in self.points.shape[1:]))

    def _look(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and gradient, and remember points that are misclassified."""
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            logits = self.network(points)
            value = self.loss(logits)
            (gradient,) = torch.autograd.grad(value.sum(), points)
        misled = self.ball.misled(logits.detach())
        self.fooling = torch.where(self.rows(misled), points.detach(), self.fooling)
        self.broken = self.broken | misled
        return value.detach(), gradient

    def step(self, k: int) -> None:
        """Take step k, and look at the sizes if it is a checkpoint's."""
        points, move = self.points, self.points - self.before
        share = 1 - MOMENTUM if k else 1.0
        ahead = self.box.project(points + self.size * self.gradient.sign())
        self.before = points
        self.points = self.box.project(points + share * (ahead - points) + (1 - share) * move)
        value, self.gradient = self._look(self.points)
        self.values[k] = value
        better = value > self.best_value
        self.best = torch.where(self.rows(better), self.points, self.best)
        self.best_gradient = torch.where(self.rows(better), self.gradient, self.best_gradient)
        self.best_value = torch.where(better, value, self.best_value)
        if k + 1 in self.ends:
            place = self.ends.index(k + 1)
            self._look_back(k, k + 1 - (self.ends[place - 1] if place else 0))

    def _look_back(self, k: int, window: int) -> None:
        """Halve the steps of samples that swing or stand still, which go on from the best point."""
        recent = torch.arange(k - window + 1, k + 1, device=self.values.device)
        rises = (self.values[recent] > self.values[recent - 1]).sum(0)
        stuck = ~self.halved & (self.last_value >= self.best_value)
        self.halved = (rises <= ENOUGH * window) | stuck
        self.last_value = self.best_value
        chosen = self.rows(self.halved)
        self.size = torch.where(chosen, self.size / 2, self.size)
        self.points = torch.where(chosen, self.best, self.points)
        self.gradient = torch.where(chosen, self.best_gradient, self.gradient)
