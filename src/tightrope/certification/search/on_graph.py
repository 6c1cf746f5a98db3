"""Branch and bound on the network itself, for networks too large to be reduced.

The search is that of `tightrope.certification.search.branch_and_bound`: all open rows share one
pool, the lowest bounds are split first, a subproblem is closed only by a strict bound, and points
where bounds are attained are tried as counterexamples. Bounds come from passes through the
operations of the network (`tightrope.domains.branches`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, falsified, undecided, verified
from tightrope.budget import fitting
from tightrope.certification.properties import Unsafe
from tightrope.certification.search.branch_and_bound import EAGER, Refute
from tightrope.certification.search.open_branches import SLOPES, OpenBranches
from tightrope.certification.search.roots import ROOT, RootSettings, find_root
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.branches.subproblems import Branches, join
from tightrope.domains.linear.bounded import Relaxation

TRIED = 16  # points at a time
LEAF_RATES = (1.0, 0.3, 0.1, 0.03, 0.01)
SHARE = 0.25  # of the time, for the root


@dataclass(frozen=True)
class GraphSettings:
    """How the search goes about it; `candidates` are tried at each split, 1: the first is taken."""

    batch: int = 32
    iterations: int = 2
    leaf_iterations: int = 100
    alpha_rate: float = 0.1
    beta_rate: float = 0.1
    candidates: int = 1
    slopes: int = SLOPES
    root: RootSettings = ROOT


DEFAULTS = GraphSettings()


class GraphSearch:
    """The search for one property on one box, given strict bounds of a ReLU network's neurons."""

    def __init__(
        self,
        relaxation: Relaxation,
        unsafe: Unsafe,
        refute: Refute,
        *,
        settings: GraphSettings = DEFAULTS,
    ) -> None:
        self.relaxation, self.unsafe, self.refute = relaxation, unsafe, refute
        self.group, self.settings = unsafe.group, settings
        self.pool: OpenBranches | None = None
        self.count = 0
        self.stuck = 0
        self.lowest = float("inf")

    def begin(self, deadline: Deadline) -> Answer:
        """Bound all rows without splits; each open group goes on with its best row."""
        soon = Deadline.after(SHARE * deadline.left)
        root = find_root(self.relaxation, self.unsafe, deadline=soon, settings=self.settings.root)
        self.bounder, self.relaxation = root.bounder, root.bounder.relaxation
        worst = self._worst_group(root.bounds)
        self.pool = OpenBranches(root.problems, memory=fitting(self.settings.slopes))
        bound = root.bounds[root.open].clamp(max=0.0)
        self.pool.add(root.problems, bound, self._candidates(root.costs))
        if not len(self.pool):
            return verified(self.lowest, self.count)
        return undecided(bound=worst, subproblems=self.count)

    def _worst_group(self, bounds: Tensor) -> float:
        """Count the bounds of all rows; return the lowest one among the best of each group."""
        self.count += len(bounds)
        best = bounds.new_full((int(self.group.max()) + 1,), -torch.inf)
        best = best.scatter_reduce(0, self.group, bounds, "amax")[self.group]
        proved = best[best > 0]
        self.lowest = float(proved.min()) if len(proved) else self.lowest
        return float(best.min())

    def run(self, end: float) -> Answer:
        """Search until everything is decided or `time.monotonic()` passes the end."""
        deadline = Deadline(end)
        if self.pool is None:
            self.begin(deadline)
        pool = self.pool
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

    def _search(self, pool: OpenBranches, deadline: Deadline) -> Tensor | None:
        """Split until nothing is left; return a counterexample if one is met."""
        point = self._try(pool) if len(pool) else None
        rounds = 0
        while len(pool) and point is None:
            deadline.check()
            point = self._round(pool)
            rounds += 1
            # What the first few rounds did not find becomes ever less likely to be there.
            if point is None and len(pool) and (rounds <= EAGER or rounds % EAGER == 0):
                point = self._try(pool)
        return point

    def _unfinished(self, pool: OpenBranches, cause: Cause) -> Answer:
        """Say how far the search came; of what is open, only float32 knows a bound."""
        lowest = min(self.lowest, pool.lowest) if len(pool) else self.lowest
        left = f"{len(pool) + self.stuck} subproblems open of {self.count}"
        return undecided(cause, f"lowest bound {lowest:.4g}, {left}", subproblems=self.count)

    def _candidates(self, costs: Tensor) -> Tensor:
        """Return the neurons that cost most, the best first; -1 where there are no more."""
        found = costs.topk(min(self.settings.candidates, costs.shape[1]), 1)
        return torch.where(found.values >= 0, found.indices, -1)

    def _prove(self, bound: Tensor, problems: Branches) -> Tensor:
        """Return which subproblems are proved, strictly; the bounds of others are not positive."""
        proved = torch.zeros_like(bound, dtype=torch.bool)
        promising = (bound > 0).nonzero()[:, 0]
        strict = self.bounder.strict(problems[promising])
        strict = torch.where(torch.isfinite(strict), strict, -torch.inf)
        good = strict > 0
        proved[promising] = good
        if good.any():
            self.lowest = min(self.lowest, float(strict[good].min()))
        bound[promising[~good]] = strict[~good].to(bound).clamp(max=0.0)
        bound[torch.isnan(bound)] = -torch.inf
        return proved

    def _round(self, pool: OpenBranches) -> Tensor | None:
        """Split and bound one batch; return a counterexample if one is met."""
        batch, before, candidates = pool.take(self.settings.batch)
        whole = (candidates < 0).all(1)
        try:
            point = self._leaves(batch[whole]) if whole.any() else None
            if point is None and not whole.all():
                self._split(pool, batch[~whole], before[~whole], candidates[~whole])
            return point
        except OutOfTimeError:
            pool.add(batch, before, candidates)
            raise

    def _split(
        self, pool: OpenBranches, batch: Branches, before: Tensor, candidates: Tensor
    ) -> None:
        """Split each subproblem at one neuron and bound both children."""
        neuron = self._choose(batch, candidates)
        children = join([batch.split(neuron, 1), batch.split(neuron, -1)])
        bound, children, costs = self.bounder.improve(
            children,
            iterations=self.settings.iterations,
            alpha_rate=self.settings.alpha_rate,
            beta_rate=self.settings.beta_rate,
        )
        still = ~self._prove(bound, children)
        self.count += len(children)
        # What held for the parent holds for its children.
        bound = torch.maximum(bound, before.repeat(2))
        pool.add(children[still], bound[still], self._candidates(costs[still]))

    def _choose(self, batch: Branches, candidates: Tensor) -> Tensor:
        """Return the candidate whose worse child has the highest bound."""
        count = candidates.shape[1]
        if count == 1:
            return candidates[:, 0]
        tried = candidates.flatten().clamp(min=0)
        parts = batch[torch.arange(len(batch), device=tried.device).repeat_interleave(count)]
        up, down = (self._glance(parts.split(tried, sign)) for sign in (1, -1))
        value = torch.minimum(up, down) + 1e-3 * torch.maximum(up, down)
        # A neuron goes first even if its bounds are not finite.
        value = value.nan_to_num(nan=torch.finfo(value.dtype).min).view_as(candidates)
        best = torch.where(candidates < 0, -torch.inf, value).argmax(1, keepdim=True)
        return candidates.gather(1, best)[:, 0]

    def _glance(self, problems: Branches) -> Tensor:
        """Bound subproblems with the parameters they have, as many at once as fit into memory."""
        parts = torch.arange(len(problems), device=problems.row.device).split(self.bounder.chunk)
        return torch.cat([self.bounder.look(problems[part]).bound for part in parts])

    def _leaves(self, problems: Branches) -> Tensor | None:
        """Work on subproblems that nothing is left to split in: only multipliers can help."""
        bound = problems.beta.new_full((len(problems),), -torch.inf)
        for rate in LEAF_RATES:
            bound, problems, _ = self.bounder.improve(
                problems, iterations=self.settings.leaf_iterations, beta_rate=rate
            )
        open_ones = ~self._prove(bound, problems)
        if not open_ones.any():
            return None
        point = self._refute(problems[open_ones])
        if point is None:
            self.stuck += int(open_ones.sum())
            self.lowest = min(self.lowest, float(bound[open_ones].min()))
        return point

    def _try(self, pool: OpenBranches) -> Tensor | None:
        """Try the points at which the lowest bounds are attained as counterexamples."""
        return self._refute(pool.peek(min(TRIED, self.bounder.chunk)))

    def _refute(self, problems: Branches) -> Tensor | None:
        points = self.bounder.look(problems).point
        return self.refute(points.flatten(1), self.group[problems.row])
