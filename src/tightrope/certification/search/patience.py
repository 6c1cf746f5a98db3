"""When it pays to bound the neurons of a subproblem again (`tightrope.domains.reduced.regions`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The first regions are a trial near the root, once children have taken so many times as long.
TRIAL, WAIT = 8, 4
# A region costs about as much as so many children for each neuron, until that is measured.
PER_NEURON = 2
# Shares of the last so many regions that are closed: with more they are made earlier, with most of
# them closed instead of children, with few or fewer later.
RECENT, MANY, MOST, FEW, FEWER = 16, 0.8, 0.5, 0.4, 0.2
# Deep subproblems become regions after so many others, where a region takes not too much work.
COUNT, MOST_WORK = 3000, 2e10
SHARE = 0.25  # of the children's time, for regions of which most stay open


@dataclass
class Patience:
    """When bounding the neurons of a subproblem again pays.

    Regions of which most are closed take the place of children (`eager`), after as few signs as
    possible. Others are made after so many signs that all their children would take as long, within
    a share of the time. `depth` is the number of signs.
    """

    size: int  # neurons
    work: float  # operations that a region takes
    per_child: float = 0.0
    per_region: float = 0.0
    made: int = 0
    on_children: float = 0.0  # seconds
    on_regions: float = 0.0
    eager: bool = False
    depth: int = 1
    recent: int = 0
    closed: int = 0  # of the recent ones

    def is_due(self, count: int) -> bool:
        """Return whether regions may be made after so many subproblems."""
        if self.eager:
            return True
        spent = self.on_regions > SHARE * self.on_children
        return count >= COUNT and self.work <= MOST_WORK and not spent

    def trial_is_due(self, count: int, open_ones: float) -> bool:
        """Return whether to try regions near the root; so many subproblems of it are open."""
        if self.made or open_ones <= TRIAL:
            return False
        expected = TRIAL * PER_NEURON * self.size * self.per_child
        return self.is_due(count) or self.on_children >= WAIT * expected > 0

    @property
    def trial_comes(self) -> bool:
        """Whether regions are still to be tried, after some number of subproblems at the latest."""
        return not self.made and self.work <= MOST_WORK

    def most(self, allowed: int) -> int:
        """Return how many regions a round may make: few at first, then those of a second."""
        if not self.made:
            return TRIAL
        return max(1, min(allowed, int(1.0 / max(self.per_region, 1e-6))))

    @property
    def patient_depth(self) -> int:
        """The number of signs whose children take as long as a region."""
        return math.ceil(math.log2(max(self.per_region / max(self.per_child, 1e-9), 2.0)))

    def note_children(self, count: int, seconds: float) -> None:
        """Remember what a batch of children took."""
        self.per_child = seconds / max(count, 1)
        self.on_children += seconds

    def note_regions(self, count: int, left: int, seconds: float) -> None:
        """Remember what a batch of regions took, and how many of them are left."""
        first = not self.made
        self.made += count
        self.per_region = seconds / count
        self.on_regions += seconds
        self.recent, self.closed = self.recent + count, self.closed + count - left
        if self.recent >= RECENT or first:
            self._adapt(self.closed / self.recent)
            self.recent = self.closed = 0

    def _adapt(self, share: float) -> None:
        self.depth = max(1, self.depth + (share < FEW) + (share < FEWER) - (share > MANY))
        eager = share >= MOST or (self.eager and self.depth <= self.patient_depth)
        if self.eager and not eager:
            self.on_regions = self.on_children = 0.0
        self.eager = eager
        if not eager:
            self.depth = max(self.depth, self.patient_depth)


def spread(wanted: Tensor, most: int) -> Tensor:
    """Return at most so many of those that are wanted, evenly spread."""
    place = wanted.nonzero()[:, 0]
    chosen = place[torch.linspace(0, len(place) - 1, min(most, len(place))).long()]
    return torch.zeros_like(wanted).index_fill(0, chosen, True)
