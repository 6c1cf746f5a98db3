"""Bounds of subproblems on the network itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from exact import exact_values, fractions
from linear_helpers import EPS, many_points, small_box, small_network
from patterns import exact_minimum
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.branches.subproblems import Branches, join
from tightrope.domains.branches.tightening import tighten, worth
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import CROWN, CROWN_IBP, relax
from tightrope.domains.reduced.reduction import reduce
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder, Subproblems
from tightrope.graph import Graph
from tightrope.graph.evaluate import RULES

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("dense", "conv", "residual")
ACTIVATIONS = {"relu": nn.ReLU(), "leaky": nn.LeakyReLU(0.25)}
EVERY = [(kind, act) for kind in KINDS for act in ACTIVATIONS]


def relaxation_of(kind: str, activation: str, *, radius: float = 1.0, seed: int = 0) -> Relaxation:
    graph = small_network(kind, ACTIVATIONS[activation], seed=seed)
    return relax(graph, small_box(graph, radius, seed=seed), effort=CROWN, rounding=EPS)


def rows_of(relaxation: Relaxation) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    outputs = relaxation.graph.output_shape[0]
    matrix = torch.randn(4, outputs, generator=generator, dtype=torch.float64)
    return matrix, torch.randn(4, generator=generator, dtype=torch.float64)


def random_branches(bounder: GraphBounder, count: int, splits: int, seed: int = 0) -> Branches:
    """Return subproblems with any parameters, each split at so many neurons."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(4, (count,), generator=generator)
    start = bounder.root(rows)
    order = torch.rand(count, bounder.size, generator=generator).argsort(1)
    return dataclasses.replace(
        start,
        alpha=torch.rand(start.alpha.shape, generator=generator),
        neuron=order[:, :splits].int(),
        sign=(torch.randint(2, (count, splits), generator=generator) * 2 - 1).to(torch.int8),
        beta=torch.rand(count, splits, generator=generator),
    )


def dense(branches: Branches, size: int, left: float) -> Subproblems:
    """Return the same for the reduced network, where a LeakyReLU is its linear part and a ReLU."""
    blank = torch.zeros(len(branches), size)
    place = branches.neuron.long()
    return Subproblems(
        row=branches.row,
        sign=blank.to(torch.int8).scatter(1, place, branches.sign),
        alpha=(branches.alpha - left).clamp(min=0) / (1 - left),
        beta=blank.scatter(1, place, branches.beta),
        gamma=blank[:, :0],
        region=torch.zeros_like(branches.row),
    )


@pytest.mark.parametrize(("kind", "activation"), EVERY)
def test_bounds_are_those_of_the_reduced_network(kind: str, activation: str) -> None:
    relaxation = relaxation_of(kind, activation)
    matrix, offset = rows_of(relaxation)
    bounder = GraphBounder(relaxation, matrix, offset)
    network = reduce(relaxation, matrix, offset)
    assert bounder.size == network.size >= 4
    for splits in (0, 2, 4):
        branches = random_branches(bounder, 20, splits)
        left = 0.25 if activation == "leaky" else 0.0
        other = dense(branches, network.size, left)
        torch.testing.assert_close(bounder.strict(branches), strict_bounds(network, other))
        view, dense_view = (
            bounder.look(branches),
            Bounder(network.to(torch.float32)).look(other),
        )
        torch.testing.assert_close(view.bound, dense_view.bound, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "activation"), EVERY)
def test_strict_bounds_hold_at_points_of_the_split_region(kind: str, activation: str) -> None:
    relaxation = relaxation_of(kind, activation, radius=1.0)
    matrix, offset = rows_of(relaxation)
    bounder = GraphBounder(relaxation, matrix, offset)
    points = many_points(relaxation.box, 400)
    graph = relaxation.graph
    seen = pre_activations(graph, bounder, points)
    rows = graph(points) @ matrix.T + offset
    met = 0
    for splits in (0, 1, 3):
        branches = random_branches(bounder, 40, splits, seed=splits)
        _, better, _ = bounder.improve(branches, iterations=3)
        for tried in (branches, better):
            bound = bounder.strict(tried)
            for d in range(len(tried)):
                at = seen[:, tried.neuron[d].long()] * tried.sign[d]
                inside = (at >= 0).all(1)
                met += int(inside.sum())
                assert bool((rows[inside, tried.row[d]] >= bound[d]).all())
    assert met > 1000


