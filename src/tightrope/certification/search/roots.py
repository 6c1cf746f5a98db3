"""The root of a search on a large network: cheap bounds first, better ones where they pay.

Slopes are optimised for the rows of the property alone, over bounds of the neurons that are given
(intervals, say). For the rows that stay open, the neurons that cost their bounds most are bounded
again, in rounds, as long as a round brings an open bound noticeably closer to zero.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.certification.properties import Unsafe
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.subproblems import Branches
from tightrope.domains.branches.tightening import tighten, worth
from tightrope.domains.linear.bounded import Relaxation


@dataclass(frozen=True)
class RootSettings:
    """How hard to try.

    `neurons` are bounded again in each of at most so many `rounds`, the next of which takes place
    if the last has brought an open bound closer to zero by a share of `gain`.
    """

    row_iterations: int = 40
    neurons: int = 96
    neuron_iterations: int = 8
    rounds: int = 6
    gain: float = 0.1
    rate: float = 0.1


ROOT = RootSettings()


@dataclass(frozen=True)
class Root:
    """What the root came to.

    `bounds` are strict, one for each row of the property. `open` are the best rows of the groups
    that are not proved; `problems` and `costs` are about these.
    """

    bounder: GraphBounder
    bounds: Tensor
    open: Tensor
    problems: Branches
    costs: Tensor


def find_root(
    relaxation: Relaxation, unsafe: Unsafe, *, deadline: Deadline, settings: RootSettings = ROOT
) -> Root:
    """Bound the rows of a property, on a relaxation that becomes better on the way.

    The deadline ends the bounding of neurons; the rows are bounded with what there is.
    """
    rows = torch.arange(len(unsafe.group), device=unsafe.group.device)
    bounds = unsafe.matrix.new_full((len(rows),), -torch.inf)
    bounder = GraphBounder(relaxation, unsafe.matrix, unsafe.offset)
    root = _bound_rows(bounder, rows, bounds, unsafe, settings)
    done: dict[int, Tensor] = {}
    for _ in range(settings.rounds):
        rows = root.open
        if not len(rows) or deadline.left <= 0:
            break
        chosen = worth(bounder, root.costs, most=settings.neurons, apart=done)
        done = {i: torch.cat((done.get(i, places[:0]), places)) for i, places in chosen.items()}
        with until(deadline), suppress(OutOfTimeError):
            for better in tighten(bounder, chosen, iterations=settings.neuron_iterations):
                bounder = better
        before = root.bounds[rows]
        root = _bound_rows(bounder, rows, root.bounds, unsafe, settings)
        gained = (root.bounds[rows] - before) / before.abs()
        if not bool((gained > settings.gain).any()):
            break
    return root


def _bound_rows(
    bounder: GraphBounder,
    rows: Tensor,
    bounds: Tensor,
    unsafe: Unsafe,
    settings: RootSettings,
) -> Root:
    """Bound some rows; known bounds stay where they are better."""
    _, problems, costs = bounder.improve(
        bounder.root(rows), iterations=settings.row_iterations, alpha_rate=settings.rate
    )
    strict = bounder.strict(problems)
    bounds = bounds.clone()
    bounds[rows] = torch.where(strict > bounds[rows], strict, bounds[rows])
    left = open_rows(bounds, unsafe.group)
    place = torch.full_like(unsafe.group, -1).scatter(0, rows, torch.arange(len(rows)).to(rows))
    kept = place[left]
    return Root(bounder, bounds, left, problems[kept], costs[kept])


def open_rows(bounds: Tensor, group: Tensor) -> Tensor:
    """Return the best row of each group in which none is proved."""
    settled = group[torch.isfinite(bounds) & (bounds > 0)].unique()
    # The best row of each group comes first in it.
    order = bounds.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = group[order[1:]] != group[order[:-1]]
    return order[first & ~torch.isin(group[order], settled)]
