"""Reduced networks, their values, and random subproblems of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_helpers import small_box, small_network
from torch import Tensor, nn

from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import Effort, relax
from tightrope.domains.reduced.reduction import Reduced, reduce
from tightrope.domains.reduced.splits import Cuts, Subproblems
from tightrope.graph import evaluate

KINDS = ["dense", "conv", "residual"]
ACTIVATIONS = {"relu": nn.ReLU(), "leaky": nn.LeakyReLU(0.2)}
NETWORKS = pytest.mark.parametrize("kind", KINDS)
BENT = pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
MATRIX = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0], [-0.5, 0.0, 2.0]], dtype=torch.float64)
OFFSET = torch.tensor([0.3, 0.0, -1.0], dtype=torch.float64)


def reduced(
    kind: str, activation: str, *, radius: float = 0.4, rounding: float = 0.0
) -> tuple[Relaxation, Reduced]:
    graph = small_network(kind, ACTIVATIONS[activation])
    found = relax(graph, small_box(graph, radius), effort=Effort(0), rounding=rounding)
    network = reduce(found, MATRIX, OFFSET)
    assert network.size > 3, "nothing to test"
    return found, network


def neuron_values(found: Relaxation, network: Reduced, points: Tensor) -> Tensor:
    """Return the unstable pre-activations of the network itself at some points."""
    graph = found.graph
    values = graph.propagate(evaluate.RULES, points, keep=range(len(graph.nodes)))
    parts = [
        values[graph.nodes[layer.position].inputs[0]].flatten(1)[:, layer.places]
        for layer in network.layers
    ]
    return torch.cat([points.new_zeros(len(points), 0), *parts], 1)


def random_problems(network: Reduced, count: int, *, splits: float, seed: int) -> Subproblems:
    """Return subproblems with random parameters; about that share of the neurons is split."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    sign = torch.sign(rand(count, network.size) - 0.5) * (rand(count, network.size) < splits)
    return Subproblems(
        row=torch.randint(0, len(network.rows), (count,), generator=generator),
        sign=sign.to(torch.int8),
        alpha=rand(count, network.size),
        beta=rand(count, network.size) * (rand(count, network.size) < 0.5),
        gamma=rand(count, 0),
        region=torch.zeros(count, dtype=torch.long),
    )


def sampled_signs(h: Tensor, network: Reduced, splits: float, seed: int) -> Tensor:
    """Return splits that a given point satisfies, one subproblem per point."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.rand(h.shape, generator=generator) < splits
    return (torch.where(h >= 0, 1, -1) * some).to(torch.int8)


def simple_cuts(network: Reduced, seed: int = 0) -> Cuts:
    """Valid constraints: y >= h and y >= 0, the triangle's top, and sums of them.

    Each is written as `on_outputs y + on_inputs h + constant <= 0`.
    """
    count = network.size
    eye, zero = torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    chord = network.upper / (network.upper - network.lower)
    single = [
        (-eye, eye, zero),
        (-eye, 0 * eye, zero),
        (eye, -torch.diag(chord), chord * network.lower),
    ]
    on_outputs, on_inputs, constant = (torch.cat(p) for p in zip(*single, strict=True))
    generator = torch.Generator().manual_seed(seed)
    mix = torch.rand(4, 3 * count, generator=generator, dtype=torch.float64)
    mix = mix * (torch.rand(mix.shape, generator=generator) < 0.2)
    return Cuts(
        torch.cat((on_outputs, mix @ on_outputs)),
        torch.cat((on_inputs, mix @ on_inputs)),
        torch.cat((constant, mix @ constant)),
    )


def with_gamma(problems: Subproblems, cuts: Cuts, seed: int = 0) -> Subproblems:
    generator = torch.Generator().manual_seed(seed)
    gamma = torch.rand(len(problems), len(cuts.constant), generator=generator, dtype=torch.float64)
    return replace(problems, gamma=gamma * (gamma > 0.7))
