"""Votes of a network on noisy copies of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tightrope.certification.smoothing.radius import certified_radius

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Noise:
    """How a network is smoothed, and how sure one wants to be.

    `selection` draws say which class to ask about, `draws` others how often it wins, `alpha` is the
    probability that a radius is too large.
    """

    sigma: float = 0.25
    draws: int = 1000
    selection: int = 100
    alpha: float = 0.001
    batch: int = 1000


@dataclass(frozen=True)
class Smoothed:
    """What votes say of one input; not a `Verdict`.

    `prediction` is the class that the smoothed classifier has within `radius` (l2) of the input,
    but for a probability of alpha; None: it abstains.
    """

    prediction: int | None
    radius: float
    votes: int


@torch.no_grad()
def count_votes(network: Callable[[Tensor], Tensor], x: Tensor, count: int, noise: Noise) -> Counts:
    """Return how often each class wins among noisy copies of one input (no batch dimension).

    Noise is drawn in the input's own units, before whatever the network does to it, and copies are
    not clipped to the range of inputs.
    """
    totals: Tensor | None = None
    for start in range(0, count, noise.batch):
        size = min(noise.batch, count - start)
        copies = x + noise.sigma * torch.randn(size, *x.shape, dtype=x.dtype, device=x.device)
        outputs = network(copies)
        found = torch.bincount(outputs.argmax(1), minlength=outputs.shape[1])
        totals = found if totals is None else totals + found
    assert totals is not None
    return totals.cpu().numpy()


def certify_votes(network: Callable[[Tensor], Tensor], x: Tensor, noise: Noise) -> Smoothed:
    """Choose a class and bound how often it wins, by draws of its own (Cohen et al.'s CERTIFY)."""
    guess = int(count_votes(network, x, noise.selection, noise).argmax())
    votes = int(count_votes(network, x, noise.draws, noise)[guess])
    radius = certified_radius(votes, noise.draws, noise.sigma, noise.alpha)
    if radius is None:
        return Smoothed(None, 0.0, votes)
    return Smoothed(guess, radius, votes)
