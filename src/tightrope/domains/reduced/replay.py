"""Strict bounds of subproblems: what makes a bound a proof.

The search runs in float32. The slopes and multipliers it finds are replayed here in float64 in
one backward pass over the reduced network, which carries the rounding errors of its own making
(`reduction.py`); those of the pass itself are bounded a priori, as in
`domains/linear/rules.py`: coefficients are taken as the numbers they are, and a sum of n products
is off by at most `n u / (1 - n u)` times the sum of their absolute values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.box import BallBox, Box
from tightrope.budget import fitting, rows_at_once
from tightrope.deadline import check_time
from tightrope.domains.balls import fall
from tightrope.domains.linear.bounded import MEMORY
from tightrope.domains.linear.relaxations import lines
from tightrope.domains.reduced.reduction import Reduced
from tightrope.domains.reduced.splits import Cuts, Subproblems
from tightrope.domains.rounding import growth
from tightrope.graph import ops


def strict_bounds(
    network: Reduced,
    problems: Subproblems,
    weights: Tensor | None = None,
    cuts: Cuts | None = None,
    regions: Box | None = None,
) -> Tensor:
    """Return proved lower bounds of the rows of some subproblems.

    With `weights`, [D, R] and not negative, each subproblem is about that combination of all
    rows instead of its own row. Parameters out of their limits are moved back into them. `regions`
    are the neurons' bounds in each region, [regions, U]; there is one without.
    """
    per_problem = 8 * 8 * (network.size + network.rows.outer.shape[1])
    chunk = rows_at_once(fitting(MEMORY, network.lower.device), per_problem, network.work)
    parts = [network.lower.new_zeros(0)]
    for start in range(0, len(problems), chunk):
        check_time()
        some = slice(start, start + chunk)
        chosen = None if weights is None else weights[some]
        parts.append(_bounds(network, problems[some], chosen, cuts, regions))
    return torch.cat(parts)


def _bounds(
    network: Reduced,
    problems: Subproblems,
    weights: Tensor | None,
    cuts: Cuts | None,
    regions: Box | None,
) -> Tensor:
    rounding, neurons, dtype = network.rounding, network.neurons, network.lower.dtype
    a, x, constant, lost = _start(network, problems, weights)
    sign = problems.sign
    alpha = problems.alpha.to(dtype).clamp(0.0, 1.0)
    after = -problems.beta.to(dtype).clamp(min=0.0) * sign
    seen = torch.maximum(network.upper, -network.lower)  # of pre-activations
    if cuts is not None:
        gamma = problems.gamma.to(dtype).clamp(min=0.0)
        share = growth(len(cuts.constant) + 4, rounding)
        size = gamma @ (cuts.on_outputs.abs() @ network.reach + cuts.on_inputs.abs() @ seen)
        lost = lost + share * (size + gamma @ cuts.constant.abs())
        a = a + gamma @ cuts.on_outputs
        after = after + gamma @ cuts.on_inputs
        constant = constant + gamma @ cuts.constant
    free = sign == 0
    active = (sign > 0).to(dtype)
    line = network.lines
    if regions is not None:
        mine = regions.map(lambda t: t[problems.region])
        line = lines(ops.Relu(), mine, rounding=rounding)
    chord = torch.where(free, line.upper_slope, active)
    peak = torch.where(free, line.upper_intercept, 0.0)
    low = torch.where(free, alpha, active)
    h = torch.zeros_like(a)
    for layer in reversed(network.layers):
        span = layer.span
        a[:, span] += h[:, span.stop :] @ neurons.inner[span.stop :, span]
        part = a[:, span]
        h[:, span] = part * torch.where(part >= 0, low[:, span], chord[:, span])
        h[:, span] += after[:, span]
    # Coefficients of outputs and inputs, sums over all neurons behind them, and constants.
    #
    # A slope's product and its sum with `after` need no room of their own. Where a neuron is
    # split, its slope is 0 or 1 and the product exact; where it is not, `after` is what cuts say,
    # and the two errors are at most 2 u (|h| + gamma |on_inputs|), for which the steps that
    # `growth` adds here and in `share` are plenty. Adding a cut's coefficient to beta is off by
    # u beta |h|, less than the beta |h| by which the multiplier lowers the bound at that point.
    terms = network.size + 16
    lost = lost + growth(terms, rounding) * (h.abs() @ network.magnitude)
    lost = lost + h.abs() @ neurons.slack
    x = network.outer.added(h, x.clone())
    rise = a.clamp(max=0.0) * peak
    constant = constant + h @ neurons.constant + rise.sum(1)
    lost = lost + growth(terms, rounding) * rise.abs().sum(1)
    lower, upper = (t[0] for t in network.box.corners)
    bound = lowest(network.box, x, rounding)
    inputs = torch.maximum(lower.abs(), upper.abs())
    size = x.abs() @ inputs
    # Adding up the bound takes len(lower) + 4 steps; 24 - 4 are left for the sums below.
    lost = lost + growth(len(lower) + 16, rounding) * (size + constant.abs())
    # Coefficients that underflow are off by less than the smallest normal number.
    tiny = torch.finfo(dtype).tiny * (1 + network.magnitude.sum() + seen.sum() + inputs.sum())
    return bound + constant - (1 + 1e-9) * lost - tiny


def lowest(box: Box, x: Tensor, rounding: float) -> Tensor:
    """Return how low rows get on a box, computed plainly; on a ball, with room for its rounding."""
    lower, upper = (t[0] for t in box.corners)
    bound = x.clamp(min=0) @ lower + x.clamp(max=0) @ upper
    if not isinstance(box, BallBox):
        return bound
    point, falls = box.point[0], fall(box, x, box.point, *box.corners)
    room = growth(len(point) + 24, rounding) * (x.abs() @ point.abs() + falls)
    return torch.fmax(bound, x @ point - falls - room)  # either one holds


def _start(
    network: Reduced, problems: Subproblems, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the coefficients to begin with, and what was lost on the way to them."""
    rows = network.rows
    if weights is None:
        chosen = rows[problems.row]
        return (
            chosen.inner.clone(),
            chosen.outer,
            chosen.constant,
            _row_error(network)[problems.row],
        )
    share = growth(len(rows) + 4, network.rounding)
    lost = weights @ (_row_error(network) + share * network.magnitude_of(rows))
    return weights @ rows.inner, weights @ rows.outer, weights @ rows.constant, lost


def _row_error(network: Reduced) -> Tensor:
    """Return the rows' own slack, and the rounding of adding to them."""
    return network.rows.slack + growth(network.size + 16, network.rounding) * network.magnitude_of(
        network.rows
    )
