"""Better bounds for the few neurons whose sign decides something: those that are compared.

Where a network counts, compares or chooses, a bound of its output is worth nothing until signs are
known. For neurons whose signs are open, closest to zero first, slopes are optimised. Then the
activations before them whose upper lines cost these bounds most are bounded again with slopes of
their own, front to back, and so on while that settles signs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import OutOfTimeError, check_time, time_left
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import unit_rows
from tightrope.domains.linear.local import best_sides
from tightrope.domains.linear.relaxations import lines

ROUNDS = 4
NEAREST = 128  # signs that a round is about
NEURONS = 8192  # of a layer that a round bounds again
PART = 1024  # of them that are bounded between two looks at the clock
PATIENT = 3  # times the iterations for the signs themselves: they are few
COSTS = 0.97  # of what all neurons of the layer cost is enough
SHARE = 0.5  # of the time that is left


@dataclass
class Refining:
    """The signs of some neurons of one node that are to be found out, for a batch of one.

    `found` is improved on the way: bounds of what activations read, and their lines.
    """

    found: Relaxation
    target: int
    iterations: int

    def of(self, bounds: Box, needs: Tensor) -> Box:
        """Return better bounds of the neurons that are needed, as far as time allows."""
        self.lower, self.upper = (t.flatten().clone() for t in bounds.corners)
        self.places = needs.flatten().nonzero()[:, 0]
        self.done: dict[int, Tensor] = {}
        self.least = SHARE * time_left()
        with suppress(OutOfTimeError):
            self._settle(self._open())
            for _ in range(ROUNDS):
                nearest = self._open()[:NEAREST]
                if not len(nearest) or time_left() < self.least:
                    break
                self._improve(nearest)
                before = len(self._open())
                self._settle(nearest)
                if len(self._open()) == before:
                    break
        lower, upper = self.lower.view_as(bounds.lower), self.upper.view_as(bounds.upper)
        return Box(lower, torch.maximum(lower, upper))

    def _open(self) -> Tensor:
        """Return where no sign is known, those closest to one first."""
        lower, upper = self.lower[self.places], self.upper[self.places]
        distance = torch.minimum(-lower, upper)
        left = (lower <= 0) & (upper >= 0)
        return self.places[left][distance[left].argsort()]

    def _signs(self, places: Tensor) -> Tensor:
        """Return which sign is the closer one."""
        return torch.where(self.lower[places] > -self.upper[places], 1.0, -1.0)

    def _settle(self, places: Tensor) -> None:
        """Bound neurons on the side of the sign that they are closer to."""
        sign = self._signs(places)
        for part in range(0, len(places), NEAREST):
            check_time()
            some, side = places[part : part + NEAREST], sign[part : part + NEAREST]
            count = PATIENT * self.iterations
            new = best_sides(self.found, self.target, some, side, iterations=count)
            _tighten(self.lower, self.upper, some, side, new)

    def _improve(self, nearest: Tensor) -> None:
        """Bound the neurons again that cost the bounds of the nearest ones most."""
        nodes = self.found.graph.nodes
        for i, cost in sorted(self._costs(nearest).items()):
            before = nodes[i].inputs[0]
            places = self._dearest(i, cost)
            lower, upper = (t.flatten().clone() for t in self.found.boxes[before].corners)
            for some in places.split(PART):
                if time_left() < self.least:
                    break
                for side in (1.0, -1.0):
                    sign = torch.full_like(some, 1, dtype=lower.dtype) * side
                    new = best_sides(self.found, before, some, sign, iterations=self.iterations)
                    _tighten(lower, upper, some, sign, new)
            shape = self.found.boxes[before].lower.shape
            self._replace(
                i, before, Box(lower.view(shape), torch.maximum(lower, upper).view(shape))
            )

    def _costs(self, nearest: Tensor) -> dict[int, Tensor]:
        """Return what the upper line of each neuron costs the bounds, by activation."""
        shape, like = self.found.graph.nodes[self.target].shape, self.found.box.lower
        rows = unit_rows(shape, nearest, None, like, windows=True)
        sign = self._signs(nearest).view(-1, *(1 for _ in rows.values.shape[1:]))
        total: dict[int, Tensor] = {}
        passed = self.found.pull(self.target, rows.like(rows.values * sign.to(like))).passed
        for i, a in passed.items():
            down = a.like(a.values.clamp(max=0)).dense().values.sum(0)
            total[i] = (-down * self.found.lines[i].upper_intercept[0]).flatten()
        return total

    def _dearest(self, i: int, cost: Tensor) -> Tensor:
        """Return the neurons that cost most and were not bounded yet."""
        cost = cost.clone()
        cost[self.done.get(i, cost.new_zeros(0, dtype=torch.long))] = 0.0
        top = cost.topk(min(NEURONS, len(cost)))
        share = top.values.cumsum(0) - top.values
        chosen = top.indices[(top.values > 0) & (share < COSTS * cost.sum())]
        self.done[i] = torch.cat((self.done.get(i, chosen[:0]), chosen))
        return chosen

    def _replace(self, i: int, before: int, box: Box) -> None:
        """Take note of better bounds: lines follow from them."""
        found = self.found
        found.boxes[before] = box
        found.lines[i] = lines(found.graph.nodes[i].op, box, rounding=found.rounding)
        # What was computed from the old ones is forgotten.
        self.found = replace(found)


def _tighten(lower: Tensor, upper: Tensor, places: Tensor, sign: Tensor, new: Tensor) -> None:
    """Write bounds of places where they are better, lower or upper ones by the sign."""
    new = torch.where(torch.isfinite(new), new, -torch.inf)
    below, above = places[sign > 0], places[sign < 0]
    lower[below] = torch.maximum(lower[below], new[sign > 0])
    upper[above] = torch.minimum(upper[above], -new[sign < 0])
