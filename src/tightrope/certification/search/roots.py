"""The root of a search on a large network: cheap bounds first, better ones where they pay.

Interval bounds of all neurons come first and slopes are optimised for the rows of the property
alone. For the rows that stay open, the neurons that cost their bounds most are bounded again, in
rounds, as long as a round brings the open bounds noticeably closer to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.certification.properties import Unsafe
from tightrope.deadline import Deadline
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.tightening import tighten, worth
from tightrope.domains.linear.bounded import Relaxation


@dataclass(frozen=True)
class RootSettings:
    """How hard to try; `neurons` are bounded again in each round, `gain` is what one must bring."""

    row_iterations: int = 40
    neurons: int = 96
    neuron_iterations: int = 8
    rounds: int = 8
    gain: float = 0.1


ROOT = RootSettings()


@dataclass(frozen=True)
class Root:
    """What the root came to: strict bounds of nodes and of the property's rows."""

    relaxation: Relaxation
    bounds: Tensor

    def settled(self, group: Tensor) -> Tensor:
        """Return the groups of rows that are proved."""
        proved = torch.isfinite(self.bounds) & (self.bounds > 0)
        return group[proved].unique()


def sharpen(
    relaxation: Relaxation,
    unsafe: Unsafe,
    *,
    deadline: Deadline,
    settings: RootSettings = ROOT,
) -> Root:
    """Improve strict bounds of a ReLU network's neurons for the sake of the property's rows."""
    bounder = GraphBounder(relaxation, unsafe.matrix, unsafe.offset)
    rows = torch.arange(len(unsafe.group), device=unsafe.group.device)
    bounds = unsafe.matrix.new_full((len(rows),), -torch.inf)
    bounds, costs = _bound_rows(bounder, rows, bounds, settings)
    root, done = Root(relaxation, bounds), dict[int, Tensor]()
    for _ in range(settings.rounds):
        rows = _open(root, unsafe.group)
        if not len(rows) or deadline.left <= 0:
            break
        chosen = worth(bounder, costs[rows], most=settings.neurons, apart=done)
        done = {i: torch.cat((done.get(i, places[:0]), places)) for i, places in chosen.items()}
        relaxation = tighten(relaxation, chosen, iterations=settings.neuron_iterations)
        bounder = GraphBounder(relaxation, unsafe.matrix, unsafe.offset)
        bounds, costs = _bound_rows(bounder, rows, root.bounds, settings)
        gained = (bounds - root.bounds)[rows] / root.bounds[rows].abs()
        root = Root(relaxation, bounds)
        if not bool((gained > settings.gain).any()):
            break
    return root


def _bound_rows(
    bounder: GraphBounder, rows: Tensor, bounds: Tensor, settings: RootSettings
) -> tuple[Tensor, Tensor]:
    """Return the better of known and new strict bounds of some rows, and their costs."""
    _, problems, costs = bounder.improve(
        bounder.root(rows), iterations=settings.row_iterations, alpha_rate=0.1
    )
    strict = bounder.strict(problems)
    bounds = bounds.clone()
    bounds[rows] = torch.where(strict > bounds[rows], strict, bounds[rows])
    whole = costs.new_zeros(len(bounds), costs.shape[1])
    whole[rows] = costs
    return bounds, whole


def _open(root: Root, group: Tensor) -> Tensor:
    """Return the best row of each group that is not proved yet."""
    order = root.bounds.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = group[order[1:]] != group[order[:-1]]
    return order[first & ~torch.isin(group[order], root.settled(group))]
