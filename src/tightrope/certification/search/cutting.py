"""Multi-neuron constraints for a search: found once, few of them, those that lift open bounds.

Constraints on pairs of neurons (`tightrope.domains.reduced.cuts`) hold on the whole box, so every
subproblem may use them. There are thousands, and a search is fast only with few. So all of them
are tried on some open subproblems, and those are kept that got the largest multipliers there.
What lifts the bounds of the root is not what subproblems with many splits need: pairs of signs that
cannot occur together show only there.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.reduced.cuts import network_cuts
from tightrope.domains.reduced.multineuron import GroupSettings
from tightrope.domains.reduced.reduction import Reduced
from tightrope.domains.reduced.splits import Bounder, Cuts, Subproblems

# The rounds of a search before which constraints are chosen, by what users ask for.
ROUNDS: dict[str, tuple[int, ...]] = {"off": (), "auto": (20,), "on": (0, 20)}


@dataclass(frozen=True)
class CutSettings:
    """How many constraints are found, and how many are used.

    Each is tried on so many subproblems for so many iterations; the `most` useful ones stay.
    """

    groups: GroupSettings = field(
        default_factory=lambda: GroupSettings(
            size=2, partition=32, limit=32, most_per_group=8, smallest_area=0.0
        )
    )
    tried: int = 128
    iterations: int = 30
    most: int = 256


class Cutter:
    """Finds constraints of one network when they are first asked for, and chooses among them."""

    def __init__(self, network: Reduced, *, settings: CutSettings | None = None) -> None:
        self.network, self.settings = network, settings or CutSettings()
        self.found: Cuts | None = None
        self.looked = False

    def choose(self, problems: Subproblems, deadline: Deadline) -> Cuts | None:
        """Return the constraints that some open subproblems use most; None if there are none."""
        with until(deadline), suppress(OutOfTimeError):
            if not self.looked:
                self.looked = True
                self.found = network_cuts(self.network, self.settings.groups)
            if self.found is not None:
                use = self._use(self.found, problems)
                best = use.topk(min(self.settings.most, len(use))).indices
                best = best[use[best] > 0]
                return self.found[best] if len(best) else None
        return None

    def _use(self, cuts: Cuts, problems: Subproblems) -> Tensor:
        """Return the multipliers that constraints get, summed, each times the size of its terms."""
        network = self.network
        bounder = Bounder(network.to(torch.float32), cuts.to(torch.float32))
        # Every so many, so that those of the lowest bounds, which are alike, are not alone.
        problems = problems[:: max(1, len(problems) // self.settings.tried)]
        gamma = problems.alpha.new_zeros(len(problems), len(cuts.constant))
        problems = replace(problems, gamma=gamma)
        _, problems = bounder.improve(problems, iterations=self.settings.iterations)
        seen = torch.maximum(network.upper, -network.lower)
        size = cuts.on_outputs.abs() @ network.reach + cuts.on_inputs.abs() @ seen
        return (problems.gamma.sum(0) * size).nan_to_num(0.0)
