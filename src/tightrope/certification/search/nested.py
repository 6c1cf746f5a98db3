"""Boxes within boxes: the search for large networks of which few inputs vary.

Bounding all neurons of a large network takes seconds, but half of a box inherits what is known of
the whole one, and most of its neurons have a sign by then: bounding the others costs a tenth. So
each part keeps the bounds of its neurons. A part that linear bounds do not decide is searched by
signs for about as long as bounding its halves would take, and then it is halved where the bound
depends most on the input.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, Verdict, falsified, undecided, verified
from tightrope.box import Box, flat
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refute
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, reduction_fits, relax
from tightrope.domains.linear.magnitudes import largest
from tightrope.domains.linear.pulled import Form
from tightrope.domains.reduced.reduction import reduce, reducible

PATIENCE = 1.0  # times the seconds that bounding a part took, for its search by signs
RELATIVE = 1e-3  # weight of an input's width beside that of what the bound owes to it


@dataclass(order=True, frozen=True)
class _Part:
    """A part of the box that is open; `number` makes ties first come, first served."""

    bound: float
    number: int
    box: Box = field(compare=False)
    nodes: Mapping[int, Box] = field(compare=False)
    rows: Tensor = field(compare=False)  # those of open groups
    score: Tensor = field(compare=False)  # what halving each input promises
    points: Tensor = field(compare=False)  # where bounds of leading rows are attained, flat
    groups: Tensor = field(compare=False)  # and the groups that these are in


class NestedSearch:
    """The search for one property on one box, given strict bounds of all neurons."""

    def __init__(
        self, relaxation: Relaxation, unsafe: Unsafe, refute: Refute, *, settings: SearchSettings
    ) -> None:
        self.relaxation, self.unsafe, self.refute = relaxation, unsafe, refute
        self.settings = settings
        self.parts: list[_Part] = []
        self.count, self.boxes, self.stuck = 0, 0, 0
        self.lowest = math.inf
        self.begun = False

    def begin(self) -> Answer:
        """Bound the rows on the whole box."""
        every = torch.arange(len(self.unsafe.group), device=self.unsafe.group.device)
        self._bound(self.relaxation, every, -math.inf)
        self.begun = True
        if not self.parts:
            return verified(self.lowest, self.count)
        return undecided(bound=self.parts[0].bound, subproblems=self.count)

    def run(self, end: float) -> Answer:
        """Search until everything is decided or `time.monotonic()` passes the end."""
        try:
            with until(Deadline(end)):
                if not self.begun:
                    self.begin()
                found = self._search(Deadline(end))
        except OutOfTimeError:
            return self._unfinished(Cause.TIME)
        if found is not None:
            return found
        return (
            self._unfinished(Cause.TOO_CLOSE) if self.stuck else verified(self.lowest, self.count)
        )

    def _search(self, deadline: Deadline) -> Answer | None:
        """Halve parts until none is left; return an answer if a counterexample is met."""
        while self.parts:
            part = heapq.heappop(self.parts)
            try:
                found = self._halve(part, deadline)
            except OutOfTimeError:
                heapq.heappush(self.parts, part)  # its halves, if they are there, do no harm
                raise
            if found is not None:
                return found
        return None

    def _unfinished(self, cause: Cause) -> Answer:
        """Say how far the search came."""
        lowest = min([self.lowest, *(part.bound for part in self.parts[:1])])
        left = f"{len(self.parts) + self.stuck} boxes open of {self.boxes}"
        bound = lowest if math.isfinite(lowest) and self.begun and not self.stuck else None
        details = f"lowest bound {lowest:.4g}, {left}"
        return undecided(cause, details, bound=bound, subproblems=self.count)

    def _halve(self, part: _Part, deadline: Deadline) -> Answer | None:
        """Bound both halves of a part, and search them for a while."""
        halves = _halves(part.box, part.score)
        if not halves:
            self.stuck += 1
            self.lowest = min(self.lowest, part.bound)
            return None
        for half in halves:
            deadline.check()
            started = time.monotonic()
            relaxation = relax(
                self.relaxation.graph,
                half,
                effort=CROWN,
                rounding=self.relaxation.rounding,
                known=part.nodes,
            )
            left = self._bound(relaxation, part.rows, part.bound)
            if left is None:
                continue
            limit = PATIENCE * (time.monotonic() - started)
            found = self._by_signs(relaxation, left, Deadline.after(min(limit, deadline.left)))
            if found.verdict is Verdict.FALSIFIED:
                return found
            if found.verdict is Verdict.VERIFIED:
                self.parts.remove(left)
                heapq.heapify(self.parts)
                assert found.bound is not None
                self.lowest = min(self.lowest, found.bound)
        return None

    def _bound(self, relaxation: Relaxation, rows: Tensor, before: float) -> _Part | None:
        """Bound rows on a part; keep and return it if it stays open."""
        self.boxes, self.count = self.boxes + 1, self.count + 1
        matrix = self.unsafe.matrix[rows].unflatten(1, relaxation.graph.output_shape)
        form = relaxation.pull(relaxation.output, Coefficients(matrix, None))
        bounds = form.minimum(relaxation.box, rounding=relaxation.rounding)
        # The rows may have been rounded to float64.
        reach = flat(largest(relaxation.boxes[relaxation.output]))[0]
        bounds = bounds - 4 * relaxation.rounding * (self.unsafe.matrix[rows].abs() @ reach)
        offset = self.unsafe.offset[rows]
        if offset.any():  # the sums are rounded, though never across zero
            bounds = torch.nextafter(bounds + offset, bounds.new_tensor(-torch.inf))
        bounds = torch.where(torch.isfinite(bounds), bounds, -torch.inf)
        group = self.unsafe.group[rows]
        best = bounds.new_full((int(self.unsafe.group.max()) + 1,), -torch.inf)
        best = best.scatter_reduce(0, group, bounds, "amax")[group]
        proved = best > 0
        if proved.any():
            self.lowest = min(self.lowest, float(best[proved].min()))
        if proved.all():
            return None
        leading = (bounds == best) & ~proved
        part = _Part(
            max(before, min(0.0, float(best.min()))),
            self.boxes,
            relaxation.box,
            relaxation.known(0),
            rows[~proved],
            _scores(form, relaxation.box, self.relaxation.box, leading),
            flat(form.minimizer(relaxation.box))[leading],
            group[leading],
        )
        heapq.heappush(self.parts, part)
        return part

    def _by_signs(self, relaxation: Relaxation, part: _Part, deadline: Deadline) -> Answer:
        """Try where the bounds are attained; search by the signs of neurons for a while."""
        point = self.refute(part.points, part.groups)
        if point is not None:
            return falsified(point, self.count)
        if not reducible(relaxation.graph) or not reduction_fits(relaxation):
            return undecided()
        rows = part.rows
        network = reduce(relaxation, self.unsafe.matrix[rows], self.unsafe.offset[rows])
        search = BranchAndBound(
            network, self.unsafe.group[rows], self.refute, settings=self.settings
        )
        found = search.begin()
        if not found:
            found = search.run(deadline.end)
        self.count += search.count
        return found


def _scores(form: Form, box: Box, whole: Box, leading: Tensor) -> Tensor:
    """Return what each input's width costs the leading rows, in shares, flat."""
    width = flat(box.upper - box.lower)[0]
    cost = flat(form.coefficients.dense().values)[leading].abs() * width
    cost = torch.where(torch.isfinite(cost), cost, 0.0).sum(0)
    relative = (width / flat(whole.upper - whole.lower)[0]).nan_to_num(0.0)
    return cost / cost.sum().clamp(min=torch.finfo(cost.dtype).tiny) + RELATIVE * relative


def _halves(box: Box, score: Tensor) -> list[Box]:
    """Return a box halved at the best input that can be, nothing if none can."""
    lower, upper = (flat(t)[0] for t in box.corners)
    middle = lower / 2 + upper / 2
    score = torch.where((lower < middle) & (middle < upper), score, -1.0)
    place = int(score.argmax())
    if score[place] < 0:
        return []
    below, above = upper.clone(), lower.clone()
    below[place] = above[place] = middle[place]
    shape = box.lower.shape
    return [Box(box.lower, below.view(shape)), Box(above.view(shape), box.upper)]
