"""The cheaper of two ways to bound boxes: tight bounds of few, or loose ones of many.

What a bound loses in the middle of a box shrinks with the square of the box's width. So with n
inputs that vary, bounds that lose q times as much need about q^(n/2) times as many boxes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from torch import Tensor

from tightrope.domains.boxes.bounding import GraphBounder, RowBounds
from tightrope.domains.linear.crown import CROWN_FORMS

FEWEST = 16  # boxes that are compared
MOST = 64
RARER = 8  # times as many boxes until the next comparison


@dataclass
class ChoosingBounder:
    """Bounds on the graph, `tight` by rows for each layer or `quick` by affine forms."""

    tight: GraphBounder
    seen: int = 0
    due: int = FEWEST

    def __post_init__(self) -> None:
        self.quick = replace(self.tight, effort=CROWN_FORMS)
        self.chosen = self.tight

    @property
    def varying(self) -> Tensor:
        """Positions of the inputs that vary, flat."""
        return self.tight.varying

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        """Bound the rows on boxes."""
        self.seen += len(lower)
        if self.seen >= self.due and len(lower) >= FEWEST:
            self.due = RARER * self.seen
            self._choose(lower[:MOST], upper[:MOST])
        return self.chosen(lower, upper)

    def _choose(self, lower: Tensor, upper: Tensor) -> None:
        """Compare on some boxes what both take and lose."""
        middle = lower / 2 + upper / 2
        values = self.tight.rows_at(middle)
        costs = []
        for bounder in (self.tight, self.quick):
            started = time.process_time()
            found = bounder(lower, upper)
            seconds = time.process_time() - started
            lost = values - found.constant - (found.slope * middle[:, None]).sum(2)
            costs.append((seconds, float(lost.clamp(min=0).median())))
        moving = float((lower < upper).sum(1).double().mean())
        (tight, near), (quick, far) = costs
        # What is not a number chooses the tight one.
        more = _power(far / near, moving / 2) if near > 0 else math.inf
        self.chosen = self.quick if quick * more < tight else self.tight


def _power(base: float, exponent: float) -> float:
    """Return a power of a number that is not negative; infinity if it is beyond all floats."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf
