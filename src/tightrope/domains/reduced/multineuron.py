"""Multi-neuron constraints: what a few ReLU neurons of one layer can do together.

Single-neuron relaxations let every output reach the top of its triangle at once. Bounds on
sums and differences of pre-activations show which combinations occur, and the convex hull
over a group of neurons (`hulls`) turns them into linear constraints on inputs and outputs.
Constraints hold for every real point that satisfies the bounds they were made from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightrope.domains.reduced.hulls import Facets, Floats, directions, hull_constraints
from tightrope.errors import UserError

RowBounds = Callable[[Tensor], Tensor]
"""Coefficients [rows, n] over a layer's neurons -> sound upper bounds [rows] of their sums."""

_LARGEST = 1e100  # bounds beyond this say nothing, and sums of them may overflow


@dataclass(frozen=True)
class Constraints:
    """Constraints `on_outputs y + on_inputs h + constant <= 0` on the n neurons of one layer.

    In float64, on the device of the bounds. They hold for the numbers as they are: who rounds
    them to another type has to weaken the constants by the rounding errors.
    """

    on_outputs: Tensor  # [G, n], dense or sparse (CSR)
    on_inputs: Tensor  # [G, n], dense or sparse (CSR)
    constant: Tensor  # [G]

    def __len__(self) -> int:
        return len(self.constant)


@dataclass(frozen=True)
class GroupSettings:
    """Which groups of neurons get constraints, and how many of them."""

    size: int = 3  # neurons per group
    partition: int = 50  # groups are formed among so many neurons of similar area
    overlap: int = 1  # neurons that two groups may share
    limit: int = 1000  # neurons per layer that are considered, those of largest area
    smallest_area: float = 0.01  # -lower * upper of the neurons that are considered
    most_per_group: int | None = 40  # constraints per group; None: all facets of the hull
    smallest_cut: float = 1e-6  # constraints that cut off less than this are left out
    keep: float = 1.0  # fraction of a layer's constraints that is kept, the deepest cuts
    rows_at_once: int = 1024  # rows per call for bounds
    sparse: bool = False  # return sparse matrices (CSR)

    def __post_init__(self) -> None:
        valid = {
            "size": (self.size in (2, 3), "2 or 3"),
            "partition": (self.partition >= self.size, "at least the size of a group"),
            "overlap": (0 <= self.overlap < self.size, "at least 0, less than size"),
            "limit": (self.limit >= 0, "at least 0"),
            "smallest_area": (self.smallest_area >= 0, "at least 0"),
            "most_per_group": (self.most_per_group is None or self.most_per_group > 0, "positive"),
            "keep": (0 <= self.keep <= 1, "between 0 and 1"),
            "rows_at_once": (self.rows_at_once > 0, "positive"),
        }
        for name, (fine, expected) in valid.items():
            if not fine:
                value = getattr(self, name)
                raise UserError(f"multi-neuron setting {name} is {value}; it must be {expected}")


# --- groups ---------------------------------------------------------------------------------


def choose_groups(
    lower: Tensor,
    upper: Tensor,
    *,
    size: int = 3,
    partition: int = 50,
    overlap: int = 1,
    limit: int = 1000,
    smallest_area: float = 0.01,
) -> list[tuple[int, ...]]:
    """Return groups of unstable neurons, each group in increasing order.

    The neurons with the largest areas `-lower * upper` are considered, in partitions of
    similar area. In each, all groups of `size` are gone through in lexicographic order (largest
    areas first) and taken if they share at most `overlap` neurons with each group before. If a
    partition has fewer neurons than `size`, but two or more, they are one group.
    """
    lower, upper = lower.double(), upper.double()
    usable = (lower < 0) & (upper > 0) & (lower >= -_LARGEST) & (upper <= _LARGEST)
    area = torch.where(usable, -lower * upper, -1.0)
    order = torch.argsort(area, descending=True, stable=True)[:limit]
    order = order[(area[order] >= smallest_area) & usable[order]]
    neurons = order.tolist()
    groups = []
    for start in range(0, len(neurons), partition):
        part = neurons[start : start + partition]
        for members in _pattern(len(part), min(size, len(part)), overlap):
            groups.append(tuple(sorted(part[i] for i in members)))
    return groups


