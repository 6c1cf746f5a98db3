"""A search over one pool of open subproblems, whatever these are: what all such have in common.

All open rows of a property share the pool, the lowest bounds are split first, a subproblem is
closed only by a strict bound, and points where bounds are attained are tried as counterexamples.
A search says how it begins and what it does in a round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, falsified, undecided, verified
from tightrope.certification.properties import Unsafe
from tightrope.certification.raids import raid_is_due
from tightrope.certification.refutation import Refute
from tightrope.certification.search.branch_and_bound import EAGER
from tightrope.deadline import Deadline, OutOfTimeError, until

TRIED = 16  # points at a time
LEAF_RATES = (1.0, 0.3, 0.1, 0.03, 0.01)


class Problems(Protocol):
    """A batch of subproblems, each about one row of the property."""

    @property
    def row(self) -> Tensor:
        """The rows."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


P = TypeVar("P", bound=Problems)


class Seen(Protocol):
    """What a look at subproblems shows: where their bounds are attained, among other things."""

    @property
    def point(self) -> Tensor:
        """The points, [D, *input]."""
        ...


class Bounds(Protocol[P]):
    """Bounds subproblems, by float32 to search with and strictly; `chunk` of them at a time."""

    chunk: int

    def look(self, problems: P) -> Seen:
        """Bound subproblems with the parameters they have."""
        ...

    def improve(self, problems: P, *, iterations: int, beta_rate: float) -> tuple[Tensor, P, Any]:
        """Improve the bounds; return them, their parameters, and what to split next."""
        ...

    def strict(self, problems: P) -> Tensor:
        """Return proved lower bounds."""
        ...


class Pool(Protocol):
    """Open subproblems, the lowest bound first."""

    @property
    def lowest(self) -> float:
        """The lowest bound."""
        ...

    def __len__(self) -> int: ...

    def peek(self, most: int) -> Any:
        """Return those with the lowest bounds, leaving them in."""
        ...


@dataclass(frozen=True)
class PoolSettings:
    """How the search goes about it."""

    batch: int = 32
    iterations: int = 2
    leaf_iterations: int = 100
    beta_rate: float = 0.1


class PooledSearch(ABC, Generic[P]):
    """The search for one property on one box."""

    def __init__(self, unsafe: Unsafe, refute: Refute, settings: PoolSettings) -> None:
        self.unsafe, self.group, self.refute = unsafe, unsafe.group, refute
        self.leaf_iterations = settings.leaf_iterations
        self.open: Pool | None = None
        self.count = 0
        self.stuck = 0
        self.lowest = float("inf")

    @property
    @abstractmethod
    def bounds(self) -> Bounds[P]:
        """What bounds the subproblems."""

    @abstractmethod
    def begin(self, deadline: Deadline) -> Answer:
        """Bound all rows without splits; each open group goes on with its best row."""

    @abstractmethod
    def _round(self) -> Tensor | None:
        """Split and bound one batch; return a counterexample if one is met."""

    def run(self, end: float) -> Answer:
        """Search until everything is decided or `time.monotonic()` passes the end."""
        deadline = Deadline(end)
        if self.open is None:
            self.begin(deadline)
        pool = self.open
        assert pool is not None
        try:
            with until(deadline):
                point = self._search(pool, deadline)
        except OutOfTimeError:
            return self._unfinished(pool, Cause.TIME)
        if point is not None:
            return falsified(point, self.count)
        if self.stuck:
            return self._unfinished(pool, Cause.TOO_CLOSE)
        return verified(self.lowest, self.count)

    def _search(self, pool: Pool, deadline: Deadline) -> Tensor | None:
        """Split until nothing is left; return a counterexample if one is met."""
        point = self._try(pool) if len(pool) else None
        rounds = 0
        while len(pool) and point is None:
            deadline.check()
            point = self._round()
            rounds += 1
            # What the first few rounds did not find becomes ever less likely to be there.
            now = rounds <= EAGER or rounds % EAGER == 0 or raid_is_due(self.refute)
            if point is None and len(pool) and now:
                point = self._try(pool)
        return point

    def _unfinished(self, pool: Pool, cause: Cause) -> Answer:
        """Say how far the search came; of what is open, only float32 knows a bound."""
        lowest = min(self.lowest, pool.lowest) if len(pool) else self.lowest
        left = f"{len(pool) + self.stuck} subproblems open of {self.count}"
        return undecided(cause, f"lowest bound {lowest:.4g}, {left}", subproblems=self.count)

    def _worst_group(self, bounds: Tensor) -> float:
        """Count the bounds of all rows; return the lowest one among the best of each group."""
        self.count += len(bounds)
        best = bounds.new_full((int(self.group.max()) + 1,), -torch.inf)
        best = best.scatter_reduce(0, self.group, bounds, "amax")[self.group]
        proved = best[best > 0]
        self.lowest = float(proved.min()) if len(proved) else self.lowest
        return float(best.min())

    def _prove(self, bound: Tensor, problems: P) -> Tensor:
        """Return which subproblems are proved, strictly; the bounds of others are not positive."""
        proved = torch.zeros_like(bound, dtype=torch.bool)
        promising = (bound > 0).nonzero()[:, 0]
        strict = self.bounds.strict(problems[promising])
        strict = torch.where(torch.isfinite(strict), strict, -torch.inf)
        good = strict > 0
        proved[promising] = good
        if good.any():
            self.lowest = min(self.lowest, float(strict[good].min()))
        bound[promising[~good]] = strict[~good].to(bound).clamp(max=0.0)
        bound[torch.isnan(bound)] = -torch.inf
        return proved

    def _leaves(self, problems: P) -> Tensor | None:
        """Work on subproblems that nothing is left to split in: only multipliers can help."""
        bound = torch.full((len(problems),), -torch.inf, device=problems.row.device)
        for rate in LEAF_RATES:
            bound, problems, _ = self.bounds.improve(
                problems, iterations=self.leaf_iterations, beta_rate=rate
            )
        open_ones = ~self._prove(bound, problems)
        if not open_ones.any():
            return None
        point = self._refute(problems[open_ones])
        if point is None:
            self.stuck += int(open_ones.sum())
            self.lowest = min(self.lowest, float(bound[open_ones].min()))
        return point

    def _try(self, pool: Pool) -> Tensor | None:
        """Try the points at which the lowest bounds are attained as counterexamples."""
        return self._refute(pool.peek(min(TRIED, self.bounds.chunk)))

    def _refute(self, problems: P) -> Tensor | None:
        points = self.bounds.look(problems).point
        return self.refute(points.flatten(1), self.group[problems.row])
