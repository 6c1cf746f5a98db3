"""Ordinary networks of images: bounds are sound and finite, and a small ball is verified."""

from __future__ import annotations

import pytest
import torch
from layer_modules import MODULES, made

import tightrope as tr
from tightrope.answer import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 1e-4


@pytest.mark.parametrize("method", ["ibp", "crown-ibp"])
@pytest.mark.parametrize("name", MODULES)
def test_bounds_are_sound_and_finite(name: str, method: str) -> None:
    module = made(name)
    x = torch.rand(2, 3, 32, 32)
    found = tr.bounds(module, x, eps=EPS, method=method)
    assert bool(torch.isfinite(found.lower).all()) and bool(torch.isfinite(found.upper).all())
    exact = made(name).double()
    noise = torch.rand(40, 2, 3, 32, 32, dtype=torch.float64) * 2 - 1
    noise = torch.where(torch.rand_like(noise) < 0.5, noise.sign(), noise)
    points = (x.double() + EPS * noise).clamp(0, 1)
    with torch.no_grad():
        outputs = exact(points.flatten(0, 1)).unflatten(0, (40, 2))
    slack = 1e-12 * (1 + outputs.abs())  # of the sampled outputs
    assert bool((outputs >= found.lower - slack).all() & (outputs <= found.upper + slack).all())


@pytest.mark.parametrize("name", MODULES)
def test_small_balls_are_verified(name: str) -> None:
    module = made(name)
    x = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        label = int(module(x[None]).argmax())
    assert tr.verify(module, x, label, eps=EPS, timeout=600).verdict == Verdict.VERIFIED
    other = (label + 1) % 10
    assert tr.verify(module, x, other, eps=EPS, timeout=600).verdict == Verdict.FALSIFIED
