"""Randomised smoothing: limits by hand, half-spaces whose radii are known, the command."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tightrope as tr
from tightrope.certification.smoothing.radius import (
    certified_radius,
    largest_radius,
    lowest_share,
)
from tightrope.certification.smoothing.voting import Noise, certify_votes, count_votes
from tightrope.cli.smooth import _below
from tightrope.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
PHI = NormalDist().cdf


def tail(votes: int, draws: int, share: float) -> Fraction:
    """Return the probability of so many votes or more, exactly."""
    p = Fraction(share)
    return sum(
        (math.comb(draws, k) * p**k * (1 - p) ** (draws - k) for k in range(votes, draws + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize("draws", [1, 2, 10, 60])
@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.4])
def test_limits_are_those_of_clopper_and_pearson(draws: int, alpha: float) -> None:
    for votes in range(draws + 1):
        limit = lowest_share(votes, draws, alpha)
        assert tail(votes, draws, limit) <= Fraction(alpha) if votes else limit == 0
        if votes:  # and hardly any smaller than it has to be
            assert tail(votes, draws, min(1.0, limit * (1 + 1e-6))) > Fraction(alpha)


def test_all_votes_say_what_they_can() -> None:
    # With n of n votes the limit is alpha^(1/n).
    for draws, factor in ((1000, 2.46), (100_000, 3.81)):
        assert lowest_share(draws, draws, 0.001) == pytest.approx(0.001 ** (1 / draws), abs=1e-8)
        assert largest_radius(draws, 0.5, 0.001) / 0.5 == pytest.approx(factor, abs=0.005)


def test_too_few_votes_abstain() -> None:
    assert certified_radius(520, 1000, 0.25, 0.001) is None
    assert certified_radius(0, 1000, 0.25, 0.001) is None
    radius = certified_radius(990, 1000, 0.25, 0.001)
    assert radius is not None and 0 < radius < 0.25 * NormalDist().inv_cdf(0.99)


def half_space(normal: Tensor, offset: float) -> Any:
    """Return a classifier that says 1 on one side of a plane."""

    def network(x: Tensor) -> Tensor:
        side = x.flatten(1) @ normal + offset
        return torch.stack((torch.zeros_like(side), side), 1)

    return network


def test_half_spaces_have_no_larger_radius_than_they_should() -> None:
    """The true radius is the distance to the plane; it is exceeded with probability alpha."""
    generator = np.random.default_rng(0)
    alpha, sigma, draws, trials = 0.05, 0.5, 200, 10_000
    distance = generator.uniform(0, 1, trials)
    votes = generator.binomial(draws, [PHI(d / sigma) for d in distance])
    table = {k: certified_radius(k, draws, sigma, alpha) for k in range(draws + 1)}
    beyond = sum((table[int(k)] or 0.0) > d for k, d in zip(votes, distance, strict=True))
    # Four deviations above alpha would happen once in 30,000 runs, and the seed is fixed.
    assert 0 < beyond <= trials * alpha + 4 * math.sqrt(trials * alpha * (1 - alpha))


def test_votes_of_a_half_space() -> None:
    torch.manual_seed(0)
    normal = torch.tensor([3.0, 4.0]) / 5
    noise = Noise(sigma=0.5, draws=4000, selection=50, alpha=0.001, batch=700)
    x = normal * 0.6  # at distance 0.6 from the plane
    network = half_space(normal, 0.0)
    counts = count_votes(network, x, 4000, noise)
    assert counts.sum() == 4000
    assert counts[1] / 4000 == pytest.approx(PHI(0.6 / 0.5), abs=0.02)
    said = certify_votes(network, x, noise)
    assert said.prediction == 1 and 0.5 < said.radius < 0.6
    assert certify_votes(network, torch.zeros(2), noise).prediction is None


def test_the_draws_that_choose_a_class_do_not_vote_for_it() -> None:
    """A network that says 1 while it is chosen, and 0 ever after."""
    noise = Noise(sigma=0.5, draws=40, selection=7, batch=5)
    seen: list[Tensor] = []

    def network(x: Tensor) -> Tensor:
        seen.append(x)
        first = sum(len(t) for t in seen) <= 7
        return torch.tensor([[0.0, 1.0] if first else [1.0, 0.0]]).expand(len(x), 2)

    said = certify_votes(network, torch.zeros(3), noise)
    assert (said.prediction, said.votes) == (None, 0)
    drawn = torch.cat(seen)
    assert len(drawn) == 47 and len(drawn.unique(dim=0)) == 47


def test_a_constant_classifier_has_the_largest_radius() -> None:
    noise = Noise(sigma=0.25, draws=100, selection=10)
    said = certify_votes(
        lambda x: torch.tensor([[0.0, 1.0]]).expand(len(x), 2), torch.ones(3), noise
    )
    assert said.radius == largest_radius(100, 0.25, 0.001)
    exact = 0.25 * NormalDist().inv_cdf(0.001 ** (1 / 100))
    assert exact * (1 - 1e-8) <= said.radius <= exact


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained under noise for a moment."""
    folder = tmp_path_factory.mktemp("noise") / "run"
    options: dict[str, Any] = {"net": "mlp", "width": 16, "epochs": 5, "train_samples": 600}
    options |= {"batch_size": 50, "learning_rate": 0.01}
    tr.train(data="mnist", method=tr.Noise(sigma=0.25), eps=0.1, out=folder, **options)
    return folder


def test_a_run_is_smoothed(run: Path) -> None:
    result = tr.smooth(run, sigma=0.25, draws=200, selection=20, samples=30, radii=(0.1, 0.3))
    stored = json.loads((run / "smoothing.json").read_text())
    assert stored["certified"] == result.certified and list(result.certified) == ["0.1", "0.3"]
    assert result.accuracy >= result.certified["0.1"] >= result.certified["0.3"]
    assert result.accuracy > 0.3  # ten classes
    assert result.accuracy + result.abstained <= 1
    assert stored["settings"]["norm"] == "l2"
    assert not (run / "certification.json").exists()  # nothing of it stands beside proofs
    part = tr.smooth(
        run, sigma=0.25, draws=200, selection=20, samples=10, start=10, radii=(0.12345678, 1)
    )
    assert list(part.certified) == ["0.12345678", "1"]  # in six digits it would be larger
    assert part.records == result.records[10:20]  # each sample has noise of its own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0.0}, "sigma must be positive"),
        ({"sigma": math.nan}, "sigma must be positive"),
        ({"alpha": 0.5}, "alpha must lie between"),
        ({"draws": 0}, "draws must lie in"),
        ({"selection": 10**9}, "selection must lie in"),
        ({"radii": (-1.0,)}, "radii must not be negative"),
        ({"seed": -1}, "seed must lie in"),
        ({"samples": 0}, "samples must lie in"),
    ],
)
def test_bad_settings_are_refused(run: Path, options: dict[str, Any], message: str) -> None:
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=message):
        tr.smooth(run, **options)
    assert sorted(path.name for path in run.iterdir()) == before


def test_what_all_votes_can_say_is_printed_rounded_down() -> None:
    assert [_below(r) for r in (0.61499, 0.6150001, 0.0009, 2.0)] == ["0.614", "0.615", "0", "2"]