@lru_cache(maxsize=64)
def _pattern(count: int, size: int, overlap: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups out of `count` positions; two share no `overlap + 1` positions."""
    if size < 2:
        return ()
    taken: set[tuple[int, ...]] = set()
    groups = []
    for group in combinations(range(count), size):
        shared = list(combinations(group, overlap + 1))
        if taken.isdisjoint(shared):
            taken.update(shared)
            groups.append(group)
    return tuple(groups)


# --- constraints ----------------------------------------------------------------------------


def layer_constraints(
    lower: Tensor,
    upper: Tensor,
    bound_rows: RowBounds,
    settings: GroupSettings | None = None,
) -> Constraints | None:
    """Return constraints on groups of a layer's neurons, or None if there are none.

    `lower`, `upper`: sound bounds [n] of the pre-activations; `bound_rows` is asked for sound
    upper bounds of their sums and differences. Neurons that are stable, or whose bounds are not
    finite, are in no group; a row bound that is not finite is not used.
    """
    settings = settings or GroupSettings()
    groups = choose_groups(
        lower,
        upper,
        size=settings.size,
        partition=settings.partition,
        overlap=settings.overlap,
        limit=settings.limit,
        smallest_area=settings.smallest_area,
    )
    parts: list[tuple[NDArray[np.intp], Facets]] = []
    for size in (2, 3):
        members = np.array([group for group in groups if len(group) == size], np.intp)
        if len(members):
            facets = _facets(lower, upper, members, bound_rows, settings)
            parts.append((members[facets.group], facets))
    parts = _deepest(parts, settings.keep)
    count = sum(len(facets) for _, facets in parts)
    if count == 0:
        return None
    outputs = _matrix([(at, facets.outputs) for at, facets in parts], lower, settings.sparse)
    inputs = _matrix([(at, facets.inputs) for at, facets in parts], lower, settings.sparse)
    constant = np.concatenate([facets.constant for _, facets in parts])
    return Constraints(outputs, inputs, torch.from_numpy(constant).to(lower.device))


def _facets(
    lower: Tensor,
    upper: Tensor,
    members: NDArray[np.intp],
    bound_rows: RowBounds,
    settings: GroupSettings,
) -> Facets:
    low, high = (t.detach().to("cpu", torch.float64).numpy()[members] for t in (lower, upper))
    return hull_constraints(
        low,
        high,
        _offsets(lower, members, bound_rows, settings.rows_at_once),
        most=settings.most_per_group,
        smallest_cut=settings.smallest_cut,
    )


def _offsets(
    lower: Tensor, members: NDArray[np.intp], bound_rows: RowBounds, rows_at_once: int
) -> Floats:
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
    bounds = []
    for part in np.array_split(asked, -(-len(asked) // rows_at_once)):
        # Column 0 collects the zeros.
        rows = torch.zeros(len(part), len(lower) + 1, dtype=lower.dtype, device=lower.device)
        at = torch.from_numpy(part).to(lower.device)
        rows = rows.scatter(1, at.abs(), at.sign().to(rows.dtype))[:, 1:].contiguous()
        answer = bound_rows(rows)
        if answer.shape != (len(part),):
            raise ValueError(f"{len(part)} rows have bounds of shape {tuple(answer.shape)}")
        bounds.append(answer.detach().to("cpu", torch.float64).numpy())
    offsets = np.full((len(members), len(table)), np.inf)
    offsets[:, mixed] = np.concatenate(bounds)[row].reshape(len(members), -1)
    return offsets


def _deepest(
    parts: list[tuple[NDArray[np.intp], Facets]], keep: float
) -> list[tuple[NDArray[np.intp], Facets]]:
    """Return the fraction `keep` of all facets that cut off most, in the same order."""
    cuts = np.concatenate([facets.cut for _, facets in parts] or [np.zeros(0)])
    kept = np.zeros(len(cuts), bool)
    kept[np.argsort(-cuts, kind="stable")[: int(np.ceil(keep * len(cuts)))]] = True
    chosen = []
    for at, facets in parts:
        now, kept = kept[: len(facets)], kept[len(facets) :]
        chosen.append((at[now], facets[now]))
    return chosen


def _matrix(parts: list[tuple[NDArray[np.intp], Floats]], lower: Tensor, sparse: bool) -> Tensor:
    """Return the matrix [G, n] whose rows have the coefficients at the neurons given."""
    sizes = np.concatenate([np.full(len(at), at.shape[1], np.intp) for at, _ in parts])
    rows = np.repeat(np.arange(len(sizes)), sizes)
    columns = np.concatenate([at.ravel() for at, _ in parts])
    values = np.concatenate([coefficients.ravel() for _, coefficients in parts])
    shape = (len(sizes), len(lower))
    if not sparse:
        dense = torch.zeros(shape, dtype=torch.float64)
        dense[torch.from_numpy(rows), torch.from_numpy(columns)] = torch.from_numpy(values)
        return dense.to(lower.device)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # "is in beta state"
        return torch.sparse_csr_tensor(
            starts,
            torch.from_numpy(columns),
            torch.from_numpy(values),
            shape,
            dtype=torch.float64,
            device=lower.device,
        )
