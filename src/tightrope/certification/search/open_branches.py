"""The open subproblems of a search on the network itself, the lowest bound first.

A subproblem is its splits and their multipliers. Its slopes, one number per unstable neuron, are
held in half precision, and only as long as all of them fit into the memory that they may take:
subproblems that come later begin with the slopes of the root again. So memory does not end a
search.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tightrope.domains.branches.subproblems import Branches, join

SLOPES = 1 << 30  # bytes


@dataclass(order=True, frozen=True)
class _Entry:
    """One subproblem; `number` makes ties first come, first served."""

    bound: float
    number: int
    problem: Branches = field(compare=False)
    candidates: Tensor = field(compare=False)


class OpenBranches:
    """A heap of open subproblems with their bounds and the neurons that they may be split at."""

    def __init__(self, roots: Branches, *, memory: int = SLOPES) -> None:
        self.roots = {int(row): roots.alpha[i : i + 1].half() for i, row in enumerate(roots.row)}
        self.entries: list[_Entry] = []
        self.memory, self.held, self.count = memory, 0, 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lowest(self) -> float:
        """The lowest bound."""
        return self.entries[0].bound

    def add(self, problems: Branches, bound: Tensor, candidates: Tensor) -> None:
        """Put subproblems in; candidates are neurons to split, [D, k], the best first."""
        for i, value in enumerate(bound.tolist()):
            alpha = problems.alpha[i : i + 1].half()
            if self.held + alpha.nbytes > self.memory:
                alpha = alpha[:, :0]
            self.held += alpha.nbytes
            self.count += 1
            one = replace(problems[i : i + 1], alpha=alpha)
            heapq.heappush(self.entries, _Entry(value, self.count, one, candidates[i : i + 1]))

    def take(self, most: int) -> tuple[Branches, Tensor, Tensor]:
        """Take out those with the lowest bounds."""
        count = min(most, len(self.entries))
        taken = [heapq.heappop(self.entries) for _ in range(count)]
        self.held -= sum(entry.problem.alpha.nbytes for entry in taken)
        return self._unpack(taken)

    def peek(self, most: int) -> Branches:
        """Return those with the lowest bounds, leaving them in."""
        return self._unpack(heapq.nsmallest(most, self.entries))[0]

    def _unpack(self, entries: list[_Entry]) -> tuple[Branches, Tensor, Tensor]:
        problems = join([self._whole(entry.problem) for entry in entries])
        bound = torch.tensor([entry.bound for entry in entries], device=problems.row.device)
        return problems, bound, torch.cat([entry.candidates for entry in entries])

    def _whole(self, problem: Branches) -> Branches:
        start = self.roots[int(problem.row[0])]
        alpha = problem.alpha if problem.alpha.shape[1] else start
        return replace(problem, alpha=alpha.float())
