"""When it pays to bound the neurons of a subproblem again (`tightrope.domains.reduced.regions`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The first regions are a trial, once children have taken as long as they will.
TRIED = 8
# A region costs about as much as so many children for each neuron, until that is measured.
PER_NEURON = 2
# Of the last so many regions, a share above or below which they are made earlier or later.
RECENT, MANY, MOST, FEW, FEWER = 16, 0.8, 0.5, 0.4, 0.2
SHARE = 0.5  # of the children's time, for regions of which most stay open


@dataclass
class Patience:
    """When bounding the neurons of a subproblem again pays.

    Regions of which many are closed take the place of children (`eager`), and are made after the
    fewest signs with which that is so. Others are made after so many signs that all their children
    would take as long.
    """

    size: int  # neurons
    per_child: float = 0.0
    per_region: float = 0.0
    made: int = 0
    on_children: float = 0.0  # seconds
    on_regions: float = 0.0
    eager: bool = False
    depth: int = 1
    recent: int = 0
    closed: int = 0  # of the recent ones

    @property
    def due(self) -> bool:
        """Whether regions may be made now."""
        if not self.made:
            return self.on_children >= TRIED * PER_NEURON * self.size * self.per_child > 0
        return self.eager or self.on_regions <= SHARE * self.on_children

    def most(self, allowed: int) -> int:
        """Return how many regions a round may make: few at first, then those of a second."""
        if not self.made:
            return TRIED
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
        if self.recent < RECENT and not first:
            return
        share = self.closed / self.recent
        self.recent = self.closed = 0
        if first and share < MOST:
            self.depth = self.patient_depth
        else:
            self.depth = max(1, self.depth + (share < FEW) + (share < FEWER) - (share > MANY))
        eager = share >= MOST or (self.eager and self.depth <= self.patient_depth)
        if self.eager and not eager:
            self.on_regions = self.on_children = 0.0
        self.eager = eager
