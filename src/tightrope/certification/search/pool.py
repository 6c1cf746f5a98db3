"""The pool of open subproblems: one growable array per quantity.

Taking the ones with the lowest bounds moves as many entries as are taken, not the whole pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.domains.reduced.splits import Subproblems


class Pool:
    """Open subproblems with their bounds, in no particular order."""

    def __init__(self, problems: Subproblems, bound: Tensor) -> None:
        self.arrays = {**vars(problems), "bound": bound}
        self.count = len(bound)

    def __len__(self) -> int:
        return self.count

    @property
    def bytes(self) -> int:
        """Memory of the entries in use."""
        return sum(t[: self.count].nbytes for t in self.arrays.values())

    @property
    def lowest(self) -> float:
        """The lowest bound."""
        return float(self.arrays["bound"][: self.count].min())

    def peek(self, most: int) -> Subproblems:
        """Return those with the lowest bounds, leaving them in."""
        return self._pick(self._order(most))[0]

    def take(self, most: int) -> tuple[Subproblems, Tensor]:
        """Take out those with the lowest bounds."""
        chosen = self._order(most)
        problems, bound = self._pick(chosen)
        # The last entries fill the gaps.
        left = self.count - len(chosen)
        gone = torch.zeros(self.count, dtype=torch.bool, device=chosen.device)
        gone[chosen] = True
        gaps = gone[:left].nonzero()[:, 0]
        movers = (~gone[left:]).nonzero()[:, 0] + left
        for array in self.arrays.values():
            array[gaps] = array[movers]
        self.count = left
        return problems, bound

    def take_all(self) -> tuple[Subproblems, Tensor]:
        """Take out everything."""
        return self.take(self.count)

    def add(self, problems: Subproblems, bound: Tensor) -> None:
        """Put subproblems in."""
        end = self.count + len(bound)
        for name, new in {**vars(problems), "bound": bound}.items():
            array = self.arrays[name]
            if end > len(array):
                room = array.new_empty(max(end, 2 * len(array)), *array.shape[1:])
                room[: self.count] = array[: self.count]
                self.arrays[name] = array = room
            array[self.count : end] = new
        self.count = end

    def _order(self, most: int) -> Tensor:
        bound = self.arrays["bound"][: self.count]
        return bound.topk(min(most, self.count), largest=False).indices

    def _pick(self, index: Tensor) -> tuple[Subproblems, Tensor]:
        held = {name: array[index] for name, array in self.arrays.items()}
        return Subproblems(**{k: v for k, v in held.items() if k != "bound"}), held["bound"]
