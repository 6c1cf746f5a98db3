"""alpha-CROWN of several boxes at once, on the network itself.

Where operations are launches, the unstable neurons of many inputs are one batch: each row has
slopes of its own, which are optimised on its own box. As many rows go together as fit into memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightrope.budget import fitting, rows_at_once
from tightrope.domains.linear.alpha import ancestors, optimize_slopes
from tightrope.domains.linear.bounded import COPIES, Relaxation
from tightrope.domains.linear.coefficients import unit_rows
from tightrope.graph import Node
from tightrope.graph.work import heaviest, products

if TYPE_CHECKING:
    from tightrope.domains.linear.crown import Effort

PASSES = 2  # of each iteration: back and forth


def optimized_units(
    relaxation: Relaxation,
    target: int,
    place: Tensor,
    owner: Tensor,
    effort: Effort,
    *,
    sign: float,
) -> Tensor:
    """Return lower bounds of single neurons of a node (or of minus them), with optimised slopes.

    Each is about the box of its `owner`. With the relaxation's rounding, bounds are strict.
    """
    shape, like = relaxation.graph.nodes[target].shape, relaxation.box.lower
    assert effort.iterations
    rough = replace(relaxation).rough  # its bounds may have become better since it was last seen
    before = _before(relaxation, target)
    held = COPIES * sum(math.prod(node.shape) for node in before) * like.element_size()
    size = rows_at_once(fitting(effort.memory, like.device), held, heaviest(before))
    parts = [like.new_zeros(0)]
    for some, mine in zip(place.split(size), owner.split(size), strict=True):
        rows = unit_rows(shape, some, mine, like, windows=False)
        rows = rows.like(rows.values * sign)
        start = rows.like(rows.values.float())
        slopes = optimize_slopes(
            rough, target, start, iterations=effort.iterations, rate=effort.rate
        )
        exact = {i: t.to(like.dtype) for i, t in slopes.items()}
        parts.append(relaxation.lower(target, rows, slopes=exact))
    return torch.cat(parts)


def worthwhile(relaxation: Relaxation, target: int, rows: int, effort: Effort) -> bool:
    """Return whether slopes of so many rows may be optimised, of all boxes together."""
    if not effort.iterations or not relaxation.lines:
        return False
    work = PASSES * rows * (effort.iterations + 1) * products(_before(relaxation, target))
    return work <= effort.work * len(relaxation.box.lower)


def _before(relaxation: Relaxation, target: int) -> list[Node]:
    nodes = relaxation.graph.nodes
    return [nodes[i] for i in sorted(ancestors(relaxation.graph, target))]
