"""Branch and bound over parts of the intervals that activations see, whatever their kind.

The way for networks with other bends than ReLUs and more inputs than can be cut. A subproblem is
split where the lines of an activation cost its bound most (`tightrope.domains.pieces`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightrope.answer import Answer, undecided, verified
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refute
from tightrope.certification.search.pooled import PooledSearch, PoolSettings
from tightrope.certification.search.roots import open_rows
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import optimized_rows
from tightrope.domains.pieces.bounder import PieceBounder
from tightrope.domains.pieces.subproblems import Cuts, Pieces, join, join_cuts, whole

DEFAULTS = PoolSettings(batch=128, iterations=3, beta_rate=0.3)


@dataclass(order=True, frozen=True)
class _Entry:
    """One subproblem; `number` makes ties first come, first served."""

    bound: float
    number: int
    problem: Pieces = field(compare=False)
    where: Cuts = field(compare=False)


class OpenPieces:
    """A heap of open subproblems with their bounds and where they are to be cut."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.count = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lowest(self) -> float:
        """The lowest bound."""
        return self.entries[0].bound

    def add(self, problems: Pieces, bound: Tensor, where: Cuts) -> None:
        """Put subproblems in."""
        for i, value in enumerate(bound.tolist()):
            self.count += 1
            one = slice(i, i + 1)
            heapq.heappush(self.entries, _Entry(value, self.count, problems[one], where[one]))

    def take(self, most: int) -> tuple[Pieces, Tensor, Cuts]:
        """Take out those with the lowest bounds."""
        count = min(most, len(self.entries))
        return _unpack([heapq.heappop(self.entries) for _ in range(count)])

    def peek(self, most: int) -> Pieces:
        """Return those with the lowest bounds, leaving them in."""
        return _unpack(heapq.nsmallest(most, self.entries))[0]


def _unpack(entries: list[_Entry]) -> tuple[Pieces, Tensor, Cuts]:
    problems = join([entry.problem for entry in entries])
    bound = torch.tensor([entry.bound for entry in entries], device=problems.row.device)
    return problems, bound, join_cuts([entry.where for entry in entries])


class PieceSearch(PooledSearch[Pieces]):
    """The search for one property on one box, given strict bounds of any network's neurons."""

    def __init__(
        self,
        relaxation: Relaxation,
        unsafe: Unsafe,
        refute: Refute,
        *,
        settings: PoolSettings = DEFAULTS,
    ) -> None:
        super().__init__(unsafe, refute, settings)
        self.relaxation, self.settings = relaxation, settings

    @property
    def bounds(self) -> PieceBounder:
        """What bounds the subproblems."""
        return self.bounder

    def begin(self, deadline: Deadline) -> Answer:
        """Bound all rows without cuts; each open group goes on with its best row."""
        bounds, slopes = optimized_rows(self.relaxation, self.unsafe.matrix)
        if not torch.isfinite(bounds).all():  # something went wrong on the way to them
            bounds = torch.full_like(bounds, -torch.inf)
        elif self.unsafe.offset.any():
            # The sums are rounded, though never across zero.
            bounds = torch.nextafter(bounds + self.unsafe.offset, bounds.new_tensor(-torch.inf))
        worst = self._worst_group(bounds)
        self.bounder = PieceBounder(self.relaxation, self.unsafe.matrix, self.unsafe.offset, slopes)
        left = open_rows(bounds, self.group)
        pool = OpenPieces()
        if len(left):
            roots = whole(left)
            _, _, where = self.bounder.improve(roots, iterations=0)
            pool.add(roots, bounds[left].clamp(max=0.0), where)
        # Last: a search that ran out of time before has not begun.
        self.open = self.pool = pool
        if not len(left):
            return verified(self.lowest, self.count)
        return undecided(bound=worst, subproblems=self.count)

    def _round(self) -> Tensor | None:
        """Cut and bound one batch; return a counterexample if one is met."""
        pool = self.pool
        batch, before, where = pool.take(self.settings.batch)
        done = where.node == 0
        try:
            point = self._leaves(batch[done]) if done.any() else None
            if point is None and not done.all():
                self._cut(pool, batch[~done], before[~done], where[~done])
            return point
        except OutOfTimeError:
            pool.add(batch, before, where)
            raise

    def _cut(self, pool: OpenPieces, batch: Pieces, before: Tensor, where: Cuts) -> None:
        """Cut each subproblem in two and bound both."""
        parts = join([batch.cut(where, 1), batch.cut(where, -1)])
        bound, parts, next_cuts = self.bounder.improve(
            parts, iterations=self.settings.iterations, beta_rate=self.settings.beta_rate
        )
        still = ~self._prove(bound, parts)
        self.count += len(parts)
        # What held for the whole holds for its parts.
        bound = torch.maximum(bound, before.repeat(2).to(bound))
        pool.add(parts[still], bound[still], next_cuts[still])
