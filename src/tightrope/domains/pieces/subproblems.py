"""Subproblems of a network: its box, cut where the inputs of some activations have some value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.box import Box, flat


@dataclass(frozen=True)
class Cuts:
    """Where to cut subproblems, one cut each: a position in the network, a number there, a value.

    A position of zero, the input's, is no cut.
    """

    node: Tensor  # [D]
    place: Tensor  # [D]
    point: Tensor  # [D], float64

    def __getitem__(self, index: Tensor | slice) -> Cuts:
        return Cuts(self.node[index], self.place[index], self.point[index])


@dataclass(frozen=True)
class Pieces:
    """A batch of D subproblems, each with at most M cuts, all of which hold.

    `row` says which row of the property each one is about. A cut says that one number that the
    activation at position `node` reads is at least `point` (a `side` of 1) or at most that (-1); a
    side of zero is no cut. `beta >= 0` are the multipliers of these inequalities.
    """

    row: Tensor  # [D]
    node: Tensor  # [D, M]
    place: Tensor  # [D, M]
    side: Tensor  # [D, M]
    point: Tensor  # [D, M], float64
    beta: Tensor  # [D, M]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Tensor | slice) -> Pieces:
        return Pieces(**{k: v[index] for k, v in vars(self).items()})

    def cut(self, where: Cuts, side: int) -> Pieces:
        """Return one side of each subproblem."""
        sides = self.side.new_full((len(self), 1), side)
        return replace(
            self,
            node=torch.cat((self.node, where.node[:, None].to(self.node)), 1),
            place=torch.cat((self.place, where.place[:, None].to(self.place)), 1),
            side=torch.cat((self.side, sides), 1),
            point=torch.cat((self.point, where.point[:, None]), 1),
            beta=torch.cat((self.beta, self.beta.new_zeros(len(self), 1)), 1),
        )

    def intervals(self, boxes: dict[int, Box]) -> Box:
        """Return what is left of the interval of each number that is cut, [D, M].

        `boxes` are the whole intervals, by the position of the activation.
        """
        low = torch.full_like(self.point, -torch.inf)
        high = torch.full_like(self.point, torch.inf)
        for i, box in boxes.items():
            mine = self.node == i
            low[mine] = flat(box.lower)[0, self.place[mine]]
            high[mine] = flat(box.upper)[0, self.place[mine]]
        same = self.node[:, :, None] == self.node[:, None, :]
        same &= self.place[:, :, None] == self.place[:, None, :]
        point = self.point[:, None, :].expand(same.shape)
        above = torch.where(same & (self.side > 0)[:, None, :], point, -torch.inf)
        below = torch.where(same & (self.side < 0)[:, None, :], point, torch.inf)
        if self.point.shape[1]:
            low = torch.maximum(low, above.amax(2))
            high = torch.minimum(high, below.amin(2))
        return Box(low, torch.maximum(low, high))


def whole(rows: Tensor) -> Pieces:
    """Return subproblems without cuts, one per row."""
    blank = torch.zeros(len(rows), 0, device=rows.device)
    return Pieces(rows, blank.long(), blank.long(), blank.to(torch.int8), blank.double(), blank)


def join(parts: list[Pieces]) -> Pieces:
    """Put batches together; where there are fewer cuts, there are sides of zero."""
    most = max(part.side.shape[1] for part in parts)

    def padded(t: Tensor) -> Tensor:
        return t if t.dim() == 1 else F.pad(t, (0, most - t.shape[1]))

    fields = vars(parts[0])
    return Pieces(**{k: torch.cat([padded(vars(part)[k]) for part in parts]) for k in fields})


def join_cuts(parts: list[Cuts]) -> Cuts:
    """Put cuts of several batches together."""
    return Cuts(**{k: torch.cat([vars(part)[k] for part in parts]) for k in vars(parts[0])})
