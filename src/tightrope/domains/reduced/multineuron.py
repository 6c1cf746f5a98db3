"""Multi-neuron constraints: what a few ReLU neurons of one layer can do together.

Single-neuron relaxations let every output reach the top of its triangle at once. Bounds on
sums and differences of pre-activations show which combinations occur, and the convex hull
over a group of neurons (`hulls`) turns them into linear constraints on inputs and outputs.
Constraints hold for every real point that satisfies the bounds they were made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightrope.domains.reduced.hulls import Floats, directions, hull_constraints

RowBounds = Callable[[Tensor], Tensor]
"""Coefficients [rows, n] over a layer's neurons -> sound upper bounds [rows] of their sums."""

_LARGEST = 1e100  # bounds beyond this say nothing, and sums of them may overflow
SMALLEST_CUT = 1e-6  # constraints that cut off less than this are left out


@dataclass(frozen=True)
class Constraints:
    """Constraints `on_outputs y + on_inputs h + constant <= 0` on the n neurons of one layer.

    In float64, on the device of the bounds. They hold for the numbers as they are: who rounds
    them to another type has to weaken the constants by the rounding errors.
    """

    on_outputs: Tensor  # [G, n]
    on_inputs: Tensor  # [G, n]
    constant: Tensor  # [G]

    def __len__(self) -> int:
        return len(self.constant)


def usable(lower: Tensor, upper: Tensor) -> Tensor:
    """Return which neurons may be in groups: unstable ones, with bounds that say something."""
    return (lower < 0) & (upper > 0) & (lower >= -_LARGEST) & (upper <= _LARGEST)


def layer_constraints(
    lower: Tensor,
    upper: Tensor,
    groups: Tensor,
    bound_rows: RowBounds,
    *,
    most: int | None = None,
    smallest_cut: float = SMALLEST_CUT,
) -> Constraints | None:
    """Return constraints on groups of a layer's neurons, or None if there are none.

    `lower`, `upper`: sound bounds [n] of the pre-activations; `groups`, [groups, 2 or 3]: the
    neurons of each; `bound_rows` is asked for sound upper bounds of their sums and differences. A
    group of neurons that are not `usable` has no constraints, and a row bound that is not finite is
    not used. `most` is the number of constraints per group, those that cut off most.
    """
    groups = groups[usable(lower, upper)[groups].all(1)]
    if not len(groups):
        return None
    members = groups.cpu().numpy()
    low, high = (t.detach().to("cpu", torch.float64).numpy()[members] for t in (lower, upper))
    offsets = _offsets(lower, members, bound_rows)
    facets = hull_constraints(low, high, offsets, most=most, smallest_cut=smallest_cut)
    if not len(facets):
        return None
    at = members[facets.group]
    return Constraints(
        _matrix(at, facets.outputs, lower),
        _matrix(at, facets.inputs, lower),
        torch.from_numpy(facets.constant).to(lower.device),
    )


def _offsets(lower: Tensor, members: NDArray[np.intp], bound_rows: RowBounds) -> Floats:
    """Return bounds [groups, directions], infinite where the box of the neurons has them all.

    Rows that several groups ask for are bounded once. A row is written as its neurons' numbers
    from one on, with the signs of the coefficients, zeros last.
    """
    table = directions(members.shape[1]).astype(np.intp)
    signed = table * (members + 1)[:, None]
    signed = np.take_along_axis(signed, np.argsort(signed == 0, axis=2, kind="stable"), 2)
    mixed = np.abs(table).sum(1) > 1
    asked, row = np.unique(
        signed[:, mixed].reshape(-1, table.shape[1]), axis=0, return_inverse=True
    )
    # Column 0 collects the zeros.
    rows = torch.zeros(len(asked), len(lower) + 1, dtype=lower.dtype, device=lower.device)
    at = torch.from_numpy(asked).to(lower.device)
    rows = rows.scatter(1, at.abs(), at.sign().to(rows.dtype))[:, 1:].contiguous()
    answer = bound_rows(rows)
    if answer.shape != (len(asked),):
        raise ValueError(f"{len(asked)} rows have bounds of shape {tuple(answer.shape)}")
    offsets = np.full((len(members), len(table)), np.inf)
    bounds = answer.detach().to("cpu", torch.float64).numpy()
    offsets[:, mixed] = bounds[row].reshape(len(members), -1)
    return offsets


def _matrix(at: NDArray[np.intp], values: Floats, lower: Tensor) -> Tensor:
    """Return the matrix [G, n] whose rows have the coefficients at the neurons given."""
    dense = torch.zeros(len(at), len(lower), dtype=torch.float64)
    dense.scatter_(1, torch.from_numpy(at), torch.from_numpy(values))
    return dense.to(lower.device)
