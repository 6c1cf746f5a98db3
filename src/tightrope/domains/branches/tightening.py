"""Better bounds of the neurons that matter.

Bounds of all neurons of a large network by linear bounds would take minutes. What the bound of an
open row loses at each neuron is known from its own backward pass (`GraphBounder.costs`); a few
neurons of each layer make up most of it, and these are bounded again, front to back, with their
own slopes optimised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.rule import activations
from tightrope.domains.linear.coefficients import unit_rows
from tightrope.domains.linear.relaxations import lines

RATE = 0.3
SENSITIVITY = 0.16


def worth(
    bounder: GraphBounder, costs: Tensor, *, most: int, apart: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return the neurons that cost most, by the position of their activation.

    `costs` are those of some rows, [rows, U]. Neurons of the first layer do not count (intervals
    are exact there), nor do those that are set `apart`.
    """
    whole = costs.amax(0)
    layers = bounder.exact.layers
    whole[: min((layer.span.stop for layer in layers.values()), default=0)] = 0.0
    for i, layer in layers.items():
        whole[layer.span][torch.isin(layer.places, apart.get(i, layer.places[:0]))] = 0.0
    found = whole.topk(min(most, len(whole)))
    order = found.indices[found.values > 0].sort().values
    chosen = {}
    for i, layer in layers.items():
        mine = order[(order >= layer.span.start) & (order < layer.span.stop)]
        chosen[i] = layer.places[mine - layer.span.start]
    return chosen


def tighten(
    bounder: GraphBounder, chosen: Mapping[int, Tensor], *, iterations: int
) -> Iterator[GraphBounder]:
    """Bound some neurons again, by their activation, front to back.

    After each layer, yields a bounder of the same rows that knows what was found so far.
    """
    for i in activations(bounder.relaxation.graph):
        if len(chosen.get(i, ())):
            bounder = _bound_again(bounder, i, chosen[i], iterations)
            yield bounder


def _bound_again(bounder: GraphBounder, i: int, places: Tensor, iterations: int) -> GraphBounder:
    """Bound some inputs of one activation, on the sides that matter."""
    relaxation = bounder.relaxation
    before = relaxation.graph.nodes[i].inputs[0]
    box = relaxation.boxes[before]
    lower, upper = (t.clone().flatten() for t in box.corners)
    for sign, side in ((1.0, lower), (-1.0, upper)):
        low, high = lower[places], upper[places]
        # How the intercept u l / (u - l) of the upper line changes with this end of [l, u].
        other = high if sign > 0 else -low
        matters = (other / (high - low)) ** 2 >= SENSITIVITY
        mine = places[matters & (low < 0) & (high > 0)]
        if not len(mine):
            continue
        new = sign * _lower_bounds(bounder, i, mine, sign, iterations)
        new = torch.where(torch.isfinite(new), new, side[mine])
        better = torch.maximum if sign > 0 else torch.minimum
        side[mine] = better(side[mine], new)
    tighter = Box(lower.view_as(box.lower), torch.maximum(lower, upper).view_as(box.upper))
    # Magnitudes of the wider bounds are large enough for the tighter ones.
    again = {
        j: lines(node.op, tighter, rounding=relaxation.rounding)
        for j, node in enumerate(relaxation.graph.nodes)
        if node.inputs == (before,) and j in relaxation.lines
    }
    return bounder.on(
        replace(
            relaxation,
            boxes={**relaxation.boxes, before: tighter},
            lines={**relaxation.lines, **again},
        )
    )


def _lower_bounds(
    bounder: GraphBounder, i: int, places: Tensor, sign: float, iterations: int
) -> Tensor:
    """Return strict lower bounds of some inputs of one activation, or of minus them."""
    like = bounder.relaxation.box.lower
    shape = bounder.relaxation.graph.nodes[i].shape
    units = unit_rows(shape, places, None, like, windows=False).values.flatten(1)
    neurons = bounder.before(i, sign * units)
    problems = neurons.root(torch.arange(len(places), device=places.device))
    # Beyond zero, the neuron is stable.
    _, problems, _ = neurons.improve(problems, iterations=iterations, alpha_rate=RATE)
    return neurons.strict(problems)
