"""Bounds of neurons in regions hold for every counterexample in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
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
)

from tightrope.box import Box
from tightrope.domains.reduced.regions import KEPT, Regions, Tightener, decided
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = [torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])]


@NETWORKS
@BENT
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("splits", [0.0, 0.3])
def test_neurons_of_counterexamples_are_within_their_bounds(
    kind: str, activation: str, group: torch.Tensor, splits: float
) -> None:
    found, network = reduced(kind, activation, radius=0.8, rounding=EPS)
    points = many_points(found.box, 400)
    rows = found.graph(points) @ MATRIX.t() + OFFSET
    shift = rows.quantile(0.8, 0)  # so that many points are counterexamples
    rows = rows - shift
    constant = network.rows.constant - shift
    slack = network.rows.slack + 1e-12
    network = replace(network, rows=replace(network.rows, constant=constant, slack=slack))
    h = neuron_values(found, network, points)
    problems = random_problems(network, len(points), splits=0.0, seed=1)
    problems = replace(problems, sign=sampled_signs(h, network, splits, 1))
    mine = group[None, :] == group[problems.row][:, None]
    unsafe = torch.where(mine, rows, -torch.inf).amax(1) <= 0
    assert unsafe.any()
    problems, h, rows = problems[unsafe][:24], h[unsafe][:24], rows[unsafe][:24]
    whole = Box(network.lower, network.upper).map(lambda t: t.expand(len(problems), -1))
    box = Tightener(network, group)(problems, whole)
    assert ((box.lower <= h + 1e-12) & (h <= box.upper + 1e-12)).all()
    assert ((box.lower >= whole.lower) & (box.upper <= whole.upper)).all()
    tightened = (box.upper - box.lower) < (whole.upper - whole.lower).clamp(min=1e-9)
    assert tightened.any(), "nothing was learnt"

    # What is bounded on these bounds holds for the points, too.
    bounder = Bounder(network.to(torch.float32))
    regions = Regions.of(network)
    entered = regions.enter(problems, box, bounder)
    assert (entered.sign == decided(problems.sign, box)).all()
    assert entered.region.tolist() == list(range(1, len(problems) + 1))
    assert bounder.chords.shape == bounder.peaks.shape == (len(problems) + 1, network.size)
    strict = strict_bounds(network, entered, regions=regions.box)
    assert (strict <= rows.gather(1, entered.row[:, None])[:, 0] + 1e-12).all()


@NETWORKS
def test_subproblems_without_counterexamples_are_found_empty(kind: str) -> None:
    """A row that is positive everywhere leaves no room for counterexamples."""
    _, network = reduced(kind, "relu", rounding=EPS)
    lifted = replace(network, rows=replace(network.rows, constant=network.rows.constant + 1e4))
    problems = random_problems(lifted, 1, splits=0.0, seed=0)
    whole = Box(lifted.lower[None], lifted.upper[None])
    box = Tightener(lifted, torch.arange(3))(problems, whole)
    assert (box.lower > box.upper).any()


def test_rows_may_reach_what_is_kept() -> None:
    """Bounds hold for rows up to KEPT: what is closed has that margin."""
    _, network = reduced("dense", "relu", radius=0.8, rounding=EPS)
    tightener = Tightener(network, torch.arange(3))
    kept = network.rows.constant - tightener.exact.rows.constant[-3:]
    assert torch.allclose(kept, torch.full_like(kept, KEPT), rtol=1e-3, atol=0.0)
