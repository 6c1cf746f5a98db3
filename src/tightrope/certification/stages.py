"""The stages of the cascade: each looks at a batch and decides what it can.

A stage returns what it proved or refuted and leaves the rest to the next one. Proofs come
from strict float64 bounds only; refutations are points that the original network
misclassifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from tightrope.attacks import Network, for_points, strong_attack, worst_margin
from tightrope.certification.properties import Ball
from tightrope.domains import interval
from tightrope.graph import Graph, trace


class Subject:
    """The network under examination in the forms that the stages need."""

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...]) -> None:
        self.module = module.eval()
        self.input_shape = input_shape

    @cached_property
    def attacked(self) -> Network:
        """The network in its own precision without parameter gradients, for attacks."""
        return for_points(trace(self.module, self.input_shape).fold_batchnorm())

    @cached_property
    def exact(self) -> Graph:
        """The network in float64, for proofs.

        BatchNorm is not folded: the rounding of folding would be outside the proof.
        """
        return trace(self.module, self.input_shape).detach().to(torch.float64)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Run the original network."""
        result: Tensor = self.module(x)
        return result

    def predict(self, x: Tensor) -> Tensor:
        """Return the predicted classes; an output that is not finite is no answer: -1."""
        logits = self.outputs(x)
        return torch.where(torch.isfinite(logits).all(1), logits.argmax(1), -1)

    def fooled(self, points: Tensor, labels: Tensor, candidates: Tensor) -> Tensor:
        """Return which candidates the network misclassifies when it sees them alone.

        In a batch, sums may be taken in another order and tip a margin near zero; a
        counterexample must hold for whoever feeds it to the network by itself.
        """
        confirmed = torch.zeros_like(candidates)
        for i in candidates.nonzero()[:, 0].tolist():
            confirmed[i] = self.predict(points[i : i + 1])[0] != labels[i]
        return confirmed


@dataclass(frozen=True)
class AttackSettings:
    """How hard the attack stage tries."""

    steps: int = 200
    restarts: int = 5


@dataclass(frozen=True)
class Findings:
    """What a stage says of each sample of a batch.

    `margin` is a lower bound on the worst `o_y - o_i` where `verified`, the margin at `points`
    where `falsified`, and the best bound known (or NaN) elsewhere.
    """

    verified: Tensor
    falsified: Tensor
    margin: Tensor
    points: Tensor | None = None


def ibp_stage(subject: Subject, ball: Ball, labels: Tensor) -> Findings:
    """Prove by interval bounds, with every rounding error accounted for."""
    rounding = torch.finfo(torch.float64).eps
    with torch.no_grad():
        margins, _ = interval.margins(subject.exact, ball.outer(), labels, rounding=rounding)
    others = margins.scatter(1, labels[:, None], torch.inf)
    worst = others.amin(1)
    verified = torch.isfinite(margins).all(1) & (worst > 0)
    return Findings(verified, torch.zeros_like(verified), worst)


def attack_stage(
    subject: Subject, ball: Ball, labels: Tensor, settings: AttackSettings
) -> Findings:
    """Refute by points that lie in the exact ball and fool the original network."""
    box = ball.inner()
    points = strong_attack(
        subject.attacked, box, labels, steps=settings.steps, restarts=settings.restarts
    )
    candidates = (subject.predict(points) != labels) & box.contains(points)
    falsified = subject.fooled(points, labels, candidates)
    logits = subject.outputs(points)
    margin = torch.where(falsified, -worst_margin(logits, labels).double(), torch.nan)
    return Findings(torch.zeros_like(falsified), falsified, margin, points)


Stage = Callable[[Subject, Ball, Tensor], Findings]


def make_stages(names: tuple[str, ...], attack: AttackSettings) -> dict[str, Stage]:
    """Return the named stages in order."""
    known: dict[str, Stage] = {
        "ibp": ibp_stage,
        "attack": lambda subject, ball, labels: attack_stage(subject, ball, labels, attack),
    }
    return {name: known[name] for name in names}


STAGES = ("ibp", "attack")
