"""Branch and bound: a property of one box, decided by splitting ReLUs.

All rows of the property that are not proved yet share one pool of subproblems. Each round takes
those with the lowest bounds, splits a neuron of each (several while there are few), and bounds
all children at once. The search runs on a reduced network in float32; a subproblem is closed
only by a strict bound (`tightrope.domains.reduced.replay`). Points where bounds
are attained are tried as counterexamples.

The property is safe if in each *group* of rows at least one row is positive everywhere; a
counterexample makes all rows of some group nonpositive.

A search that goes on for long gets multi-neuron constraints (`cutting.py`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, falsified, undecided, verified
from tightrope.budget import fitting, rows_at_once
from tightrope.certification.raids import raid_is_due
from tightrope.certification.refutation import Refute
from tightrope.certification.search import branching
from tightrope.certification.search.cutting import Cutter, with_room
from tightrope.certification.search.patience import TRIAL, Patience, spread
from tightrope.certification.search.pool import Pool
from tightrope.certification.search.sharing import share
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.reduced.leaves import solve_leaf
from tightrope.domains.reduced.reduction import Reduced
from tightrope.domains.reduced.regions import KEPT, Regions, Tightener, work
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder, Subproblems, join

# Points of the lowest bounds are tried in each of the first rounds, and every so many later.
EAGER = 8
TRIED = 64
# Multi-neuron constraints are chosen by what so many subproblems of the lowest bounds need.
CUT_FOR = 512


@dataclass(frozen=True)
class SearchSettings:
    """How the search goes about it."""

    batch: int = 512
    iterations: int = 6
    # Where many rounds of splits did not decide, better multipliers may.
    quick_rounds: int = 8
    patient_iterations: int = 20
    root_iterations: int = 40
    alpha_rate: float = 0.1
    beta_rate: float = 0.1
    branching: str = "intercept"
    candidates: int = 3
    smallest_batch: int = 64
    # Subproblems of a round whose neurons may be bounded again, and after how many more signs
    # (None: when it pays).
    regions: int = 128
    region_depth: int | None = None
    cuts: str = "auto"  # or off, or on: when multi-neuron constraints are chosen
    memory: int = 2 << 30


DEFAULTS = SearchSettings()


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
        self.cutter = Cutter(network, settings.cuts)
        self.bounder = Bounder(self.network.to(torch.float32))
        self.regions = Regions.of(network)
        self.patience = Patience(network.size, work(network))
        self._tightener: Tightener | None = None
        self.pool: Pool | None = None
        self.count = 0
        self.rounds = 0
        self.stuck = 0
        self.lowest = float("inf")

    def begin(self) -> Answer:
        """Bound all rows without splits; each open group goes on with its best row."""
        rows = torch.arange(len(self.group), device=self.group.device)
        bound, problems = self.bounder.improve(
            self.bounder.root(rows),
            iterations=self.settings.root_iterations,
            alpha_rate=self.settings.alpha_rate,
        )
        self.count += len(problems)
        proved, strict = self._prove(bound, problems, rows)
        settled = self.group[proved].unique()
        # The best row of each group comes first in it.
        order = bound.argsort(descending=True, stable=True)
        order = order[self.group[order].argsort(stable=True)]
        first = torch.ones_like(proved)
        first[1:] = self.group[order[1:]] != self.group[order[:-1]]
        index = order[first & ~torch.isin(self.group[order], settled)]
        self.roots = problems[index]
        self.pool = Pool(problems[index], bound[index])
        if not len(self.pool):
            return self._proof()
        best = strict.new_full((int(self.group.max()) + 1,), -torch.inf)
        best = best.scatter_reduce(0, self.group, _number(strict), "amax")[self.group]
        return undecided(bound=float(best.min()), subproblems=self.count)

    def run(self, deadline: float) -> Answer:
        """Search until everything is decided or `time.monotonic()` passes the deadline."""
        if self.pool is None:
            self.begin()
        pool = self.pool
        assert pool is not None
        try:
            with until(Deadline(deadline)):
                found = self._search(pool, deadline)
        except OutOfTimeError:
            return self._unfinished(pool, Cause.TIME)
        if isinstance(found, Cause):
            return self._unfinished(pool, found)
        if found is not None:
            return falsified(found, self.count)
        return self._unfinished(pool, Cause.TOO_CLOSE) if self.stuck else self._proof()

    def _search(self, pool: Pool, deadline: float) -> Tensor | Cause | None:
        """Split until nothing is left; return a counterexample, or what there is no more of."""
        point = self._try(pool) if len(pool) else None
        while len(pool) and point is None:
            cause = self._out_of_budget(pool, deadline)
            if cause is not None:
                return cause
            deadline = share(self, pool, deadline)
            if self.cutter.is_due(self.count, len(pool), self.patience):
                self._cut(pool, deadline)
            if self._trial_is_due:
                self._begin_again(pool)
            point = self._round(pool, deadline) if len(pool) else None
            self.rounds += 1
            # What the first few rounds did not find becomes ever less likely to be there.
            now = self.rounds <= EAGER or self.rounds % EAGER == 0 or raid_is_due(self.refute)
            if point is None and len(pool) and now:
                point = self._try(pool)
        return point

    def _out_of_budget(self, pool: Pool, deadline: float) -> Cause | None:
        if time.monotonic() > deadline:
            return Cause.TIME
        memory = fitting(self.settings.memory, self.group.device)
        return Cause.MEMORY if pool.bytes > memory else None

    def _proof(self) -> Answer:
        return verified(self.lowest, self.count)

    def _unfinished(self, pool: Pool, cause: Cause) -> Answer:
        """Say how far the search came; of what is open, only float32 knows a bound."""
        lowest = min(self.lowest, pool.lowest) if len(pool) else self.lowest
        left = f"{len(pool) + self.stuck} subproblems open of {self.count}"
        return undecided(cause, f"lowest bound {lowest:.4g}, {left}", subproblems=self.count)

    def _prove(
        self, bound: Tensor, problems: Subproblems, promising: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return which subproblems are proved, and strict bounds of the promising ones.

        The bounds of those that are not proved are not positive afterwards.
        """
        proved = torch.zeros_like(bound, dtype=torch.bool)
        some = problems[promising]
        strict = strict_bounds(self.network, some, cuts=self.cutter.cuts, regions=self.regions.box)
        good = torch.isfinite(strict) & (strict > 0)
        proved[promising] = good
        if good.any():
            self.lowest = min(self.lowest, float(strict[good].min()))
            if (some.region[good] > 0).any():  # what holds there holds where rows are that small
                self.lowest = min(self.lowest, KEPT)
        bad = promising[~good]
        bound[bad] = torch.minimum(bound[bad], _number(strict[~good]).clamp(max=0.0).to(bound))
        return proved, strict

    def _round(self, pool: Pool, deadline: float) -> Tensor | None:
        """Split and bound one batch; return a counterexample if one is met."""
        batch, before = pool.take(self._batch)
        try:
            return self._work_on(pool, batch, before, deadline)
        except OutOfTimeError:
            pool.add(batch, before)
            raise

    def _work_on(
        self, pool: Pool, batch: Subproblems, before: Tensor, deadline: float
    ) -> Tensor | None:
        free = self._free(batch)
        if (free == 0).any():
            leaves, bound = batch[free == 0], before[free == 0]
            done, point = self._solve_leaves(leaves, deadline)
            pool.add(leaves[done:], bound[done:])
            batch, before = batch[free > 0], before[free > 0]
            if not len(batch) or point is not None:
                return point
        batch = self._tightened(pool, batch, before)
        if not len(batch):
            return None
        neurons = self._chosen(batch, self._levels(len(batch), int(self._free(batch).min())))
        started = time.monotonic()
        new = branching.children(batch, neurons)
        count = len(new)
        bound, new = self._bound(new, self._iterations)
        self.patience.note_children(count, time.monotonic() - started)
        pool.add(new, bound)
        return None

    def _tightened(self, pool: Pool, batch: Subproblems, before: Tensor) -> Subproblems:
        """Bound the neurons of deep subproblems again; return what is left to be split."""
        fixed, patience = self.settings.region_depth, self.patience
        if self.regions.full or not (fixed is not None or patience.is_due(self.count)):
            return batch
        wanted = self.regions.since(batch) >= (patience.depth if fixed is None else fixed)
        due = spread(wanted, patience.most(self.settings.regions))
        if not due.any():
            return batch
        rest = ~due
        waiting = wanted & rest if patience.eager else torch.zeros_like(due)
        bound, chosen = self._make_regions(batch[due])
        pool.add(batch[waiting], before[waiting])
        free = ((chosen.sign == 0) & self.bounder.bends).any(1)
        pool.add(chosen[~free], bound[~free])
        return join([batch[rest & ~waiting], chosen[free]])

    def _make_regions(self, problems: Subproblems) -> tuple[Tensor, Subproblems]:
        """Bound the neurons of subproblems again; return those that stay open."""
        started = time.monotonic()
        box = self.tightener(problems, self.regions.held(problems))
        still = ~(box.lower > box.upper).any(1)
        if not still.all():
            self.lowest = min(self.lowest, KEPT)
        left = self.regions.enter(problems[still], box.map(lambda t: t[still]), self.bounder)
        bound, left = self._bound(left, self.settings.patient_iterations)
        self.patience.note_regions(len(problems), len(left), time.monotonic() - started)
        return bound, left

    def _begin_again(self, pool: Pool) -> None:
        """See if regions near the root close most of what is there; if so, go on from there."""
        roots = self.roots
        levels = max(2, math.ceil(math.log2(2 * TRIAL / len(roots))))
        chosen = self._chosen(roots, min(levels, int(self._free(roots).min())))
        bound, new = self._bound(branching.children(roots, chosen), self.settings.iterations)
        tried = spread(torch.ones_like(bound, dtype=torch.bool), TRIAL)
        if not len(bound):
            pool.take_all()
            return
        lowest, left = self._make_regions(new[tried])
        if self.patience.eager:
            pool.take_all()
            pool.add(new[~tried], bound[~tried])
            pool.add(left, lowest)

    def _free(self, problems: Subproblems) -> Tensor:
        """Return how many neurons of subproblems can be split, [D]."""
        return ((problems.sign == 0) & self.bounder.bends).sum(1)

    def _chosen(self, problems: Subproblems, levels: int) -> Tensor:
        """Return the neurons to split, [D, levels]."""
        return branching.choose(
            self.bounder,
            problems,
            rule=self.settings.branching,
            levels=levels,
            candidates=max(self.settings.candidates, levels),
        )

    def _bound(self, problems: Subproblems, iterations: int) -> tuple[Tensor, Subproblems]:
        """Bound subproblems; return those that stay open."""
        bound, problems = self.bounder.improve(
            problems,
            iterations=iterations,
            alpha_rate=self.settings.alpha_rate,
            beta_rate=self.settings.beta_rate,
        )
        self.count += len(problems)
        promising = (bound > 0).nonzero()[:, 0]
        if not len(promising):
            return bound, problems
        still = ~self._prove(bound, problems, promising)[0]
        return bound[still], problems[still]

    @property
    def _trial_is_due(self) -> bool:
        """Whether to see what regions do near the root, with much more being open."""
        if self.settings.region_depth is not None:
            return False
        open_ones = len(self.pool or ()) / len(self.roots)
        return self.patience.trial_is_due(self.count, open_ones) and not self.regions.full

    @property
    def tightener(self) -> Tightener:
        """What bounds neurons again."""
        if self._tightener is None:
            self._tightener = Tightener(self.network, self.group)
        return self._tightener

    @property
    def _batch(self) -> int:
        """How many subproblems a round takes: few of large networks, to see the clock in time."""
        return min(self.settings.batch, rows_at_once(1 << 62, 1, self.network.work / 2))

    def _cut(self, pool: Pool, deadline: float) -> None:
        """Choose constraints for what is open, and bound all of that with them."""
        some, end = pool.peek(CUT_FOR), Deadline(deadline)
        better = self.cutter.find(self.bounder, some, self.count, end)
        if better is None:
            return
        self.bounder = better
        self.roots = with_room(self.roots, better)
        problems, bound = pool.take_all()
        problems = with_room(problems, better)
        pool.arrays["gamma"] = problems.gamma[:0]
        step = 2 * self.settings.batch
        for start in range(0, len(bound), step):
            part = problems[start : start + step]
            try:
                Deadline(deadline).check()
                still, left = self._bound(part, self.settings.patient_iterations)
            except OutOfTimeError:  # nothing may be lost: the search may go on later
                pool.add(problems[start:], bound[start:])
                return
            pool.add(left, still)

    @property
    def _iterations(self) -> int:
        quick = self.rounds < self.settings.quick_rounds
        return self.settings.iterations if quick else self.settings.patient_iterations

    def _levels(self, count: int, free: int) -> int:
        levels = 1
        # A batch of regions is large enough by their neurons.
        most = 1 if self.patience.eager else 4
        while count << (levels + 1) <= self.settings.smallest_batch * 2 and levels < most:
            levels += 1
        return min(levels, free)

    def _try(self, pool: Pool) -> Tensor | None:
        """Try the points at which the lowest bounds are attained as counterexamples."""
        problems = pool.peek(TRIED)
        points = self.bounder.minimizer(self.bounder.look(problems))
        return self.refute(points, self.group[problems.row])

    def _solve_leaves(self, problems: Subproblems, deadline: float) -> tuple[int, Tensor | None]:
        """Solve fully split subproblems; return how many, and a counterexample if one is met."""
        for i in range(len(problems)):
            if time.monotonic() > deadline:
                return i, None
            one = problems[i : i + 1]
            group = self.group[one.row[0]]
            rows = (self.group == group).nonzero()[:, 0]
            try:
                leaf = solve_leaf(self.network, replace(one, beta=one.beta.double()), rows)
            except ValueError:  # numbers that are not finite: there is no such linear program
                self.stuck, self.lowest = self.stuck + 1, float("-inf")
                continue
            # All rows nonpositive make any such combination nonpositive.
            weights = self.network.lower.new_zeros(1, len(self.group))
            weights[0, rows] = leaf.weights
            bound = strict_bounds(self.network, leaf.problem, weights, regions=self.regions.box)
            if torch.isfinite(bound[0]) and bound[0] > 0:
                self.lowest = min(self.lowest, float(bound[0]))
                if one.region[0] > 0:
                    self.lowest = min(self.lowest, KEPT)
                continue
            if leaf.point is not None:
                found = self.refute(leaf.point[None], group[None])
                if found is not None:
                    return i + 1, found
            self.stuck += 1
            self.lowest = min(self.lowest, _number(bound)[0].item())
        return len(problems), None


def _number(bound: Tensor) -> Tensor:
    """Return bounds, those that are not finite as what they say: nothing."""
    return torch.where(torch.isfinite(bound), bound, -torch.inf)
