"""Bounds of subproblems in which some activations see a part of their interval only."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from linear_helpers import EPS
from torch import Tensor, nn

from tightrope.box import Box, flat
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import optimized_rows, relax
from tightrope.domains.pieces.bounder import PieceBounder
from tightrope.domains.pieces.subproblems import Cuts, Pieces, join, whole
from tightrope.graph import Graph, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(nn.Module):
    """A product, and a path around everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h * torch.sigmoid(self.second(h)) + torch.relu(h))


def dense(*activations: nn.Module) -> nn.Module:
    layers: list[nn.Module] = []
    size = 4
    for activation in activations:
        layers += [nn.Linear(size, 6), activation]
        size = 6
    return nn.Sequential(*layers, nn.Linear(size, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        *(nn.Conv2d(1, 3, 2, padding=1), nn.SiLU()),
        *(nn.Conv2d(3, 2, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8, 3)),
    )


NETWORKS = {
    "sigmoid": lambda: dense(nn.Sigmoid(), nn.Sigmoid()),
    "tanh and relu": lambda: dense(nn.Tanh(), nn.ReLU(), nn.Tanh()),
    "gelu": lambda: dense(nn.GELU(), nn.GELU()),
    "mixed": lambda: dense(nn.Softplus(), nn.ELU(), nn.Mish()),
    "steep": lambda: dense(nn.LeakyReLU(2.0), nn.Tanh()),
    "product": Gated,
    "conv": conv,
}


def network(name: str, seed: int = 0) -> Graph:
    torch.manual_seed(seed)
    module = NETWORKS[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.5)
    return trace(module.double(), (4,)).detach()


def relaxation_of(name: str, seed: int = 0, radius: float = 0.6) -> Relaxation:
    graph = network(name, seed)
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    return relax(graph, Box(center - radius, center + radius), rounding=EPS)


def bounder_of(relaxation: Relaxation, seed: int = 0) -> PieceBounder:
    generator = torch.Generator().manual_seed(seed)
    matrix, offset = torch.randn(3, 3, generator=generator).double(), torch.randn(3).double()
    return PieceBounder(relaxation, matrix, offset, optimized_rows(relaxation, matrix)[1])


def values_of(graph: Graph, x: Tensor) -> dict[int, Tensor]:
    """Return what each node computes, in float64."""
    from tightrope.graph.evaluate import RULES

    values = {0: x}
    for i, node in enumerate(graph.nodes[1:], start=1):
        values[i] = RULES[type(node.op)](node.op, *(values[j] for j in node.inputs))
    return values


def random_pieces(bounder: PieceBounder, count: int, cuts: int, seed: int = 0) -> Pieces:
    """Return subproblems cut anywhere, some of them several times at one number."""
    generator = torch.Generator().manual_seed(seed)
    problems = whole(torch.randint(3, (count,), generator=generator))
    positions = sorted(bounder.boxes)
    for _ in range(cuts):
        node = torch.tensor(positions)[torch.randint(len(positions), (count,), generator=generator)]
        share = torch.rand(count, generator=generator, dtype=torch.float64)
        size = torch.tensor([flat(bounder.boxes[i].lower).shape[1] for i in node.tolist()])
        place = (torch.rand(count, generator=generator) * size).long()
        at = list(zip(node.tolist(), place.tolist(), strict=True))
        low, high = (
            torch.stack([flat(bounder.boxes[i].corners[k])[0, p] for i, p in at]) for k in (0, 1)
        )
        where = Cuts(node, place, low + share * (high - low))
        sides = torch.rand(count, generator=generator) < 0.5
        both = [problems.cut(where, 1), problems.cut(where, -1)]
        problems = join(
            [both[0][i : i + 1] if s else both[1][i : i + 1] for i, s in enumerate(sides)]
        )
    beta = torch.rand(problems.beta.shape, generator=generator)
    return dataclasses.replace(problems, beta=beta)


def inside(problems: Pieces, graph: Graph, values: dict[int, Tensor]) -> Tensor:
    """Return which points lie in which subproblem, [D, points]."""
    found = torch.ones(len(problems), len(values[0]), dtype=torch.bool)
    for d in range(len(problems)):
        for node, place, side, point in zip(
            *(
                t[d].tolist()
                for t in (problems.node, problems.place, problems.side, problems.point)
            ),
            strict=True,
        ):
            if side:
                h = flat(values[graph.nodes[node].inputs[0]])[:, place]
                found[d] &= side * (h - point) >= 0
    return found


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_on_every_piece(name: str, seed: int) -> None:
    relaxation = relaxation_of(name, seed)
    bounder = bounder_of(relaxation, seed)
    box = relaxation.box
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(4000, 4, generator=generator, dtype=torch.float64)
    shares[1000:] = (3 * shares[1000:] - 1).clamp(0, 1)  # many of them at the faces and corners
    points = box.lower + shares * (box.upper - box.lower)
    values = values_of(relaxation.graph, points)
    rows = values[bounder.target] @ bounder.matrix.T + bounder.offset
    met = 0
    for cuts in (0, 1, 3, 6):
        problems = random_pieces(bounder, 24, cuts, seed)
        bound = bounder.strict(problems)
        held = inside(problems, relaxation.graph, values)
        lowest = torch.where(held, rows.T[problems.row], torch.inf).amin(1)
        met += int(held.any(1).sum())
        # Rows at points are rounded themselves.
        assert (bound <= lowest + 1e-12).all()
        assert ((bounder.look(problems).bound - bound).abs() <= 1e-4 * (1 + bound.abs())).all()
    assert met > 40


@pytest.mark.parametrize("name", NETWORKS)
def test_cutting_where_most_is_lost_helps(name: str) -> None:
    bounder = bounder_of(relaxation_of(name))
    problems = whole(torch.arange(3))
    first, _, where = bounder.improve(problems, iterations=0)
    assert (where.node > 0).all()
    before = first.clone()
    for _ in range(4):
        sides = [problems.cut(where, side) for side in (1, -1)]
        problems = join(sides)
        bound, problems, where = bounder.improve(problems, iterations=6, threshold=torch.inf)
        lower = torch.minimum(*bound.chunk(2))
        kept = (bound.chunk(2)[0] > bound.chunk(2)[1]).long()  # go on with the worse half
        index = torch.arange(3) + 3 * kept
        problems, where = problems[index], where[index]
    # Lines of a part are chosen anew, so that a bound may also fall a little.
    assert (lower > before).sum() >= 2 and (lower - before).sum() > 0


def test_multipliers_are_what_makes_a_cut_hold() -> None:
    """Two bends of one input: lines do not know that it is on one side of both."""
    module = nn.Sequential(nn.Linear(1, 2, bias=False), nn.LeakyReLU(0.5), nn.Linear(2, 1))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        module[2].weight.copy_(torch.tensor([[-1.0, -1.0]]))
        module[2].bias.fill_(1.0)
    graph = trace(module.double(), (1,)).detach()
    ones = torch.ones(1, 1, dtype=torch.float64)
    relaxation = relax(graph, Box(-ones, ones), rounding=EPS)
    bounder = PieceBounder(relaxation, ones, 0 * ones[0], optimized_rows(relaxation, ones)[1])
    (node,) = (i for i, n in enumerate(graph.nodes) if isinstance(n.op, ops.LeakyRelu))
    zero = torch.zeros(1, dtype=torch.long)
    cut = Cuts(zero + node, zero, zero.double())
    again = Cuts(zero + node, zero + 1, zero.double())
    # Where x >= 0 the output is 1 - x + x / 2, at least 1 / 2.
    problems = whole(zero).cut(cut, 1).cut(again, -1)
    alone = bounder.strict(problems)
    _, improved, _ = bounder.improve(problems, iterations=60, threshold=1.0)
    assert bounder.strict(improved) >= alone
    assert abs(float(bounder.strict(improved)) - 0.5) < 1e-3
    beta = improved.beta.new_tensor([[-5.0, 3.0]])
    # A multiplier below zero would be no proof: it counts as zero.
    at_zero = dataclasses.replace(improved, beta=beta.clamp(min=0))
    assert bounder.strict(dataclasses.replace(improved, beta=beta)) == bounder.strict(at_zero)
