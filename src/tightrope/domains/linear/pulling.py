"""Coefficients through the lines of functions: the rule of `pull_activation`, in fewer passes.

Such layers are wide (all pairs of tokens under a softmax), so each row is read twice: its positive
part meets the lower lines, its negative part the upper ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightrope.box import flat
from tightrope.domains.linear.coefficients import Coefficients, Windows
from tightrope.domains.rounding import growth
from tightrope.graph import ops

if TYPE_CHECKING:
    from tightrope.domains.linear.rules import Pass


def pull_function(op: ops.Function, a: Coefficients, i: int, state: Pass) -> Coefficients:
    """Pull coefficients back through the lines of a function."""
    state.passed[i] = a
    line = state.lines[i]
    above = a.like(a.values.clamp(min=0))
    below = a.like(a.values - above.values)
    if state.magnitudes is None:
        reach = torch.zeros_like(line.lower_slope)
    else:
        reach = state.magnitudes[state.graph.nodes[i].inputs[0]]
    slope, intercept = (line.lower_slope, line.upper_slope), []
    for part, limit in ((above, line.lower_intercept), (below, line.upper_intercept)):
        intercept.append(_bounded(part, limit, state))
    parts = zip((above, below), slope, intercept, strict=True)
    found = [_dots(part, (c, c.abs(), s.abs() * reach)) for part, s, c in parts]
    state.add_number(found[0][0] + found[1][0])
    if state.rounding:
        state.lose(found[0][1] - found[1][1], growth(a.values[0].numel(), state.rounding))
        state.lose(found[0][2] - found[1][2], 4 * state.rounding)
    values = above.values.mul_(a.take(slope[0])).add_(below.values.mul_(a.take(slope[1])))
    return a.like(values)


def _bounded(part: Coefficients, intercept: Tensor, state: Pass) -> Tensor:
    """Return intercepts that are numbers; rows that meet others get no bound."""
    finite = torch.isfinite(intercept)
    if bool(finite.all()):
        return intercept
    lost = part.like(part.values.abs()).dot((~finite).to(intercept)) != 0
    state.constant = torch.where(lost, -torch.inf, state.constant)
    return torch.where(finite, intercept, 0.0)


def _dots(part: Coefficients, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the products of rows with several fields, read once where all have the same."""
    if isinstance(part, Windows) or any(len(f) > 1 for f in fields):
        return tuple(part.dot(f) for f in fields)
    shape = part.values.shape[1:]
    columns = torch.stack([f.expand(1, *shape).reshape(-1) for f in fields], 1)
    return (flat(part.values) @ columns).unbind(1)