def pre_activations(graph: Graph, bounder: GraphBounder, points: Tensor) -> Tensor:
    """Return what the unstable neurons see at points, [points, U]."""
    values = graph.propagate(RULES, points, keep=range(len(graph.nodes)))
    parts = [
        values[graph.nodes[i].inputs[0]].flatten(1)[:, layer.places]
        for i, layer in bounder.exact.layers.items()
    ]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_strict_bounds_hold_in_exact_arithmetic(kind: str) -> None:
    """Where the numbers cancel, plain float64 is off by more than the bounds' distance."""
    graph = small_network(kind, nn.ReLU(), seed=1).map_tensors(lambda t: t * 1e3)
    center = small_box(graph, 0.0, seed=1).lower
    box = Box(center - 1e-13, center + 1e-13)
    relaxation = relax(graph, box, effort=CROWN_IBP, rounding=EPS)
    outputs = graph.output_shape[0]
    matrix = torch.cat((torch.eye(outputs), -torch.eye(outputs))).double()
    bounder = GraphBounder(relaxation, matrix, matrix.new_zeros(len(matrix)))
    bound = fractions(bounder.strict(bounder.root(torch.arange(len(matrix)))))
    exact_matrix = fractions(matrix)
    for point in many_points(box, 4):
        value = exact_matrix @ exact_values(graph, point)[len(graph.nodes) - 1]
        assert (bound <= value).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_tree_of_splits_covers_the_exact_minimum(activation: str) -> None:
    torch.manual_seed(0)
    act = ACTIVATIONS[activation]
    for seed in range(4):
        graph = small_network("dense", act, seed=seed)
        box = small_box(graph, 0.4, seed=seed)
        relaxation = relax(graph, box, effort=CROWN_IBP, rounding=EPS)
        matrix, offset = (t[:1] for t in rows_of(relaxation))
        bounder = GraphBounder(relaxation, matrix, offset)
        leaves = bounder.root(torch.zeros(1, dtype=torch.long))
        for _ in range(min(3, bounder.size)):
            _, leaves, costs = bounder.improve(leaves, iterations=30, threshold=torch.inf)
            neuron = costs.argmax(1)
            leaves = join([leaves.split(neuron, 1), leaves.split(neuron, -1)])
        before = bounder.strict(bounder.root(torch.zeros(1, dtype=torch.long)))
        _, leaves, _ = bounder.improve(leaves, iterations=100, threshold=torch.inf)
        bound = bounder.strict(leaves).min()
        exact, _ = exact_minimum(graph, box, matrix[0], float(offset[0]))
        assert before[0] <= bound + 1e-9 and bound <= exact
        assert exact - bound < 0.7 * (exact - before[0]) + 1e-6


@pytest.mark.parametrize(("kind", "activation"), EVERY)
def test_improving_keeps_the_parameters_of_the_best_bound(kind: str, activation: str) -> None:
    relaxation = relaxation_of(kind, activation, radius=1.0)
    bounder = GraphBounder(relaxation, *rows_of(relaxation))
    branches = random_branches(bounder, 16, 2)
    start = bounder.look(branches).bound
    bound, better, costs = bounder.improve(branches, iterations=10, threshold=torch.inf)
    assert bool((bound >= start).all()) and bool((bound > start + 1e-3).any())
    torch.testing.assert_close(bounder.look(better).bound, bound)
    assert bool((better.beta >= 0).all())
    assert bool(((better.alpha >= 0) & (better.alpha <= 1)).all())
    split = costs.gather(1, branches.neuron.long())
    assert bool((split == -1).all()) and int((costs == -1).sum()) == split.numel()


