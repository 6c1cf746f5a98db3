"""Regions: subproblems whose splits are worth bounding all neurons again.

The bounds of neurons at the root hold for every subproblem, but a counterexample inside a
subproblem has more to satisfy: the splits, of whatever layer, and the rows of the property, which
are not positive there. With multipliers for all of these, neurons of a subproblem are bounded
again, layer by layer. Some turn out to have one sign only; where the bounds of one cross, there is
no counterexample in the subproblem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import check_time
from tightrope.domains.linear.ascent import Ascent
from tightrope.domains.linear.relaxations import lines
from tightrope.domains.reduced.reduction import Reduced, join_rows
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder, Subproblems, View
from tightrope.graph import ops

# Rows are taken to be at most this much, so that what is closed has at least this margin.
KEPT = 1e-9
ITERATIONS, RATE = 8, 0.3
MEMORY = 1 << 28  # bytes of one batch of neurons


@dataclass
class Regions:
    """The bounds of all neurons in each region, [regions, U]; the first is the whole box.

    `depth` counts the signs that were decided when the region was made.
    """

    network: Reduced
    lower: Tensor
    upper: Tensor
    depth: Tensor  # [regions]

    @classmethod
    def of(cls, network: Reduced) -> Regions:
        """Return the one region that there is at the root."""
        depth = torch.zeros(1, dtype=torch.long, device=network.lower.device)
        return cls(network, network.lower[None], network.upper[None], depth)

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def box(self) -> Box | None:
        """The bounds, None as long as they are those of the root."""
        return None if len(self) == 1 else Box(self.lower, self.upper)

    @property
    def full(self) -> bool:
        """Whether no more regions fit into memory."""
        return 24 * self.lower.numel() > MEMORY

    def held(self, problems: Subproblems) -> Box:
        """Return the bounds that hold in some subproblems, [D, U]."""
        return Box(self.lower[problems.region], self.upper[problems.region])

    def since(self, problems: Subproblems) -> Tensor:
        """Return how many signs of subproblems were decided since their region was made, [D]."""
        return (problems.sign != 0).sum(1) - self.depth[problems.region]

    def enter(self, problems: Subproblems, box: Box, bounder: Bounder) -> Subproblems:
        """Return subproblems as regions of their own, with bounds of theirs; tell a bounder."""
        sign = decided(problems.sign, box)
        line = lines(ops.Relu(), box, rounding=self.network.rounding)
        bounder.chords = torch.cat((bounder.chords, line.upper_slope.to(bounder.chords)))
        bounder.peaks = torch.cat((bounder.peaks, line.upper_intercept.to(bounder.peaks)))
        numbers = torch.arange(len(self), len(self) + len(sign), device=sign.device)
        self.lower, self.upper = (
            torch.cat(pair) for pair in zip((self.lower, self.upper), box.corners, strict=True)
        )
        self.depth = torch.cat((self.depth, (sign != 0).sum(1)))
        return replace(problems, sign=sign, region=numbers)


class NeuronBounder(Bounder):
    """Bounds neurons (rows 0 to U - 1) and minus them (U to 2U - 1), each in its own region.

    `gamma` are multipliers of the property's rows, [D, R]; `allowed` says which ones may be used.
    """

    def __init__(self, network: Reduced) -> None:
        super().__init__(replace(network, rows=join_rows([network.neurons, -network.neurons])))
        self.goals = replace(network.rows, constant=network.rows.constant - KEPT)
        self.allowed = torch.zeros(0, len(network.rows), dtype=torch.bool)

    def best(self, row: Tensor, sign: Tensor, box: Box, allowed: Tensor) -> Subproblems:
        """Return parameters that make the bounds of some neurons large."""
        line = lines(ops.Relu(), box)
        self.chords, self.peaks = (t.to(self.constant) for t in line[2:])
        self.allowed = allowed
        alpha = (box.upper > -box.lower).to(self.constant)
        start = Subproblems(
            row=row,
            sign=sign,
            alpha=alpha,
            beta=torch.zeros_like(alpha),
            gamma=alpha.new_zeros(allowed.shape),
            region=torch.arange(len(row), device=row.device),
        )
        # Beyond zero the neuron has one sign, and that is enough.
        return self.improve(
            start, iterations=ITERATIONS, alpha_rate=RATE, beta_rate=RATE, gamma_rate=RATE
        )[1]

    def begin(self, problems: Subproblems) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coefficients of neurons and of what the property's rows add."""
        a, x, constant = super().begin(problems)
        return (
            a.addmm_(problems.gamma, self.goals.inner),
            x.addmm_(problems.gamma, self.goals.outer),
            constant + problems.gamma @ self.goals.constant,
        )

    def _step(self, current: Subproblems, view: View, ascent: Ascent[str]) -> None:
        h, y = self.push(view)
        x = self.minimizer(view)
        goal = y @ self.goals.inner.t() + x @ self.goals.outer.t() + self.goals.constant
        ascent.step(
            {
                "alpha": view.coefficients.clamp(min=0).mul_(h),
                "beta": (current.sign * h).neg_(),
                "gamma": torch.where(self.allowed[current.region], goal, 0.0),
            }
        )


