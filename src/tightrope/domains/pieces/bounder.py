"""Bounds of subproblems in which some activations see a part of their interval only.

One row per subproblem is pulled back through the network, as ever
(`tightrope.domains.linear.rules`), but for two things. On what is left of an interval, an
activation has lines of its own, which are closer to it. And each inequality `s (h - p) >= 0` of a
cut at p is added with a multiplier, `-beta s (h - p)` with `beta >= 0`, which lowers the row
where the inequality holds and says nothing elsewhere; so the bound of what is left of the box may
become better than that of all of it. Bounds of all other numbers stay those of the whole box.

How a bound changes with its multipliers is known in closed form: the corner at which it is
attained is pushed forward through the lines that were used (as in
`tightrope.domains.linear.alpha`), and what arrives at a cut is by how much its inequality is
violated. What arrives at an activation also says by how much the line that was used is off there.
That is what the bound loses, and so where to cut next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.deadline import check_time
from tightrope.domains.linear.alpha import forward
from tightrope.domains.linear.ascent import Ascent, Parameter
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.magnitudes import largest
from tightrope.domains.linear.pulled import Form
from tightrope.domains.linear.relaxations import Lines, kinked, lines
from tightrope.domains.linear.rules import Pass, pull_activation
from tightrope.domains.pieces.subproblems import Cuts, Pieces, join_cuts
from tightrope.domains.rounding import growth
from tightrope.graph import ops
from tightrope.graph.evaluate import RULES as POINT_RULES

DECAY = 0.95  # of the steps' size
LEAST_UNIT = 1e-6  # of multipliers
EDGE = 0.1  # of an interval that a cut leaves at least on each side


@dataclass(frozen=True)
class View:
    """What one pass back found; `seen` is what each activation sees where the bound is attained."""

    bound: Tensor  # [D]
    form: Form
    lines: Mapping[int, Lines]
    point: Tensor  # [D, *input]
    seen: dict[int, Tensor]


class PieceBounder:
    """Bounds subproblems of the rows `matrix @ output + offset` on one box.

    `slopes` are lower slopes of unstable ReLUs, by position, one set for each row.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        matrix: Tensor,
        offset: Tensor,
        slopes: Mapping[int, Tensor],
    ) -> None:
        self.relaxation, self.matrix, self.offset = relaxation, matrix, offset
        self.slopes, self.target = slopes, relaxation.output
        nodes = relaxation.graph.nodes
        self.boxes = {i: relaxation.boxes[nodes[i].inputs[0]] for i in relaxation.lines}
        self.chunk = max(1, relaxation.rows_at_once(self.target) // 2)

    def look(self, problems: Pieces) -> View:
        """Bound subproblems with the multipliers they have, in float32."""
        rough = self.relaxation.rough
        form, patched = self._pull(rough, problems)
        bound = form.minimum(rough.box) + self.offset[problems.row].to(form.constant)
        slopes = self._slopes(problems, form.constant.dtype)
        seen = forward(rough, self.target, form, slopes, lines=patched)
        return View(bound, form, patched, form.minimizer(rough.box), seen)

    def strict(self, problems: Pieces) -> Tensor:
        """Return proved lower bounds, in float64; multipliers are moved back into their limits."""
        relaxation = self.relaxation
        reach = largest(relaxation.boxes[self.target]).flatten()
        parts = [self.matrix.new_zeros(0)]
        size = max(1, self.chunk // 2)
        for start in range(0, len(problems), size):
            part = problems[start : start + size]
            form, _ = self._pull(relaxation, part)
            bound = form.minimum(relaxation.box, rounding=relaxation.rounding)
            matrix, offset = self.matrix[part.row], self.offset[part.row]
            # The rows may have been rounded to float64, and so is the sum with their offset.
            room = matrix.abs() @ reach + bound.abs() + offset.abs()
            parts.append(bound + offset - 4 * relaxation.rounding * room)
        return torch.cat(parts)

    def _pull(self, relaxation: Relaxation, problems: Pieces) -> tuple[Form, dict[int, Lines]]:
        dtype, graph = relaxation.box.lower.dtype, relaxation.graph
        values = self.matrix[problems.row].to(dtype).view(-1, *graph.output_shape)
        patched = self._lines(relaxation, problems)
        rule = _CutRule(problems, self._slopes(problems, dtype))
        form = relaxation.pull(
            self.target, Coefficients(values, None), lines=patched, activation=rule
        )
        return form, patched

    def _slopes(self, problems: Pieces, dtype: torch.dtype) -> dict[int, Tensor]:
        return {i: t[problems.row].to(dtype) for i, t in self.slopes.items()}

    def _lines(self, relaxation: Relaxation, problems: Pieces) -> dict[int, Lines]:
        """Return the lines of all activations; where something is cut, those of each subproblem.

        Those of parts of an interval are computed in float64, whatever they are used for.
        """
        found = dict(relaxation.lines)
        left = problems.intervals(self.boxes)
        for i in problems.node[problems.side != 0].unique().tolist():
            owner, slot = ((problems.node == i) & (problems.side != 0)).nonzero(as_tuple=True)
            part = Box(left.lower[owner, slot], left.upper[owner, slot])
            op = self.relaxation.graph.nodes[i].op
            new = lines(op, part, rounding=self.relaxation.rounding)
            place = problems.place[owner, slot]
            fields = zip(found[i], new, strict=True)
            found[i] = Lines(*(_with(old, len(problems), owner, place, t) for old, t in fields))
        return found

    def improve(
        self, problems: Pieces, *, iterations: int, beta_rate: float = 0.1, threshold: float = 0.0
    ) -> tuple[Tensor, Pieces, Cuts]:
        """Improve the bounds by gradient ascent on the multipliers.

        Return the best bounds, their multipliers, and where to cut next. Subproblems whose bound
        exceeds the threshold are not improved any further.
        """
        parts = [
            self._improve(problems[part], iterations, beta_rate, threshold)
            for part in torch.arange(len(problems), device=problems.row.device).split(self.chunk)
        ]
        bounds, betas, cuts = zip(*parts, strict=True)
        return torch.cat(bounds), replace(problems, beta=torch.cat(betas)), join_cuts(list(cuts))

    def _improve(
        self, problems: Pieces, iterations: int, rate: float, threshold: float
    ) -> tuple[Tensor, Tensor, Cuts]:
        view = self.look(problems)
        # Multipliers are of the size of the coefficients that they are to outweigh.
        unit = self._largest(problems, view)
        ascent = Ascent({"share": Parameter(problems.beta / unit, rate, 0.0, None)}, decay=DECAY)
        for iteration in range(iterations + 1):
            check_time()
            ascent.record(view.bound)
            if iteration == iterations or bool((ascent.bound > threshold).all()):
                break
            ascent.step({"share": unit * self._violations(problems, view)})
            problems = replace(problems, beta=unit * ascent.parameters["share"].values)
            view = self.look(problems)
        return ascent.bound, unit * ascent.best["share"], self.cuts(problems, view)

    def _largest(self, problems: Pieces, view: View) -> Tensor:
        """Return the largest coefficient that arrives in the layer of each cut, [D, M]."""
        found = torch.zeros_like(problems.beta)
        for i in problems.node[problems.side != 0].unique().tolist():
            if i in view.form.passed:
                slopes = (view.lines[i].lower_slope, view.lines[i].upper_slope)
                steepest = torch.maximum(*(flat(t).abs() for t in slopes))
                size = (flat(view.form.passed[i].values).abs() * steepest).amax(1, keepdim=True)
                found = torch.where(problems.node == i, size, found)
        return torch.where(torch.isfinite(found), found, 0.0).clamp(min=LEAST_UNIT)

    def _violations(self, problems: Pieces, view: View) -> Tensor:
        """Return by how much each inequality is violated where the bound is attained, [D, M]."""
        value = problems.point.to(view.bound)
        for i in problems.node[problems.side != 0].unique().tolist():
            if i in view.seen:
                mine = problems.node == i
                arrived = flat(view.seen[i]).gather(1, problems.place.where(mine, 0))
                value = torch.where(mine, arrived, value)
        return problems.side * (problems.point.to(value) - value)

    def cuts(self, problems: Pieces, view: View) -> Cuts:
        """Return where each bound loses most, and the value that is seen there."""
        count, device = len(problems), problems.row.device
        best = torch.zeros(count, device=device)
        nowhere = torch.zeros(count, dtype=torch.long, device=device)
        where = Cuts(nowhere, nowhere, nowhere.double())
        left = problems.intervals(self.boxes)
        for i, seen in view.seen.items():
            low, high = (self._cut_box(problems, left, i, side) for side in (0, 1))
            h = torch.minimum(torch.maximum(flat(seen).double(), low), high)
            lost = self._lost(view, i, h, low, high)
            value, place = torch.where(torch.isfinite(lost), lost, 0.0).max(1)
            better = value > best
            best = torch.where(better, value, best)
            at = [t.expand_as(lost).gather(1, place[:, None])[:, 0] for t in (h, low, high)]
            point = _cut_point(self.relaxation.graph.nodes[i].op, *at)
            where = Cuts(
                where.node.where(~better, i),
                torch.where(better, place, where.place),
                torch.where(better, point, where.point),
            )
        return where

    def _cut_box(self, problems: Pieces, left: Box, i: int, side: int) -> Tensor:
        """Return one end of the intervals of all numbers that an activation reads, [D or 1, N]."""
        end = flat(self.boxes[i].corners[side])
        owner, slot = ((problems.node == i) & (problems.side != 0)).nonzero(as_tuple=True)
        if not len(owner):
            return end
        cut = left.corners[side][owner, slot]
        return _with(end, len(problems), owner, problems.place[owner, slot], cut)

    def _lost(self, view: View, i: int, h: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return what the lines that were used cost the bound, [D, N].

        That is their distance from the function at what is seen, plus a little of it in the
        middle of the interval; nothing where there is no interval left to cut.
        """
        node, line = self.relaxation.graph.nodes[i], view.lines[i]
        op, a = node.op, flat(view.form.passed[i].values)
        total = torch.zeros_like(a, dtype=h.dtype)
        for at, weight in ((h, 1.0), (low / 2 + high / 2, 0.05)):
            shape = (len(at), *node.shape)
            value = flat(POINT_RULES[type(op)](op, at.reshape(shape)))
            below = value - (flat(line.lower_slope) * at + flat(line.lower_intercept))
            above = flat(line.upper_slope) * at + flat(line.upper_intercept) - value
            total = total + weight * torch.where(a >= 0, below, above)
        cuttable = (low < 0) & (high > 0) if kinked(op) else low < high
        return torch.where(cuttable, a.abs() * total, 0.0)


def _with(field: Tensor, count: int, owner: Tensor, place: Tensor, values: Tensor) -> Tensor:
    """Return a field of each of so many subproblems, with some of its numbers replaced."""
    whole = flat(field).expand(count, -1).clone()
    whole[owner, place] = values.to(whole)
    return whole.view(count, *field.shape[1:])


def _cut_point(op: ops.Op, h: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return a value inside an interval to cut it at: zero for a ReLU, else near what is seen."""
    if kinked(op):
        return torch.zeros_like(h)
    room = EDGE * (high - low)
    return torch.minimum(torch.maximum(h, low + room), high - room)


class _CutRule:
    """How coefficients go through activations, with the multipliers of cuts."""

    def __init__(self, problems: Pieces, slopes: Mapping[int, Tensor]) -> None:
        self.problems, self.slopes = problems, slopes
        self.pressure = problems.side.double() * problems.beta.double().clamp(min=0.0)

    def __call__(self, op: ops.Op, a: Coefficients, i: int, state: Pass) -> Coefficients:
        """Pull coefficients back through one activation and add what its cuts say."""
        pulled = pull_activation(op, a, i, state, slopes=self.slopes).dense()
        mine = (self.problems.node == i) & (self.problems.side != 0)
        owner, slot = mine.nonzero(as_tuple=True)
        if not len(owner):
            return pulled
        place, pressure = self.problems.place[owner, slot], self.pressure[owner, slot]
        values = flat(pulled.values).clone()
        before = values[owner, place].abs()
        values.index_put_((owner, place), -pressure.to(values), accumulate=True)
        gained = torch.where(mine, self.pressure * self.problems.point, 0.0).to(values)
        state.add_number(gained.sum(1))
        if state.magnitudes is not None:
            # One sum for each multiplier, and as many products, and their sum.
            terms, rounding = mine.shape[1] + 1, state.rounding
            sizes = flat(state.magnitudes[state.graph.nodes[i].inputs[0]])[0, place]
            room = (before + pressure.abs()) * sizes
            room = values.new_zeros(len(values)).index_add(0, owner, room)
            state.lose(room, 2 * growth(terms, rounding))
            state.lose(gained.abs().sum(1), 2 * growth(terms, rounding))
        return pulled.like(values.view_as(pulled.values))
