"""Strict bounds of subproblems hold exactly, whatever the parameters are."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import exact_values, fractions
from linear_helpers import EPS, many_points
from reduced_problems import (
    BENT,
    MATRIX,
    NETWORKS,
    OFFSET,
    neuron_values,
    random_problems,
    reduced,
    sampled_signs,
    simple_cuts,
    with_gamma,
)
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import CROWN, relax
from tightrope.domains.reduced.reduction import Reduced, reduce
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder, Cuts, Subproblems
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


def problems_around(
    found: Relaxation, network: Reduced, points: Tensor, *, splits: float, seed: int = 0
) -> Subproblems:
    """Return one subproblem per point, with random parameters, that holds the point."""
    h = neuron_values(found, network, points)
    problems = random_problems(network, len(points), splits=0.0, seed=seed)
    return replace(problems, sign=sampled_signs(h, network, splits, seed))


def weakened(cuts: Cuts) -> Cuts:
    """Return cuts whose constants cover the rounding of how they were made."""
    return replace(cuts, constant=cuts.constant - 1e-9)


@NETWORKS
@BENT
@pytest.mark.parametrize("splits", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("cut", [False, True])
def test_bounds_hold_inside_the_splits(
    kind: str, activation: str, splits: float, cut: bool
) -> None:
    found, network = reduced(kind, activation, rounding=EPS)
    points = many_points(found.box, 200)
    values = found.graph(points) @ MATRIX.t() + OFFSET
    problems = problems_around(found, network, points, splits=splits)
    cuts = weakened(simple_cuts(network)) if cut else None
    if cuts is not None:
        problems = with_gamma(problems, cuts)
    strict = strict_bounds(network, problems, cuts=cuts)
    assert torch.isfinite(strict).all()
    assert (strict <= values.gather(1, problems.row[:, None])[:, 0] + 1e-12).all()
    # And they are what the search sees, but for the digits of float32.
    rough = Bounder(network.to(torch.float32), None if cuts is None else cuts.to(torch.float32))
    seen = rough.look(
        replace(
            problems,
            alpha=problems.alpha.float(),
            beta=problems.beta.float(),
            gamma=problems.gamma.float(),
        )
    ).bound.double()
    scale = 1 + seen.abs() + problems.beta.sum(1) + problems.gamma.sum(1)
    assert ((strict - seen).abs() <= 1e-4 * scale).all()


@NETWORKS
@BENT
def test_combined_rows(kind: str, activation: str) -> None:
    found, network = reduced(kind, activation, rounding=EPS)
    points = many_points(found.box, 100)
    values = found.graph(points) @ MATRIX.t() + OFFSET
    problems = problems_around(found, network, points, splits=0.3)
    weights = torch.rand(len(points), 3, dtype=torch.float64)
    strict = strict_bounds(network, problems, weights)
    assert (strict <= (values * weights).sum(1) + 1e-12).all()
    alone = torch.eye(3, dtype=torch.float64)[problems.row]
    one, other = strict_bounds(network, problems, alone), strict_bounds(network, problems)
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", ["relu", "leaky"])
def test_bounds_hold_in_exact_arithmetic(activation: str) -> None:
    """The points' exact rows, no tolerance; splits are taken at exact signs."""
    found, network = reduced("dense", activation, rounding=EPS)
    points = many_points(found.box, 20)
    problems = problems_around(found, network, points, splits=0.4)
    bounds = fractions(strict_bounds(network, problems))
    for i, point in enumerate(points):
        values = exact_values(found.graph, point)
        h = np.concatenate(
            [
                values[found.graph.nodes[k.position].inputs[0]].reshape(-1)[k.places.numpy()]
                for k in network.layers
            ]
        )
        sign = problems.sign[i].numpy()
        if np.all(sign.astype(object) * h >= 0):
            row = int(problems.row[i])
            exact = fractions(MATRIX[row]) @ values[found.output] + Fraction(OFFSET[row].item())
            assert bounds[i] <= exact


