"""Bounds of subproblems improve along their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reduced_problems import BENT, NETWORKS, random_problems, reduced, simple_cuts, with_gamma
from torch import Tensor

from tightrope.domains.reduced.splits import Bounder, Subproblems

pytestmark = pytest.mark.usefixtures("one_thread")


# --- gradients and ascent -----------------------------------------------------------------------


def gradients(bounder: Bounder, problems: Subproblems) -> dict[str, Tensor]:
    """Return what `_step` hands to the ascent."""
    caught: dict[str, Tensor] = {}

    class Catch:
        parameters = ("alpha", "beta", "gamma")

        def step(self, found: dict[str, Tensor]) -> None:
            caught.update(found)

    bounder._step(problems, bounder.look(problems), Catch())  # type: ignore[arg-type]
    return caught


@NETWORKS
@BENT
def test_gradients_equal_finite_differences(kind: str, activation: str) -> None:
    """The bound is piecewise smooth; a few kinks may lie within a step."""
    _, network = reduced(kind, activation)
    cuts = simple_cuts(network)
    bounder = Bounder(network, cuts)
    problems = with_gamma(random_problems(network, 6, splits=0.3, seed=2), cuts)
    found = gradients(bounder, problems)
    step = 1e-6
    generator = torch.Generator().manual_seed(0)
    for name in ("alpha", "beta", "gamma"):
        values = getattr(problems, name)
        wrong = 0
        for k in torch.randperm(values.shape[1], generator=generator)[:15].tolist():
            sides = []
            for sign in (1.0, -1.0):
                moved = values.clone()
                moved[:, k] += sign * step
                sides.append(bounder.look(replace(problems, **{name: moved})).bound)
            slope = (sides[0] - sides[1]) / (2 * step)
            split = problems.sign[:, k] != 0 if name == "alpha" else torch.zeros(6).bool()
            close = torch.isclose(slope, found[name][:, k], rtol=1e-4, atol=1e-6)
            wrong += int((~close & ~split).sum())
        assert wrong <= 2, name


@NETWORKS
@BENT
def test_improved_bounds_come_with_their_parameters(kind: str, activation: str) -> None:
    _, network = reduced(kind, activation)
    for cuts in (None, simple_cuts(network)):
        bounder = Bounder(network, cuts)
        problems = random_problems(network, 8, splits=0.3, seed=3)
        if cuts is not None:
            problems = with_gamma(problems, cuts)
        before = {k: v.clone() for k, v in vars(problems).items()}
        start = bounder.look(problems).bound
        for threshold in (float("inf"), float(start.median()), -1e9):
            bound, better = bounder.improve(problems, iterations=8, threshold=threshold)
            assert (bound >= start).all()
            assert torch.allclose(bounder.look(better).bound, bound, rtol=1e-9, atol=1e-9)
            for name, values in vars(better).items():
                assert torch.equal(getattr(problems, name), before[name]), "inputs stay"
                if name in ("alpha", "beta", "gamma"):
                    assert (values >= 0).all()
            assert (better.alpha <= 1).all()
            assert torch.equal(better.sign, problems.sign)
        bound, _ = bounder.improve(problems, iterations=20, threshold=float("inf"))
        assert (bound > start).any(), "it does improve"


def test_improve_stops_where_bounds_exceed_the_threshold() -> None:
    _, network = reduced("dense", "relu")
    bounder = Bounder(network)
    root = bounder.root(torch.arange(3))
    bound, kept = bounder.improve(root, iterations=5, threshold=-1e9)
    assert torch.equal(bound, bounder.look(root).bound)
    assert torch.equal(kept.alpha, root.alpha)


def test_an_empty_batch() -> None:
    _, network = reduced("dense", "relu")
    bounder = Bounder(network)
    bound, kept = bounder.improve(bounder.root(torch.arange(0)), iterations=3)
    assert len(bound) == 0 and len(kept) == 0


def test_float32_is_close() -> None:
    _, network = reduced("residual", "relu")
    rough = Bounder(network.to(torch.float32))
    root = rough.root(torch.arange(3))
    assert root.alpha.dtype == torch.float32
    exact = Bounder(network)
    assert torch.allclose(
        rough.look(root).bound.double(), exact.look(exact.root(torch.arange(3))).bound, atol=1e-4
    )