def test_gradients_are_those_of_the_bound() -> None:
    relaxation = relaxation_of("residual", "relu", radius=1.0)
    bounder = GraphBounder(relaxation, *rows_of(relaxation))
    branches = random_branches(bounder, 6, 3)
    gradients = bounder.gradients(branches, bounder.look(branches))
    step = 1e-4
    for name, gradient in gradients.items():
        values = getattr(branches, name)
        for place in range(0, values.shape[1], 1 + values.shape[1] // 12):
            moved = []
            for side in (-step, step):
                other = values.double()
                other[:, place] += side
                moved.append(bounder.strict(dataclasses.replace(branches, **{name: other})))
            slope = (moved[1] - moved[0]) / (2 * step)
            # Where a neuron is split, its alpha is not used.
            free = (branches.neuron != place).all(1) | torch.tensor(name == "beta")
            found = gradient[:, place].double()
            torch.testing.assert_close(found[free], slope[free], rtol=1e-2, atol=1e-3)


def test_chunks_change_nothing() -> None:
    relaxation = relaxation_of("conv", "relu", radius=1.0)
    rows = rows_of(relaxation)
    whole, narrow = GraphBounder(relaxation, *rows), GraphBounder(relaxation, *rows, memory=1)
    assert whole.chunk > 7 and narrow.chunk == 1
    branches = random_branches(whole, 7, 2)
    for a, b in zip(
        whole.improve(branches, iterations=3, threshold=torch.inf),
        narrow.improve(branches, iterations=3, threshold=torch.inf),
        strict=True,
    ):
        if isinstance(a, Branches):
            assert isinstance(b, Branches)
            torch.testing.assert_close(a.alpha, b.alpha, rtol=1e-3, atol=1e-3)
        else:
            assert isinstance(b, Tensor)
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(whole.strict(branches), narrow.strict(branches))


def test_numbers_that_are_not_finite_prove_nothing() -> None:
    graph = small_network("dense", nn.ReLU()).map_tensors(lambda t: t * 1e160)
    relaxation = relax(graph, small_box(graph, 1.0), effort=CROWN_IBP, rounding=EPS)
    matrix, offset = rows_of(relaxation)
    bounder = GraphBounder(relaxation, matrix, offset)
    bound = bounder.strict(bounder.root(torch.arange(4)))
    assert not bool((torch.isfinite(bound) & (bound > 0)).any())


def test_neurons_are_bounded_again_where_it_matters() -> None:
    relaxation = relax(
        (graph := small_network("residual", nn.ReLU())),
        small_box(graph, 1.0),
        effort=CROWN_IBP,
        rounding=EPS,
    )
    bounder = GraphBounder(relaxation, *rows_of(relaxation))
    bound, _, costs = bounder.improve(
        bounder.root(torch.arange(4)), iterations=20, threshold=torch.inf
    )
    chosen = worth(bounder, costs, most=12, apart={})
    first, *behind = bounder.exact.layers
    assert len(chosen[first]) == 0 and sum(len(chosen[i]) for i in behind) == 12
    better = list(tighten(bounder, chosen, iterations=5))[-1]
    narrower = 0
    points = many_points(relaxation.box, 200)
    values = graph.propagate(RULES, points, keep=range(len(graph.nodes)))
    for i in behind:
        before = graph.nodes[i].inputs[0]
        old, new = relaxation.boxes[before], better.relaxation.boxes[before]
        assert bool((new.lower >= old.lower).all()) and bool((new.upper <= old.upper).all())
        moved = ((new.lower > old.lower) | (new.upper < old.upper)).flatten().nonzero()[:, 0]
        assert set(moved.tolist()) <= set(chosen[i].tolist())
        narrower += len(moved)
        assert bool(new.contains(values[before]).all())
    assert narrower >= 6
    again, _, _ = better.improve(better.root(torch.arange(4)), iterations=20, threshold=torch.inf)
    assert bool((again >= bound - 1e-4).all()) and float((again - bound).max()) > 1e-3
    done = worth(bounder, costs, most=12, apart=chosen)
    for i in behind:
        assert not set(done[i].tolist()) & set(chosen[i].tolist())


@pytest.mark.parametrize(("kind", "activation"), EVERY)
def test_rows_of_several_boxes_are_bounded_as_on_each_alone(kind: str, activation: str) -> None:
    graph = small_network(kind, ACTIVATIONS[activation])
    box = small_box(graph, 0.7, batch=3)
    whole = relax(graph, box, effort=CROWN, rounding=EPS)
    matrix, offset = rows_of(whole)
    owner = torch.tensor([2, 0, 1, 2])
    bounder = GraphBounder(whole, matrix, offset, owner=owner)
    branches = random_branches(bounder, 60, 1)
    bound, strict = bounder.look(branches).bound, bounder.strict(branches)
    best, better, costs = bounder.improve(branches, iterations=3)
    seen = 0
    for k in range(3):
        alone = relax(graph, box[k : k + 1], effort=CROWN, rounding=EPS)
        single = GraphBounder(alone, matrix, offset)
        # Neurons that are unstable on another box only are no neurons here.
        names = [(i, p) for i, layer in bounder.exact.layers.items() for p in layer.places.tolist()]
        own = [(i, p) for i, layer in single.exact.layers.items() for p in layer.places.tolist()]
        kept = torch.tensor([names.index(name) for name in own])
        place = torch.full((bounder.size,), -1).scatter(0, kept, torch.arange(len(kept)))
        mine = owner[branches.row] == k
        mine &= (place[branches.neuron.long()] >= 0).all(1)
        seen += int(mine.sum())

        def here(
            b: Branches,
            mine: Tensor = mine,
            kept: Tensor = kept,
            place: Tensor = place,
        ) -> Branches:
            some = b[mine]
            neuron = place[some.neuron.long()].int()
            return dataclasses.replace(some, alpha=some.alpha[:, kept], neuron=neuron)

        torch.testing.assert_close(single.strict(here(branches)), strict[mine])
        near = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(single.look(here(branches)).bound, bound[mine], **near)
        torch.testing.assert_close(single.look(here(better)).bound, best[mine], **near)
        # Where a box is stable, there is nothing to be split.
        others = torch.ones(bounder.size, dtype=torch.bool).index_fill(0, kept, False)
        assert bool((costs[mine][:, others] == -1).all())
    assert seen >= 12
