"""Multi-neuron constraints of a whole reduced network, on those pairs of neurons that matter.

Of two neurons of one layer that see the same inputs, not both can be at the top of their triangles.
Pairs are chosen by what their triangles cost open subproblems, and by how much their bounds as
functions of the input have in common. The directions that `tightrope.domains.reduced.multineuron`
asks for are rows over the neurons before, bounded like any other. The constraints hold on the whole
box, so all subproblems share them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tightrope.domains.linear.alpha import alpha_bounds
from tightrope.domains.reduced.multineuron import layer_constraints, usable
from tightrope.domains.reduced.reduction import Layer, Reduced, Rows
from tightrope.domains.reduced.splits import Bounder, Cuts
from tightrope.domains.rounding import growth

NEURONS = 48  # of a layer, those whose triangles cost most, are paired
PAIRS = 128  # of all layers
PER_PAIR = 4  # constraints
ITERATIONS, RATE = 3, 0.5


def network_cuts(
    network: Reduced, cost: Tensor, *, pairs: int = PAIRS, per_pair: int | None = PER_PAIR
) -> Cuts | None:
    """Return constraints on pairs of neurons, None if there are none.

    `cost`, [D, U], is what the triangles of the neurons cost each of some subproblems.
    """
    found: list[Cuts] = []
    for layer, members in _pairs(network, cost, pairs):

        def bound_rows(coefficients: Tensor, layer: Layer = layer) -> Tensor:
            part = _before(network, layer)
            part = replace(part, rows=-_combined(network, layer, coefficients))
            return -alpha_bounds(part, iterations=ITERATIONS if part.size else 0, rate=RATE)[0]

        lower, upper = network.lower[layer.span], network.upper[layer.span]
        some = layer_constraints(lower, upper, members, bound_rows, most=per_pair)
        if some is not None:
            wide = some.constant.new_zeros(2, len(some), network.size)
            wide[0, :, layer.span], wide[1, :, layer.span] = some.on_outputs, some.on_inputs
            found.append(Cuts(wide[0], wide[1], some.constant))
    return join_cuts(found) if found else None


def join_cuts(parts: list[Cuts]) -> Cuts:
    """Put constraints together."""
    return Cuts(*(torch.cat(p) for p in zip(*(vars(c).values() for c in parts), strict=True)))


def _pairs(network: Reduced, cost: Tensor, most: int) -> list[tuple[Layer, Tensor]]:
    """Return pairs of neurons by layer, [pairs, 2], the most promising ones of all layers."""
    rough = network.to(torch.float32)
    members, scores, owners = [], [], []
    for k, layer in enumerate(network.layers):
        able = usable(network.lower[layer.span], network.upper[layer.span])
        own = torch.where(able, cost[:, layer.span], 0.0)
        count = min(NEURONS, int((own.sum(0) > 0).sum()))
        # The outputs of leaky layers are relu(h) only up to a linear part.
        if layer.left or count < 2:
            continue
        chosen = own.sum(0).topk(count).indices.sort().values
        first, second = torch.triu_indices(count, count, 1, device=cost.device)
        shared = _shared(rough, layer, chosen)[first, second]
        joint = torch.minimum(own[:, chosen[first]], own[:, chosen[second]]).sum(0)
        scores.append(joint * shared)
        members.append(torch.stack((chosen[first], chosen[second]), 1))
        owners.append(torch.full_like(first, k))
    if not members:
        return []
    score, pair, owner = (torch.cat(p) for p in (scores, members, owners))
    best = score.topk(min(most, len(score))).indices
    best = best[score[best] > 0]
    kept = [(layer, pair[best[owner[best] == k]]) for k, layer in enumerate(network.layers)]
    return [(layer, places) for layer, places in kept if len(places)]


def _shared(rough: Reduced, layer: Layer, places: Tensor) -> Tensor:
    """Return how much of the input pairs of neurons share, from 0 to 1, [count, count].

    It is what their sum or their difference, as linear functions of the input, is narrower than
    both together.
    """
    index = places + layer.span.start
    part = replace(_before(rough, layer), rows=_narrowed(rough.neurons[index], layer.span.start))
    bounder = Bounder(part)
    slopes = bounder.look(bounder.root(torch.arange(len(places), device=places.device))).input
    slopes = slopes * bounder.radius
    size = slopes.abs().sum(1)
    both = size[:, None] + size
    lowest = torch.minimum(torch.cdist(slopes, slopes, p=1), torch.cdist(slopes, -slopes, p=1))
    narrower = (both - lowest) / (2 * torch.minimum(size[:, None], size))
    return narrower.nan_to_num(0.0).clamp(0.0, 1.0)


def _narrowed(rows: Rows, count: int) -> Rows:
    """Return rows that are about the first neurons only."""
    return replace(rows, inner=rows.inner[:, :count])


def _before(network: Reduced, layer: Layer) -> Reduced:
    """Return the network in front of a layer."""
    end = layer.span.start
    rows = network.neurons
    return replace(
        network,
        layers=tuple(k for k in network.layers if k.span.stop <= end),
        neurons=Rows(
            rows.inner[:end, :end], rows.outer[:end], rows.constant[:end], rows.slack[:end]
        ),
        lower=network.lower[:end],
        upper=network.upper[:end],
    )


def _combined(network: Reduced, layer: Layer, coefficients: Tensor) -> Rows:
    """Return linear functions of a layer's neurons as functions of those before."""
    span, end = layer.span, layer.span.start
    rows = network.neurons
    share = growth(coefficients.shape[1] + 4, network.rounding)
    slack = rows.slack[span] + share * network.magnitude[span]
    some = coefficients.any(0)
    coefficients, slack = coefficients[:, some], slack[some]
    return Rows(
        coefficients @ rows.inner[span, :end][some],
        coefficients @ rows.outer[span][some],
        coefficients @ rows.constant[span][some],
        (coefficients.abs() @ slack) * (1 + share),
    )