def cancelling_network(seed: int) -> tuple[Relaxation, Reduced, Tensor]:
    """Return a network whose rows lose all digits of float64 but a few."""
    generator = torch.Generator().manual_seed(seed)
    big = 2.0**50
    layers = [nn.Linear(3, 6).double(), nn.ReLU(), nn.Linear(6, 2).double()]
    first = torch.randint(-4, 5, (3, 3), generator=generator).double()
    small = torch.randint(-3, 4, (3, 3), generator=generator) / big
    layers[0].weight = nn.Parameter(torch.cat((first, first + small)))
    layers[0].bias = nn.Parameter(torch.rand(6, generator=generator, dtype=torch.float64) * 3)
    end = torch.randint(1, 5, (2, 3), generator=generator).double() * big
    tail = torch.randint(-3, 4, (2, 3), generator=generator)
    layers[2].weight = nn.Parameter(torch.cat((end, tail - end), 1))
    graph = trace(nn.Sequential(*layers), (3,)).detach()
    center = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    radius = torch.rand(1, 3, generator=generator, dtype=torch.float64)
    found = relax(graph, Box(center - radius, center + radius), effort=CROWN, rounding=EPS)
    matrix = torch.eye(2, dtype=torch.float64)
    return found, reduce(found, matrix, torch.zeros(2, dtype=torch.float64)), matrix


def test_cancellation() -> None:
    """Fully split at a point the network is linear, so that only rounding separates the two."""
    violated = 0
    for seed in range(30):
        found, network, _ = cancelling_network(seed)
        point = many_points(found.box, 3)[2:3]
        exact = exact_values(found.graph, point[0])
        h = neuron_values(found, network, point)
        problems = random_problems(network, 2, splits=0.0, seed=seed)
        sign = torch.where(h >= 0, 1, -1).to(torch.int8).expand(2, -1)
        problems = replace(
            problems, row=torch.arange(2), sign=sign, beta=torch.zeros_like(problems.beta)
        )
        flat = replace(network, box=Box(point, point))  # the box shrinks to the point
        strict = strict_bounds(flat, problems)
        assert np.all(fractions(strict) <= exact[found.output])
        plain = Bounder(replace(flat, rounding=0.0)).look(problems).bound
        violated += bool(np.any(fractions(plain) > exact[found.output]))
    assert violated > 0, "plain bounds are wrong for some of these"


# --- parameters that are wrong ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300, -5.0])
@pytest.mark.parametrize("name", ["alpha", "beta", "gamma"])
@pytest.mark.parametrize("splits", [0.0, 0.5])
def test_no_parameters_give_a_wrong_bound(name: str, bad: float, splits: float) -> None:
    found, network = reduced("dense", "relu", rounding=EPS)
    points = many_points(found.box, 40)
    values = found.graph(points) @ MATRIX.t() + OFFSET
    cuts = weakened(simple_cuts(network))
    problems = with_gamma(problems_around(found, network, points, splits=splits), cuts)
    own = values.gather(1, problems.row[:, None])[:, 0]
    for everywhere in (True, False):
        changed = getattr(problems, name).clone()
        if everywhere:
            changed[:] = bad
        else:
            changed[:, ::3] = bad
        strict = strict_bounds(network, replace(problems, **{name: changed}), cuts=cuts)
        assert (~torch.isfinite(strict) | (strict <= own + 1e-12)).all()
        if bad != bad and name != "alpha":  # split neurons have a slope of their own
            assert not torch.isfinite(strict).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_prove_nothing(bad: float) -> None:
    found, network = reduced("dense", "relu", rounding=EPS)
    problems = problems_around(found, network, many_points(found.box, 2), splits=0.2)
    weights = torch.full((len(problems), 3), bad, dtype=torch.float64)
    strict = strict_bounds(network, problems, weights)
    assert not (torch.isfinite(strict) & (strict > 0)).any()


def test_bounds_that_are_not_numbers_prove_nothing() -> None:
    _, network = reduced("dense", "relu", rounding=EPS)
    broken = replace(network, lower=torch.full_like(network.lower, torch.nan))
    problems = random_problems(network, 5, splits=0.0, seed=0)
    assert not torch.isfinite(strict_bounds(broken, problems)).any()


def test_chunks_and_empty_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightrope.domains.reduced import replay

    _, network = reduced("dense", "relu", rounding=EPS)
    problems = random_problems(network, 7, splits=0.3, seed=0)
    whole = strict_bounds(network, problems)
    monkeypatch.setattr(replay, "MEMORY", 1)
    assert torch.allclose(strict_bounds(network, problems), whole, atol=1e-12)
    assert strict_bounds(network, problems[:0]).shape == (0,)


def test_strict_bounds_do_not_change_their_arguments() -> None:
    _, network = reduced("dense", "relu", rounding=EPS)
    inner = network.rows.inner.clone()
    problems = random_problems(network, 6, splits=0.3, seed=0)
    first = strict_bounds(network, problems)
    assert torch.equal(network.rows.inner, inner)
    assert torch.equal(strict_bounds(network, problems), first)
