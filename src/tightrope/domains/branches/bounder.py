"""Bounds of subproblems on the network itself: for networks too large to be reduced.

A subproblem fixes the signs of some unstable ReLUs, as in `tightrope.domains.reduced.splits`,
and has the same free parameters: `alpha`, the lower slope of each unstable neuron, and
`beta >= 0`, the multiplier of each split. One row per subproblem is pulled back through the
operations of the network (`tightrope.domains.linear.rules`); the bounds of neurons stay those of
the whole box. The gradient is in closed form, as in `tightrope.domains.linear.alpha`: one pass
back, one pass forward.

There may be several boxes, each row being about one of them: subproblems of all share batches.

The ascent runs in float32 on a network with its BatchNorms folded. What it finds becomes a proof
by one pass back in float64 that accounts for every rounding error (`GraphBounder.strict`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.box import flat
from tightrope.budget import fitting, rows_at_once
from tightrope.deadline import check_time
from tightrope.domains.branches.rule import BranchRule, Layer, Neurons, activations
from tightrope.domains.branches.subproblems import Branches
from tightrope.domains.linear.ascent import Ascent, Parameter
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.magnitudes import largest
from tightrope.domains.linear.rules import backward
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.work import heaviest

MEMORY = 1 << 29  # bytes that the subproblems of one chunk may take
DECAY = 0.95  # of the steps' size
MAPS, VECTORS = 6, 14  # copies of the widest layer, and of the unstable neurons, that one needs


@dataclass(frozen=True)
class View:
    """What one pass back found: bounds, what arrived at the neurons, and which lines they use."""

    bound: Tensor  # [D]
    coefficients: Tensor  # [D, U]
    slope: Tensor  # [D, U]
    rise: Tensor  # [D, U]
    point: Tensor  # [D, *input], where the bound is attained
    box: Tensor  # [D], which box each is about

    def __getitem__(self, index: Tensor) -> View:
        return View(*(t[index] for t in vars(self).values()))


class GraphBounder:
    """Bounds subproblems of the rows `matrix @ output + offset`, each on its `owner`'s box.

    Without owners, all of them are about the first box.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        matrix: Tensor,
        offset: Tensor,
        *,
        owner: Tensor | None = None,
        memory: int = MEMORY,
    ) -> None:
        self.matrix, self.offset, self.memory = matrix, offset, memory
        self.owner = _first_box(matrix) if owner is None else owner
        self.graph = relaxation.graph.detach().fold_batchnorm().to(torch.float32)
        self.box = relaxation.box.map(torch.Tensor.float)
        self.target, self.rough_target = relaxation.output, len(self.graph.nodes) - 1
        self._learn(relaxation, len(relaxation.graph.nodes))

    def _learn(self, relaxation: Relaxation, end: int) -> None:
        """Take over what is known of the neurons before a position."""
        self.relaxation, self.exact = relaxation, Neurons.of(relaxation, end)
        self.neurons = self.exact.rough(self.graph)
        self.last = max(self.neurons.layers, default=0)
        before = relaxation.graph.nodes[:end]
        widest = max(torch.Size(node.shape).numel() for node in before)
        memory = fitting(self.memory, relaxation.box.lower.device)
        each = 4 * (MAPS * widest + VECTORS * self.size)
        self.chunk = rows_at_once(memory, each, heaviest(before))

    def on(self, relaxation: Relaxation) -> GraphBounder:
        """Return a bounder of the same rows on better bounds of the same network and box."""
        other = copy(self)
        other._learn(relaxation, len(relaxation.graph.nodes))
        return other

    def before(self, i: int, matrix: Tensor) -> GraphBounder:
        """Return a bounder of rows of what goes into the activation at position i."""
        other = copy(self)
        other.matrix, other.offset = matrix, matrix.new_zeros(len(matrix))
        other.owner = _first_box(matrix)
        other._learn(self.relaxation, i)
        other.target = self.relaxation.graph.nodes[i].inputs[0]
        # Folding leaves activations in their order, and what goes into them the same.
        after = activations(self.graph)[len(other.exact.layers)]
        other.rough_target = self.graph.nodes[after].inputs[0]
        return other

    @property
    def size(self) -> int:
        """Number of unstable neurons."""
        return self.exact.chord.shape[1]

    def root(self, rows: Tensor) -> Branches:
        """Return the subproblems without splits, one per row; slopes as CROWN chooses them."""
        count = len(rows)
        chord = self.neurons.seen_by(self.neurons.chord, self.owner[rows])
        wide = (chord > 0.5).to(chord)  # the upper side is the wider one
        blank = torch.zeros(count, 0, device=rows.device)
        return Branches(
            row=rows,
            alpha=wide.expand(count, -1).clone(),
            neuron=blank.int(),
            sign=blank.to(torch.int8),
            beta=blank,
        )

    def _rows(self, problems: Branches, dtype: torch.dtype) -> Coefficients:
        shape = self.relaxation.graph.nodes[self.target].shape
        values = self.matrix[problems.row].to(dtype).view(-1, *shape)
        return Coefficients(values, self.owner[problems.row])

    def look(self, problems: Branches) -> View:
        """Bound subproblems with the parameters they have, in float32."""
        box = self.owner[problems.row]
        rule = BranchRule(self.neurons, problems, box)
        rows = self._rows(problems, torch.float32)
        form = backward(self.graph, self.rough_target, rows, {}, activation=rule)
        bound = form.minimum(self.box) + self.offset[problems.row].float()
        point = form.minimizer(self.box)
        return View(bound, rule.coefficients, rule.slope, rule.rise, point, box)

    def push(self, view: View) -> Tensor:
        """Push the points where bounds are attained forward: what each neuron sees, [D, U]."""
        seen = torch.zeros_like(view.slope)
        values = {0: view.point}
        last_use = {j: i for i, node in enumerate(self.graph.nodes) for j in node.inputs}
        for i, node in enumerate(self.graph.nodes[1:], start=1):
            check_time()
            inputs = [values[j] for j in node.inputs]
            if i in self.neurons.layers:
                values[i] = self._bend(self.neurons.layers[i], inputs[0], view, seen)
                if i == self.last:
                    break
            else:
                values[i] = POINT_RULES[type(node.op)](node.op, *inputs)
            for j in set(node.inputs):
                if last_use[j] == i:
                    del values[j]
        return seen

    def _bend(self, layer: Layer, h: Tensor, view: View, seen: Tensor) -> Tensor:
        part = flat(h).index_select(1, layer.places)
        seen[:, layer.span] = part
        bent = torch.addcmul(view.rise[:, layer.span], part, view.slope[:, layer.span])
        stable = self.neurons.seen_by(flat(layer.slope), view.box)
        return (flat(h) * stable).index_copy_(1, layer.places, bent).view_as(h)

    def improve(
        self,
        problems: Branches,
        *,
        iterations: int,
        alpha_rate: float = 0.1,
        beta_rate: float = 0.1,
        threshold: float = 0.0,
    ) -> tuple[Tensor, Branches, Tensor]:
        """Improve the bounds by gradient ascent, as many at once as fit into memory.

        Return the best bounds, their parameters, and what each unstable neuron costs the bound
        at the end (`costs`). Subproblems whose bound exceeds `threshold` leave the batch once
        they are a fifth of it; of several boxes at once, so that no bound depends on the others.
        """
        leave = 5 if len(self.box.lower) == 1 else len(problems)
        bound = problems.alpha.new_full((len(problems),), -torch.inf)
        kept = replace(problems, alpha=problems.alpha.clone(), beta=problems.beta.clone())
        costs = torch.zeros_like(problems.alpha)
        for alive in torch.arange(len(problems), device=bound.device).split(self.chunk):
            parameters = {
                "alpha": Parameter(problems.alpha[alive], alpha_rate, 0.0, 1.0),
                "beta": Parameter(problems.beta[alive], beta_rate, 0.0, None),
            }
            ascent = Ascent(parameters, decay=DECAY)
            for iteration in range(iterations + 1):
                check_time()
                moved = {name: p.values for name, p in ascent.parameters.items()}
                now = replace(problems[alive], **moved)
                view = self.look(now)
                ascent.record(view.bound)
                proved = ascent.bound > threshold
                last = iteration == iterations or bool(proved.all())
                if last or leave * int(proved.sum()) >= len(proved):
                    bound[alive] = ascent.bound
                    kept.alpha[alive], kept.beta[alive] = ascent.best["alpha"], ascent.best["beta"]
                    costs[alive] = self.costs(now, view)
                    if last:
                        break
                    going = (~proved).nonzero()[:, 0]
                    alive, now, view = alive[going], now[going], view[going]
                    ascent.select(going)
                ascent.step(self.gradients(now, view))
        return bound, kept, costs

    def gradients(self, problems: Branches, view: View) -> dict[str, Tensor]:
        """Return how the bounds change with alpha and beta."""
        seen = self.push(view)
        at_splits = seen.gather(1, problems.neuron.long())
        return {
            "alpha": view.coefficients.clamp(min=0).mul_(seen),
            "beta": (problems.sign * at_splits).neg_(),
        }

    def costs(self, problems: Branches, view: View) -> Tensor:
        """Return by how much the upper line's intercept of each neuron lowers the bound, [D, U].

        Neurons that use their lower line come after all others, those that are split are at -1.
        """
        size = view.coefficients.abs().mul_(self.neurons.seen_by(self.neurons.peak, view.box))
        cost = torch.where(view.coefficients < 0, size, 1e-6 * size)
        if len(self.box.lower) > 1:
            cost[~self.neurons.bends[view.box]] = -1.0
        owner, slot = problems.sign.nonzero(as_tuple=True)
        cost[owner, problems.neuron[owner, slot].long()] = -1.0
        return cost

    def strict(self, problems: Branches) -> Tensor:
        """Return proved lower bounds, in float64; parameters are moved back into their limits."""
        dtype, relaxation = self.matrix.dtype, self.relaxation
        reach = flat(largest(relaxation.boxes[self.target]))
        parts = [self.matrix.new_zeros(0)]
        for start in range(0, len(problems), max(1, self.chunk // 2)):
            part = problems[start : start + max(1, self.chunk // 2)]
            box = self.owner[part.row]
            rule = BranchRule(self.exact, part, box)
            form = relaxation.pull(self.target, self._rows(part, dtype), activation=rule)
            bound = form.minimum(relaxation.box, rounding=relaxation.rounding)
            matrix, offset = self.matrix[part.row], self.offset[part.row]
            # The rows may have been rounded to float64, and so is the sum with their offset.
            met = self.exact.seen_by(reach, box)
            size = (matrix.abs() * met).sum(1) + bound.abs() + offset.abs()
            parts.append(bound + offset - 4 * relaxation.rounding * size)
        return torch.cat(parts)


def _first_box(matrix: Tensor) -> Tensor:
    """Return the box of rows that are all about the first one."""
    return torch.zeros(len(matrix), dtype=torch.long, device=matrix.device)
