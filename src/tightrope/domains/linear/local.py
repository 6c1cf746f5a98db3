"""Optimised slopes for rows that see a part of the network only, held as windows.

Where a neuron depends on a window of each layer, its slopes are those of that window: a thousand
instead of a hundred thousand. The gradient of the bound is what autograd computes of the pass back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.budget import fitting, rows_at_once
from tightrope.deadline import check_time
from tightrope.domains.linear.ascent import Ascent, Parameter
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients, unit_rows
from tightrope.domains.linear.relaxations import free_slopes
from tightrope.graph import ops

RATE = 0.3
MEMORY = 1 << 29  # bytes for what autograd holds of a pass back
HELD = 32  # numbers for each coefficient


def best_sides(
    relaxation: Relaxation, target: int, places: Tensor, sign: Tensor, *, iterations: int
) -> Tensor:
    """Return strict lower bounds of neurons, or of minus them, each with slopes of its own.

    `sign` is 1 or -1 for each of the places. For a batch of one.
    """
    shape, like = relaxation.graph.nodes[target].shape, relaxation.box.lower

    def rows(part: slice) -> Coefficients:
        units = unit_rows(shape, places[part], None, like, windows=True)
        factor = sign[part].view(-1, *(1 for _ in units.values.shape[1:]))
        return units.like(units.values * factor.to(like))

    if not len(places):
        return like.new_zeros(0)
    largest = relaxation.pull(target, rows(slice(0, 1))).largest
    size = rows_at_once(fitting(MEMORY, like.device), 4 * HELD * largest)
    bounds = []
    for first in range(0, len(places), size):
        exact = rows(slice(first, first + size))
        slopes = local_slopes(
            relaxation.rough, target, exact.like(exact.values.float()), iterations=iterations
        )
        strict = {i: t.to(like.dtype) for i, t in slopes.items()}
        bounds.append(relaxation.lower(target, exact, slopes=strict))
    return torch.cat(bounds)


def local_slopes(
    relaxation: Relaxation,
    target: int,
    rows: Coefficients,
    *,
    iterations: int,
    rate: float = RATE,
) -> dict[int, Tensor]:
    """Return lower slopes for each row that make its lower bound large, as its windows see them."""
    nodes = relaxation.graph.nodes
    with torch.no_grad():
        passed = relaxation.pull(target, rows).passed
    parameters = {}
    for i, a in passed.items():
        op = nodes[i].op
        if free_slopes(op, relaxation.boxes[nodes[i].inputs[0]]) is None:
            continue
        seen = a.take(relaxation.lines[i].lower_slope)
        seen = seen.expand(len(rows.values), *seen.shape[1:]).clone()
        low = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        parameters[i] = Parameter(seen, rate, low, 1.0)
    if not parameters:
        return {}
    ascent = Ascent(parameters)
    for iteration in range(iterations + 1):
        check_time()
        slopes = {i: p.values for i, p in ascent.parameters.items()}
        if iteration == iterations:
            with torch.no_grad():
                ascent.record(relaxation.pull(target, rows, slopes=slopes).minimum(relaxation.box))
            break
        with torch.enable_grad():
            free = {i: t.detach().requires_grad_() for i, t in slopes.items()}
            bounds = relaxation.pull(target, rows, slopes=free).minimum(relaxation.box)
        if not bounds.requires_grad:  # no slope makes a difference
            ascent.record(bounds)
            break
        # What is multiplied by zeros alone (before steps, say) may not be part of the bound.
        gradients = torch.autograd.grad(
            bounds.sum(), list(free.values()), allow_unused=True, materialize_grads=True
        )
        ascent.record(bounds.detach())
        ascent.step(dict(zip(free, gradients, strict=True)))
    return ascent.best
