"""Subproblems of a network: its box, cut by the signs of some neurons."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Branches:
    """A batch of D subproblems, each with at most M splits.

    `row` says which row of the property each one is about. A split is a neuron, counted over all
    unstable neurons, and its sign; a sign of zero is no split.
    """

    row: Tensor  # [D]
    alpha: Tensor  # [D, U]
    neuron: Tensor  # [D, M]
    sign: Tensor  # [D, M]
    beta: Tensor  # [D, M]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Tensor | slice) -> Branches:
        return Branches(**{k: v[index] for k, v in vars(self).items()})

    def split(self, neuron: Tensor, sign: int) -> Branches:
        """Return the same with one more split each."""
        count = len(self)
        return replace(
            self,
            neuron=torch.cat((self.neuron, neuron[:, None].to(self.neuron)), 1),
            sign=torch.cat((self.sign, self.sign.new_full((count, 1), sign)), 1),
            beta=torch.cat((self.beta, self.beta.new_zeros(count, 1)), 1),
        )


def join(parts: list[Branches]) -> Branches:
    """Put batches together; where there are fewer splits, there are signs of zero."""
    most = max(part.sign.shape[1] for part in parts)

    def padded(t: Tensor) -> Tensor:
        return F.pad(t, (0, most - t.shape[1]))

    return Branches(
        row=torch.cat([part.row for part in parts]),
        alpha=torch.cat([part.alpha for part in parts]),
        neuron=torch.cat([padded(part.neuron) for part in parts]),
        sign=torch.cat([padded(part.sign) for part in parts]),
        beta=torch.cat([padded(part.beta) for part in parts]),
    )
