"""Signs that a network tests, found out by searches of their own.

Where a network counts, compares or chooses, nothing is known of its output until the signs of what
it compares are. Those that bounds leave open become properties of the network up to there, one at
a time, the closest to be decided first; what is proved of them bounds the rest of the network
again. Each sign gets a turn, then each that is still open one that is twice as long, and so on.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, Verdict, falsified, undecided, verified
from tightrope.box import Box, flat
from tightrope.certification.problem import worst_row
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refute
from tightrope.certification.search.on_graph import GraphSearch
from tightrope.certification.search.on_pieces import PieceSearch
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.linear.bounded import Relaxation, relaxed
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.domains.reduced.reduction import reducible
from tightrope.graph.graph import prune
from tightrope.graph.steps import tests_a_sign

FIRST = 1.0  # seconds of the first turn of each sign


@dataclass(frozen=True)
class Sign:
    """A number of a node whose sign is asked: is `side` times it positive, everywhere?"""

    node: int
    place: int
    side: int


class SignSearch:
    """The search for one property of a network that tests signs, given strict bounds of it."""

    def __init__(self, relaxation: Relaxation, unsafe: Unsafe, refute: Refute) -> None:
        self.relaxation, self.unsafe, self.refute = relaxation, unsafe, refute
        self.searches: dict[Sign, GraphSearch | PieceSearch] = {}
        self.refuted: set[Sign] = set()
        self.point: Tensor | None = None
        self.bound, self.count = -torch.inf, 0

    def open(self) -> list[Sign]:
        """Return the signs that are not known, those closest to one first.

        Where a number is known to have one sign somewhere, the other one is not asked for.
        """
        nodes, found = self.relaxation.graph.nodes, []
        for i in {node.inputs[0] for node in nodes if tests_a_sign(node.op)}:
            lower, upper = (flat(t)[0] for t in self.relaxation.boxes[i].corners)
            for place in ((lower <= 0) & (upper >= 0) & (lower < upper)).nonzero()[:, 0].tolist():
                signs = (Sign(i, place, 1), Sign(i, place, -1))
                far = (-float(lower[place]), float(upper[place]))
                left = [
                    pair for pair in zip(far, signs, strict=True) if pair[1] not in self.refuted
                ]
                found += left[:1] if far[0] < far[1] else left[-1:]
        return [sign for _, sign in sorted(found, key=lambda pair: pair[0])]

    def run(self, end: float) -> Answer:
        """Search until the property is decided, no sign is left, or the end has come."""
        try:
            with until(Deadline(end)):
                return self._search(Deadline(end))
        except OutOfTimeError:
            return self._unfinished(Cause.TIME)

    def _search(self, deadline: Deadline) -> Answer:
        turn = FIRST
        self._bound()
        while self.bound <= 0 and (signs := self.open()):
            for sign in signs:
                deadline.check()
                self._look(sign, Deadline.after(min(turn, deadline.left)))
                if self.point is not None:
                    return falsified(self.point, self.count)
                if self.bound > 0:
                    break
            turn *= 2
        if self.bound > 0:
            return verified(self.bound, self.count)
        return self._unfinished(Cause.TOO_CLOSE)

    def _unfinished(self, cause: Cause) -> Answer:
        left = f"{len(self.open())} signs that are tested are open"
        known = f"lowest bound {self.bound:.4g}, " if self.bound > -torch.inf else ""
        return undecided(cause, f"{known}{left}", subproblems=self.count)

    def _look(self, sign: Sign, deadline: Deadline) -> None:
        """Search for the sign in its turn; bound the network again if it is found."""
        search = self.searches.get(sign) or self._search_for(sign)
        self.searches[sign] = search
        before, found = search.count, undecided(Cause.TIME)
        with suppress(OutOfTimeError), until(deadline):  # not even begun
            found = search.run(deadline.end)
        self.count += search.count - before
        if found.verdict is Verdict.FALSIFIED or found.cause is Cause.TOO_CLOSE:
            self.refuted.add(sign)
        elif found.verdict is Verdict.VERIFIED:
            assert found.bound is not None and found.bound > 0
            self._learn(sign, found.bound)
        if found.cause is not Cause.TIME:
            del self.searches[sign]

    def _search_for(self, sign: Sign) -> GraphSearch | PieceSearch:
        """Return a search on the network up to the sign, of which no more is asked."""
        relaxation = self.relaxation
        graph, places = prune(relaxation.graph.nodes, sign.node)
        known = relaxation.boxes
        boxes = {new: known[old] for old, new in places.items() if old in known}
        part = relaxed(graph, boxes, rounding=relaxation.rounding)
        row = self.unsafe.matrix.new_zeros(1, relaxation.boxes[sign.node].lower[0].numel())
        row[0, sign.place] = sign.side
        group = torch.zeros(1, dtype=torch.long, device=row.device)
        property_ = Unsafe(row, row.new_zeros(1), group)

        def crosses(points: Tensor, groups: Tensor) -> Tensor | None:
            """Return a point where the sign is another; some decide the whole property."""
            points = points.to(relaxation.box.lower).view(-1, *graph.input_shape)
            with torch.no_grad():
                values = flat(graph(points))[:, sign.place] * sign.side
            points = points[values <= 0]
            if not len(points):
                return None
            every = self.unsafe.group.unique()
            starts = points.flatten(1).repeat_interleave(len(every), 0)
            self.point = self.refute(starts, every.repeat(len(points)))
            return points[0] if self.point is None else self.point

        kind = GraphSearch if reducible(graph) else PieceSearch
        return kind(part, property_, crosses)

    def _learn(self, sign: Sign, bound: float) -> None:
        """Take note of a bound, and bound what comes after it, and the property, again."""
        old = self.relaxation
        lower, upper = (t.clone() for t in old.boxes[sign.node].corners)
        if sign.side > 0:
            flat(lower)[0, sign.place] = bound
        else:
            flat(upper)[0, sign.place] = -bound
        known = {**old.boxes, sign.node: Box(lower, upper)}
        self.relaxation = relax(
            old.graph, old.box, effort=CROWN_IBP, rounding=old.rounding, known=known
        )
        self._bound()

    def _bound(self) -> None:
        """Bound the property by what is known."""
        found = self.relaxation
        matrix = self.unsafe.matrix.unflatten(1, found.graph.output_shape)
        rows = found.lower(found.output, Coefficients(matrix, None))
        self.bound = max(self.bound, worst_row(self.unsafe, rows))
