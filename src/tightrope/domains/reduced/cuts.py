"""Multi-neuron constraints of a whole reduced network.

Groups of neurons of one layer are bounded jointly: the directions that
`tightrope.domains.reduced.multineuron` asks for are rows over the neurons before, bounded like any
other. The constraints hold on the whole box, so all subproblems share them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tightrope.domains.linear.alpha import alpha_bounds
from tightrope.domains.reduced.multineuron import GroupSettings, layer_constraints
from tightrope.domains.reduced.reduction import Layer, Reduced, Rows
from tightrope.domains.reduced.splits import Cuts
from tightrope.domains.rounding import growth


def network_cuts(
    network: Reduced, settings: GroupSettings, *, iterations: int = 10, rate: float = 0.25
) -> Cuts | None:
    """Return constraints on groups of neurons of all ReLU layers, None if there are none."""
    on_outputs: list[Tensor] = []
    on_inputs: list[Tensor] = []
    constant: list[Tensor] = []
    for layer in network.layers:
        if layer.left:
            continue  # the outputs of these are relu(h) only up to a linear part

        def bound_rows(coefficients: Tensor, layer: Layer = layer) -> Tensor:
            part = _before(network, layer)
            part = replace(part, rows=-_combined(network, layer, coefficients))
            return -alpha_bounds(part, iterations=iterations, rate=rate)[0]

        found = layer_constraints(
            network.lower[layer.span], network.upper[layer.span], bound_rows, settings
        )
        if found is None:
            continue
        wide = found.constant.new_zeros(len(found.constant), network.size)
        for store, values in ((on_outputs, found.on_outputs), (on_inputs, found.on_inputs)):
            whole = wide.clone()
            whole[:, layer.span] = values.to_dense()
            store.append(whole)
        constant.append(found.constant)
    if not constant:
        return None
    return Cuts(torch.cat(on_outputs), torch.cat(on_inputs), torch.cat(constant))


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
    return Rows(
        coefficients @ rows.inner[span, :end],
        coefficients @ rows.outer[span],
        coefficients @ rows.constant[span],
        (coefficients.abs() @ slack) * (1 + share),
    )
