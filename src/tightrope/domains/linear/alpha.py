"""alpha-CROWN: lower slopes of unstable ReLUs chosen by gradient ascent on the bound.

The gradient is exact and in closed form. The bound of a row is attained at one corner of the
box; pushing that corner forward through the lines that the row uses gives the value h that each
activation sees, and the derivative with respect to a lower slope is `max(a, 0) h`, where `a` is
the coefficient that arrived there. One pass back, one pass forward, no autograd.

`alpha_bounds` does so on a reduced network, `optimize_slopes` on the network itself: the way for
networks with too many unstable neurons to be reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tightrope.budget import fitting, rows_at_once
from tightrope.deadline import check_time
from tightrope.domains.linear.ascent import Ascent, Parameter
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.pulled import Form
from tightrope.domains.linear.relaxations import Lines, free_slopes
from tightrope.domains.reduced.reduction import Reduced
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder, Subproblems, join
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES


def alpha_bounds(
    network: Reduced,
    *,
    iterations: int,
    rate: float,
    threshold: float = float("inf"),
    memory: int = 1 << 29,
) -> tuple[Tensor, Subproblems]:
    """Return strict lower bounds of all rows of a reduced network, and the slopes behind them.

    Rows whose bound exceeds the threshold are not improved any further.
    """
    bounder = Bounder(network.to(torch.float32))
    per_row = 4 * (16 * network.size + 3 * network.rows.outer.shape[1])
    order = torch.arange(len(network.rows), device=network.lower.device)
    bounds, slopes = [], []
    work = network.size * (network.size + network.rows.outer.shape[1])
    for part in order.split(rows_at_once(fitting(memory, order.device), per_row, work)):
        _, problems = bounder.improve(
            bounder.root(part), iterations=iterations, alpha_rate=rate, threshold=threshold
        )
        bounds.append(strict_bounds(network, problems))
        slopes.append(problems)
    return torch.cat(bounds), join(slopes)


def optimize_slopes(
    relaxation: Relaxation,
    target: int,
    rows: Coefficients,
    *,
    iterations: int,
    rate: float = 0.5,
    threshold: float | None = None,
) -> dict[int, Tensor]:
    """Return lower slopes for each row (dense ones) that make its lower bound large.

    With a `threshold`, rows whose bound exceeds it leave the batch.
    """
    graph = relaxation.graph
    before = ancestors(graph, target)
    places = [
        i
        for i in relaxation.lines
        if i in before
        and free_slopes(graph.nodes[i].op, relaxation.boxes[graph.nodes[i].inputs[0]]) is not None
    ]
    count = len(rows.values)
    start = {i: rows.take(relaxation.lines[i].lower_slope) for i in places}
    start = {i: t.expand(count, *t.shape[1:]).clone() for i, t in start.items()}
    if not places or any(isinstance(graph.nodes[i].op, ops.MaxPool) for i in before):
        return start
    ascent = Ascent({i: Parameter(start[i], rate, *_limits(graph.nodes[i].op)) for i in places})
    kept = {i: t.clone() for i, t in start.items()}
    alive = torch.arange(count, device=rows.values.device)
    for iteration in range(iterations + 1):
        check_time()
        slopes = {i: p.values for i, p in ascent.parameters.items()}
        form = relaxation.pull(target, rows, slopes=slopes)
        ascent.record(form.minimum(relaxation.box))
        if iteration == iterations:
            break
        seen = forward(relaxation, target, form, slopes)
        # What lies before an operation that is bounded by intervals is not reached.
        reached = {i: form.passed[i].values.clamp(min=0) * seen[i] for i in places if i in seen}
        ascent.step({i: reached.get(i, torch.zeros_like(slopes[i])) for i in places})
        if threshold is not None and (ascent.bound > threshold).any():
            for i, best in ascent.best.items():
                kept[i][alive] = best
            going = (ascent.bound <= threshold).nonzero()[:, 0]
            alive, rows = alive[going], select_rows(rows, going)
            ascent.select(going)
            if not len(alive):
                return kept
    for i, best in ascent.best.items():
        kept[i][alive] = best
    return kept


def _limits(op: ops.Op) -> tuple[float, float]:
    return (op.slope if isinstance(op, ops.LeakyRelu) else 0.0, 1.0)


def select_rows(rows: Coefficients, index: Tensor) -> Coefficients:
    """Return some of the rows (dense ones)."""
    return Coefficients(rows.values[index], None if rows.owner is None else rows.owner[index])


def forward(
    relaxation: Relaxation,
    target: int,
    form: Form,
    slopes: Mapping[int, Tensor],
    *,
    lines: Mapping[int, Lines] | None = None,
) -> dict[int, Tensor]:
    """Push each row's minimiser forward through the lines it uses; return what activations see.

    `lines` are those that were used if they are not the relaxation's own.
    """
    graph = relaxation.graph
    lines = relaxation.lines if lines is None else lines
    before = ancestors(graph, target)
    values: dict[int, Tensor] = {0: form.minimizer(relaxation.box)}
    seen: dict[int, Tensor] = {}
    for i in sorted(before - {0}):
        node = graph.nodes[i]
        inputs = [values[j] for j in node.inputs]
        if i not in form.passed:
            if i == target:  # only an activation has a slope that depends on its input
                break
            values[i] = POINT_RULES[type(node.op)](node.op, *inputs)
            continue
        line, a, h = lines[i], form.passed[i], inputs[0]
        lower_slope = a.take(line.lower_slope)
        if i in slopes:
            lower_slope = torch.where(a.take(line.upper_intercept > 0), slopes[i], lower_slope)
        below = lower_slope * h + a.take(line.lower_intercept)
        above = a.take(line.upper_slope) * h + a.take(line.upper_intercept)
        seen[i] = h
        values[i] = torch.where(a.values >= 0, below, above)
    return seen


def ancestors(graph: Graph, target: int) -> set[int]:
    """Return the positions that a node depends on, itself included."""
    found = {target}
    for i in range(target, 0, -1):
        if i in found:
            found.update(graph.nodes[i].inputs)
    return found
