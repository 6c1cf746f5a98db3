"""When it pays to bound the neurons of a subproblem again (`tightrope.domains.reduced.regions`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Signs that are decided before neurons are bounded again for the first time; more of them after so
# many regions of which fewer than a share were closed.
FIRST_DEPTH = 8
ENOUGH, FEW, EXTRA = 64, 0.05, 4
FIRST_REGIONS = 8
SHARE = 0.25  # of the children's time, for regions of which most stay open


@dataclass
class Patience:
    """When bounding the neurons of a subproblem again pays.

    That is done after `depth` more signs have been decided: so many that all their children would
    take as long, and more if it closes too little.
    """

    per_child: float = 0.0
    per_region: float = 0.0
    made: int = 0
    closed: int = 0
    on_children: float = 0.0  # seconds
    on_regions: float = 0.0

    @property
    def spent(self) -> bool:
        """Whether enough time went into regions that close too little."""
        if self.made < FIRST_REGIONS or 2 * self.closed >= self.made:
            return False
        return self.on_regions > SHARE * self.on_children

    def most(self, allowed: int) -> int:
        """Return how many regions a round may make: few at first, then those of a second."""
        if not self.made:
            return FIRST_REGIONS
        return max(1, min(allowed, int(1.0 / max(self.per_region, 1e-6))))

    @property
    def depth(self) -> int:
        """The number of signs."""
        if not self.made or self.per_child <= 0:
            return FIRST_DEPTH
        least = math.ceil(math.log2(max(self.per_region / self.per_child, 2.0)))
        fruitless = self.made >= ENOUGH and self.closed < FEW * self.made
        return least + (EXTRA if fruitless else 0)

    def note_children(self, count: int, seconds: float) -> None:
        """Remember what a batch of children took."""
        self.per_child = seconds / max(count, 1)
        self.on_children += seconds

    def note_regions(self, count: int, left: int, seconds: float) -> None:
        """Remember what a batch of regions took, and how many of them are left."""
        self.made, self.closed = self.made + count, self.closed + count - left
        self.per_region = seconds / count
        self.on_regions += seconds
