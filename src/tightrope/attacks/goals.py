"""What an attack maximises: one score per sample, larger meaning nearer to success.

A goal carries the labels it needs and can be narrowed to some samples, so that the loop can
drop those that are already broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.box import flat


class Goal(Protocol):
    """A score to maximise and the test of success."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return one score per sample; larger is worse for the network."""

    def reached(self, logits: Tensor) -> Tensor:
        """Return which samples are broken."""

    def select(self, index: Tensor) -> Self:
        """Return the goal of some of the samples."""


@dataclass(frozen=True)
class CrossEntropy:
    """Maximise the cross-entropy of the true class."""

    labels: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy per sample."""
        return F.cross_entropy(logits, self.labels, reduction="none")

    def reached(self, logits: Tensor) -> Tensor:
        """Return which samples are misclassified."""
        return misclassified(logits, self.labels)

    def select(self, index: Tensor) -> CrossEntropy:
        """Return the goal of some of the samples."""
        return CrossEntropy(self.labels[index])


@dataclass(frozen=True)
class Divergence:
    """Maximise the Kullback-Leibler divergence from the predictions of fixed logits."""

    reference: Tensor  # [samples, classes]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `KL(softmax(reference) || softmax(logits))` per sample."""
        expected = self.reference.log_softmax(1)
        return (expected.exp() * (expected - logits.log_softmax(1))).sum(1)

    def reached(self, logits: Tensor) -> Tensor:
        """Return which samples have another prediction than the fixed one."""
        return misclassified(logits, self.reference.argmax(1))

    def select(self, index: Tensor) -> Divergence:
        """Return the goal of some of the samples."""
        return Divergence(self.reference[index])


@dataclass(frozen=True)
class Margin:
    """Minimise the worst margin."""

    labels: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """Return minus the worst margin per sample."""
        return -worst_margin(logits, self.labels)

    def reached(self, logits: Tensor) -> Tensor:
        """Return which samples are misclassified."""
        return misclassified(logits, self.labels)

    def select(self, index: Tensor) -> Margin:
        """Return the goal of some of the samples."""
        return Margin(self.labels[index])


@dataclass(frozen=True)
class Targeted:
    """Maximise `o_t - o_y` for one target class t per sample."""

    labels: Tensor
    targets: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the margin of the target class per sample."""
        pair = logits.gather(1, torch.stack((self.targets, self.labels), 1))
        return pair[:, 0] - pair[:, 1]

    def reached(self, logits: Tensor) -> Tensor:
        """Return which samples prefer the target class to the true one."""
        return self(logits) > 0

    def select(self, index: Tensor) -> Targeted:
        """Return the goal of some of the samples."""
        return Targeted(self.labels[index], self.targets[index])


@dataclass(frozen=True)
class Rows:
    """Bring all rows `matrix @ o + offset` of each sample to zero or below."""

    matrix: Tensor  # [samples, rows, outputs]
    offset: Tensor  # [samples, rows]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return minus the largest row per sample."""
        rows = torch.einsum("nro,no->nr", self.matrix, flat(logits)) + self.offset
        return -rows.amax(1)

    def reached(self, logits: Tensor) -> Tensor:
        """Return where no row is positive."""
        return self(logits) >= 0

    def select(self, index: Tensor) -> Rows:
        """Return the goal of some of the samples."""
        return Rows(self.matrix[index], self.offset[index])


@dataclass(frozen=True)
class Direction:
    """Move the outputs along a direction: a start that differs from the usual ones."""

    weights: Tensor  # [samples, outputs]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return how far the outputs are in that direction."""
        return (self.weights * flat(logits)).sum(1)

    def reached(self, logits: Tensor) -> Tensor:
        """There is always further to go."""
        return torch.zeros(len(logits), dtype=torch.bool, device=logits.device)

    def select(self, index: Tensor) -> Direction:
        """Return the goal of some of the samples."""
        return Direction(self.weights[index])


@dataclass(frozen=True)
class Alternating:
    """The worst margin of some samples, the cross-entropy of the others."""

    labels: Tensor
    by_margin: Tensor  # [samples]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the score of each sample."""
        margin, entropy = Margin(self.labels)(logits), CrossEntropy(self.labels)(logits)
        return torch.where(self.by_margin, margin, entropy)

    def reached(self, logits: Tensor) -> Tensor:
        """Return which samples are misclassified."""
        return misclassified(logits, self.labels)

    def select(self, index: Tensor) -> Alternating:
        """Return the goal of some of the samples."""
        return Alternating(self.labels[index], self.by_margin[index])


def worst_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return `min_i o_y - o_i` over the wrong classes i; positive where y wins strictly."""
    true = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return true[:, 0] - others.amax(1)


def misclassified(logits: Tensor, labels: Tensor) -> Tensor:
    """Return where the true class does not win: a tie or an undefined output loses."""
    return ~(worst_margin(logits, labels) > 0)