class Tightener:
    """Bounds the neurons of subproblems again."""

    def __init__(self, network: Reduced, group: Tensor) -> None:
        self.network, self.group = network, group
        self.rough = NeuronBounder(network.to(torch.float32))
        rows = network.rows
        slack = rows.slack + 4 * network.rounding * (rows.constant.abs() + KEPT)
        goals = replace(rows, constant=rows.constant - KEPT, slack=slack)
        neurons = network.neurons
        self.exact = replace(network, rows=join_rows([neurons, -neurons, goals]))
        self.batch = max(1, MEMORY // (64 * (network.size + network.rows.outer.shape[1])))

    def __call__(self, problems: Subproblems, held: Box) -> Box:
        """Return strict bounds of all neurons in some subproblems, [D, U], from those that hold.

        They hold for counterexamples: inputs of the subproblem where no row of its group exceeds
        `KEPT`.
        """
        sign = problems.sign
        lower = torch.where(sign > 0, held.lower.clamp(min=0.0), held.lower)
        upper = torch.where(sign < 0, held.upper.clamp(max=0.0), held.upper)
        allowed = self.group[None, :] == self.group[problems.row][:, None]  # [D, R]
        for layer in self.network.layers:
            still = ~(lower > upper).any(1, keepdim=True)  # where none cross, as yet
            owner, place = ((sign[:, layer.span] == 0) & still).nonzero(as_tuple=True)
            place = place + layer.span.start
            bends = (lower[owner, place] < 0) & (upper[owner, place] > 0)
            for part in bends.nonzero()[:, 0].split(self.batch):
                check_time()
                d, j = owner[part], place[part]
                box = Box(lower[d], upper[d])
                signs = decided(sign[d], box)
                low = self._bounds(j, signs, box, allowed[d])
                high = -self._bounds(j + self.network.size, signs, box, allowed[d])
                lower[d, j] = torch.where(low > lower[d, j], low, lower[d, j])
                upper[d, j] = torch.where(high < upper[d, j], high, upper[d, j])
        return Box(lower, upper)

    def _bounds(self, row: Tensor, sign: Tensor, box: Box, allowed: Tensor) -> Tensor:
        """Return strict lower bounds of neurons, with the property's rows added to them."""
        found = self.rough.best(row, sign, box, allowed)
        gamma = torch.where(allowed, found.gamma.to(self.network.lower).clamp(min=0.0), 0.0)
        own = gamma.new_zeros(len(row), 2 * self.network.size)
        own[torch.arange(len(row), device=row.device), row] = 1.0
        plain = replace(found, gamma=gamma[:, :0])
        bound = strict_bounds(self.exact, plain, torch.cat((own, gamma), 1), regions=box)
        return torch.where(torch.isfinite(bound), bound, -torch.inf)


def work(network: Reduced) -> float:
    """Return how many operations bounding all neurons of a subproblem again takes, about."""
    size, inputs = network.size, network.rows.outer.shape[1]
    return 8.0 * ITERATIONS * size * size * (inputs + size / 2)


def decided(sign: Tensor, box: Box) -> Tensor:
    """Return the splits of subproblems, and the signs that their bounds decide."""
    known = (box.lower >= 0).to(torch.int8) - (box.upper <= 0).to(torch.int8)
    return torch.where(sign == 0, known, sign)
