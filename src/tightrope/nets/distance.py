"""The layers of l-infinity-distance nets and SortNet (Zhang et al. 2021, 2022).

Every layer is 1-Lipschitz in the l-infinity norm, so that a margin above twice the radius proves
robustness. Outside Tightrope they are layers like others: `forward` computes the neuron that is
evaluated. Training by large finite powers is in `powers.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tightrope.graph.distance import distance

TERMS = 10  # of a sort neuron: those behind hardly count
MOMENTUM = 0.1  # of running means


class Distance(nn.Module):
    """Distances to rows of weights.

    `keep` is the probability q with which SortNet keeps an input in training. The neuron that is
    evaluated is the sum of the largest distances a_(i) with shares q (1 - q)^(i - 1), of which ten
    are taken and made to add up to 1; with q = 1 it is the largest one.
    """

    shares: Tensor

    def __init__(self, inputs: int, outputs: int, keep: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.keep = keep
        # Part of the architecture, not of the weights.
        self.register_buffer("shares", sort_shares(keep, inputs), persistent=False)
        self.composed = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the distances: [batch, outputs]."""
        if self.composed:  # of operations that every runtime knows
            gaps = (x.unsqueeze(1) - self.weight).abs()
            if len(self.shares) == 1:
                return gaps.amax(2)
            return (gaps.topk(len(self.shares), 2).values * self.shares).sum(2)
        found: Tensor = distance(x, self.weight, self.shares)[0]
        return found

    def extra_repr(self) -> str:
        """Show the sizes when the network is printed."""
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, keep={self.keep:g}"


def sort_shares(keep: float, inputs: int) -> Tensor:
    """Return the shares of the largest distances in a sort neuron; they add up to 1."""
    count = 1 if keep == 1 else min(TERMS, inputs)
    total = 1 - (1 - keep) ** count
    shares = [keep * (1 - keep) ** i / total for i in range(count)]
    return torch.tensor(shares, dtype=torch.get_default_dtype())


class MeanShift(nn.Module):
    """Subtracts the mean of each number: that of the batch in training, else the running one."""

    mean: Tensor

    def __init__(self, size: int, momentum: float = MOMENTUM) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the shifted numbers."""
        if not self.training:
            return x - self.mean
        mean = x.mean(0)
        with torch.no_grad():
            self.mean.lerp_(mean, self.momentum)
        return x - mean


class Bias(nn.Module):
    """Adds a number to each output."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sums."""
        return x + self.bias


class Nearest(nn.Module):
    """Makes logits of distances: the nearest class has the largest one, times a learnt scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return -x * self.scale


class FixedScale(nn.Module):
    """Multiplies by a constant, such as one over the root of the number of inputs."""

    factor: Tensor

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1 / math.sqrt(inputs)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled numbers."""
        return x * self.factor
