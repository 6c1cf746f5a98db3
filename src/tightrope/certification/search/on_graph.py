"""Branch and bound on the network itself, for networks too large to be reduced.

A subproblem fixes the signs of some ReLUs, as in
`tightrope.certification.search.branch_and_bound`. Bounds come from passes through the operations of
the network (`tightrope.domains.branches`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.answer import Answer, undecided, verified
from tightrope.budget import fitting
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refute
from tightrope.certification.search.open_branches import SLOPES, OpenBranches
from tightrope.certification.search.pooled import PooledSearch, PoolSettings
from tightrope.certification.search.roots import ROOT, RootSettings, find_root
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.subproblems import Branches, join
from tightrope.domains.linear.bounded import Relaxation

SHARE = 0.25  # of the time, for the root


@dataclass(frozen=True)
class GraphSettings(PoolSettings):
    """How the search goes about it; `candidates` are tried at each split, 1: the first is taken."""

    alpha_rate: float = 0.1
    candidates: int = 1
    slopes: int = SLOPES
    root: RootSettings = ROOT


DEFAULTS = GraphSettings()


class GraphSearch(PooledSearch[Branches]):
    """The search for one property on one box, given strict bounds of a ReLU network's neurons."""

    def __init__(
        self,
        relaxation: Relaxation,
        unsafe: Unsafe,
        refute: Refute,
        *,
        settings: GraphSettings = DEFAULTS,
    ) -> None:
        super().__init__(unsafe, refute, settings)
        self.relaxation, self.settings = relaxation, settings

    @property
    def bounds(self) -> GraphBounder:
        """What bounds the subproblems."""
        return self.bounder

    def begin(self, deadline: Deadline) -> Answer:
        """Bound all rows without splits; each open group goes on with its best row."""
        soon = Deadline.after(SHARE * deadline.left)
        root = find_root(self.relaxation, self.unsafe, deadline=soon, settings=self.settings.root)
        self.bounder, self.relaxation = root.bounder, root.bounder.relaxation
        worst = self._worst_group(root.bounds)
        memory = fitting(self.settings.slopes, root.bounds.device)
        self.open = self.pool = OpenBranches(root.problems, memory=memory)
        bound = root.bounds[root.open].clamp(max=0.0)
        self.pool.add(root.problems, bound, self._candidates(root.costs))
        if not len(self.pool):
            return verified(self.lowest, self.count)
        return undecided(bound=worst, subproblems=self.count)

    def _candidates(self, costs: Tensor) -> Tensor:
        """Return the neurons that cost most, the best first; -1 where there are no more."""
        found = costs.topk(min(self.settings.candidates, costs.shape[1]), 1)
        return torch.where(found.values >= 0, found.indices, -1)

    def _round(self) -> Tensor | None:
        """Split and bound one batch; return a counterexample if one is met."""
        pool = self.pool
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
