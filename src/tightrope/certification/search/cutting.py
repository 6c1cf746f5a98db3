"""Multi-neuron constraints for a search: few of them, those that lift open bounds.

Constraints on pairs of neurons (`tightrope.domains.reduced.cuts`) hold on the whole box, so every
subproblem may use them, and children inherit their multipliers. Pairs are chosen by what some open
subproblems lose at their triangles: what lifts the bounds of the root is not what subproblems with
many splits need. All constraints are tried on these, and those are kept that got the largest
multipliers. They pay if they lift bounds by more than what splits would that take as long.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.certification.search import branching
from tightrope.certification.search.patience import Patience
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.reduced.cuts import join_cuts, network_cuts
from tightrope.domains.reduced.reduction import Reduced
from tightrope.domains.reduced.splits import Bounder, Cuts, Subproblems

# After how many subproblems constraints are looked for, by what users ask for.
DUE: dict[str, tuple[int, ...]] = {
    "off": (),
    "auto": (1000, 3000, 9000, 27000, 81000),
    "on": (0, 1000, 3000, 9000, 27000, 81000),
}
# Constraints are tried on so many subproblems, for so many iterations; the most useful ones stay.
TRIED, ITERATIONS, MOST = 64, 15, 128
FEWEST = 256  # open subproblems, whose children take longer than finding constraints
# With `auto`, they have to lift bounds by so many times what a split does.
SPLITS = 0.5


@dataclass
class Cutter:
    """Finds constraints of one network when it is time to, those known before staying."""

    network: Reduced
    mode: str = "auto"
    cuts: Cuts | None = None
    made: int = 0

    def is_due(self, count: int, open_ones: int, patience: Patience) -> bool:
        """Return whether to look for constraints after so many subproblems, with so many open.

        With `auto`, regions come first where they are still to be tried, and a search that may be
        over soon goes on without.
        """
        waits = patience.trial_comes or open_ones < FEWEST
        if patience.eager or (self.mode == "auto" and waits):
            return False
        due = DUE[self.mode]
        return self.made < len(due) and count >= due[self.made]

    def find(
        self, bounder: Bounder, problems: Subproblems, count: int, deadline: Deadline
    ) -> Bounder | None:
        """Return a bounder that knows more constraints, None if none are worth it.

        They are chosen by what some open subproblems need.
        """
        self.made = sum(due <= count for due in DUE[self.mode])
        with until(deadline), suppress(OutOfTimeError):
            # Every so many, so that those of the lowest bounds, which are alike, are not alone.
            return self._find(bounder, problems[:: max(1, len(problems) // TRIED)])
        return None

    def _find(self, bounder: Bounder, problems: Subproblems) -> Bounder | None:
        before, problems = bounder.improve(problems, iterations=ITERATIONS)
        cost = branching.triangles(bounder, problems, bounder.look(problems))
        found = network_cuts(self.network, cost)
        if found is None:
            return None
        trial = self._with(bounder, found)
        _, tried = trial.improve(with_room(problems, trial), iterations=ITERATIONS)
        chosen = self._used(found, tried.gamma[:, -len(found.constant) :])
        if not len(chosen.constant):
            return None
        better = self._with(bounder, chosen)
        if self.mode == "auto" and not self._pays(bounder, better, problems, before):
            return None
        self.cuts = better_cuts = chosen if self.cuts is None else join_cuts([self.cuts, chosen])
        assert better.cuts is not None and len(better.cuts.constant) == len(better_cuts.constant)
        return better

    def _with(self, bounder: Bounder, found: Cuts) -> Bounder:
        """Return a bounder that knows constraints behind those known before."""
        cuts = found if self.cuts is None else join_cuts([self.cuts, found])
        return bounder.with_cuts(cuts.to(torch.float32))

    def _used(self, cuts: Cuts, gamma: Tensor) -> Cuts:
        """Return the constraints with the largest multipliers, each times the size of its terms."""
        network = self.network
        seen = torch.maximum(network.upper, -network.lower)
        size = cuts.on_outputs.abs() @ network.reach + cuts.on_inputs.abs() @ seen
        use = (gamma.sum(0) * size).nan_to_num(0.0)
        best = use.topk(min(MOST, len(use))).indices
        return cuts[best[use[best] > 0]]

    def _pays(
        self, bounder: Bounder, better: Bounder, problems: Subproblems, before: Tensor
    ) -> bool:
        """Return whether constraints lift bounds as splits do that take as long."""
        assert better.cuts is not None
        after, _ = better.improve(with_room(problems, better), iterations=ITERATIONS)
        neurons = branching.choose(bounder, problems, rule="intercept")
        children, _ = bounder.improve(branching.children(problems, neurons), iterations=ITERATIONS)
        lift, split = (
            float((new.clamp(max=0.0) - before.clamp(max=0.0)).mean())
            for new in (after, children.view(2, -1).amin(0))
        )
        slower = 1 + 2 * better.cuts.on_outputs.numel() / max(self.network.work, 1.0)
        return lift > max(math.log2(slower), SPLITS) * max(split, 0.0)


def with_room(problems: Subproblems, bounder: Bounder) -> Subproblems:
    """Return subproblems with multipliers for all constraints: zero for those that are new."""
    assert bounder.cuts is not None
    gamma = problems.gamma
    new = len(bounder.cuts.constant) - gamma.shape[1]
    return replace(problems, gamma=torch.cat((gamma, gamma.new_zeros(len(gamma), new)), 1))
