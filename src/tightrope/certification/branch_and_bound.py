"""Branch and bound: a property of one box, decided by splitting ReLUs.

All rows of the property that are not proved yet share one pool of subproblems. Each round takes
those with the lowest bounds, splits a neuron of each (several while there are few), and bounds
all children at once. The search runs on a reduced network in float32; a subproblem is closed
only by a strict bound on the network itself (`tightrope.domains.replay`). Points where bounds
are attained are tried as counterexamples.

The property is safe if in each *group* of rows at least one row is positive everywhere; a
counterexample makes all rows of some group nonpositive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.certification import branching
from tightrope.domains.cuts import network_cuts
from tightrope.domains.leaves import solve_leaf
from tightrope.domains.multineuron import GroupSettings
from tightrope.domains.reduced import Reduced
from tightrope.domains.replay import strict_bounds
from tightrope.domains.splits import Bounder, Cuts, Subproblems, join

# Gets points (flat) and the group each is about; returns a counterexample or None.
Refute = Callable[[Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class SearchSettings:
    """How the search goes about it."""

    batch: int = 512
    iterations: int = 12
    root_iterations: int = 40
    alpha_rate: float = 0.1
    beta_rate: float = 0.1
    branching: str = "kfsb"
    candidates: int = 3
    smallest_batch: int = 64
    # Multi-neuron constraints raise the first bounds; on the networks measured so far, the search
    # as a whole is faster without them.
    groups: GroupSettings | None = None
    memory: int = 2 << 30


DEFAULTS = SearchSettings()


@dataclass(frozen=True)
class Outcome:
    """What the search came to.

    `proved` and `point` exclude each other; with neither, `reason` says what ended the search.
    `bound` is the lowest bound of what is still open, or of everything that was proved.
    """

    proved: bool
    point: Tensor | None
    bound: float
    subproblems: int
    open: int
    reason: str = ""


class BranchAndBound:
    """The search on one reduced network, whose rows belong to groups, [rows]."""

    def __init__(
        self,
        network: Reduced,
        group: Tensor,
        refute: Refute,
        *,
        settings: SearchSettings = DEFAULTS,
    ) -> None:
        self.network, self.group, self.refute, self.settings = network, group, refute, settings
        self.cuts: Cuts | None = None
        if settings.groups is not None:
            self.cuts = network_cuts(self.network, settings.groups)
        rough = None if self.cuts is None else self.cuts.to(torch.float32)
        self.bounder = Bounder(self.network.to(torch.float32), rough)
        self.count = 0
        self.stuck = 0
        self.lowest = float("inf")

    def run(self, deadline: float) -> Outcome:
        """Search until everything is decided or `time.monotonic()` passes the deadline."""
        pool, point = self._root()
        while len(pool) and point is None:
            reason = self._out_of_budget(pool, deadline)
            if reason:
                return self._outcome(pool, None, reason)
            pool, point = self._round(pool)
        if point is not None:
            return self._outcome(pool, point, "")
        reason = "subproblems too close to zero to decide" if self.stuck else ""
        return self._outcome(pool, None, reason)

    def _out_of_budget(self, pool: _Pool, deadline: float) -> str:
        if time.monotonic() > deadline:
            return "time"
        if len(pool) * pool.problems.sign.shape[1] * 9 > self.settings.memory:
            return "memory"
        return ""

    def _outcome(self, pool: _Pool, point: Tensor | None, reason: str) -> Outcome:
        proved = point is None and not reason
        bound = min(self.lowest, float(pool.bound.min())) if len(pool) else self.lowest
        return Outcome(proved, point, bound, self.count, len(pool) + self.stuck, reason)

    def _root(self) -> tuple[_Pool, Tensor | None]:
        """Bound all rows without splits; each open group goes on with its best row."""
        rows = torch.arange(len(self.group))
        start = self.bounder.root(rows)
        bound, problems = self.bounder.improve(
            start,
            iterations=self.settings.root_iterations,
            alpha_rate=self.settings.alpha_rate,
        )
        self.count += len(problems)
        proved = self._prove(bound, problems)
        chosen = []
        for group in self.group.unique().tolist():
            mine = (self.group == group).nonzero()[:, 0]
            if not proved[mine].any():
                chosen.append(mine[bound[mine].argmax()])
        index = torch.stack(chosen) if chosen else rows[:0]
        pool = _Pool(problems[index], bound[index])
        return pool, self._try(pool.problems) if len(pool) else None

    def _prove(self, bound: Tensor, problems: Subproblems) -> Tensor:
        """Return which subproblems are proved, strictly; the bounds of others are not positive."""
        proved = torch.zeros_like(bound, dtype=torch.bool)
        promising = (bound > 0).nonzero()[:, 0]
        if len(promising):
            chosen = problems[promising]
            strict = strict_bounds(self.network, chosen, cuts=self.cuts)
            good = torch.isfinite(strict) & (strict > 0)
            proved[promising] = good
            if good.any():
                self.lowest = min(self.lowest, float(strict[good].min()))
            bound[promising[~good]] = _number(strict[~good]).clamp(max=0.0).to(bound)
        return proved

    def _round(self, pool: _Pool) -> tuple[_Pool, Tensor | None]:
        """Split and bound one batch."""
        batch, rest = pool.take(self.settings.batch)
        free = (batch.problems.sign == 0).sum(1)
        point = None
        if (free == 0).any():
            point = self._solve_leaves(batch.problems[free == 0])
            batch, free = batch.select(free > 0), free[free > 0]
            if not len(batch) or point is not None:
                return rest, point
        levels = self._levels(len(batch), int(free.min()))
        neurons = branching.choose(
            self.bounder,
            batch.problems,
            rule=self.settings.branching,
            levels=levels,
            candidates=max(self.settings.candidates, levels),
        )
        new = branching.children(batch.problems, neurons)
        bound, new = self.bounder.improve(
            new,
            iterations=self.settings.iterations,
            alpha_rate=self.settings.alpha_rate,
            beta_rate=self.settings.beta_rate,
        )
        self.count += len(new)
        still = ~self._prove(bound, new)
        pool = rest.add(new[still], bound[still])
        if len(pool):
            lowest = pool.bound.topk(min(len(pool), 64), largest=False).indices
            point = self._try(pool.problems[lowest])
        return pool, point

    def _levels(self, count: int, free: int) -> int:
        levels = 1
        while count << (levels + 1) <= self.settings.smallest_batch * 2 and levels < 4:
            levels += 1
        return min(levels, free)

    def _try(self, problems: Subproblems) -> Tensor | None:
        """Try the points at which bounds are attained as counterexamples."""
        points = self.bounder.minimizer(self.bounder.look(problems))
        return self.refute(points, self.group[problems.row])

    def _solve_leaves(self, problems: Subproblems) -> Tensor | None:
        for i in range(len(problems)):
            one = problems[i : i + 1]
            group = self.group[one.row[0]]
            rows = (self.group == group).nonzero()[:, 0]
            try:
                leaf = solve_leaf(self.network, replace(one, beta=one.beta.double()), rows)
            except ValueError:  # numbers that are not finite: there is no such linear program
                self.stuck, self.lowest = self.stuck + 1, float("-inf")
                continue
            # All rows nonpositive make any such combination nonpositive.
            weights = torch.zeros(1, len(self.group), dtype=torch.float64)
            weights[0, rows] = leaf.weights
            bound = strict_bounds(self.network, leaf.problem, weights, self.cuts)
            if torch.isfinite(bound[0]) and bound[0] > 0:
                self.lowest = min(self.lowest, float(bound[0]))
                continue
            if leaf.point is not None:
                found = self.refute(leaf.point[None], group[None])
                if found is not None:
                    return found
            self.stuck += 1
            self.lowest = min(self.lowest, _number(bound)[0].item())
        return None


def _number(bound: Tensor) -> Tensor:
    """Return bounds, those that are not finite as what they say: nothing."""
    return torch.where(torch.isfinite(bound), bound, -torch.inf)


@dataclass(frozen=True)
class _Pool:
    """Open subproblems with their bounds."""

    problems: Subproblems
    bound: Tensor

    def __len__(self) -> int:
        return len(self.bound)

    def select(self, index: Tensor) -> _Pool:
        return _Pool(self.problems[index], self.bound[index])

    def take(self, count: int) -> tuple[_Pool, _Pool]:
        """Take the ones with the lowest bounds."""
        if len(self) <= count:
            return self, self.select(torch.zeros(0, dtype=torch.long))
        order = self.bound.argsort()
        return self.select(order[:count]), self.select(order[count:])

    def add(self, problems: Subproblems, bound: Tensor) -> _Pool:
        return _Pool(join([self.problems, problems]), torch.cat((self.bound, bound)))
