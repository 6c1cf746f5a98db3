"""`tightrope.smooth`: probabilistic l2 certificates of a run's network under Gaussian noise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tightrope.budget import PROVING_ADVICE, explaining_memory
from tightrope.certification.smoothing.radius import largest_radius
from tightrope.certification.smoothing.voting import Noise, Smoothed, certify_votes
from tightrope.devices import forked_random
from tightrope.errors import UserError, shorten
from tightrope.files import write_json
from tightrope.precision import full_precision
from tightrope.runs import Run, open_run
from tightrope.runs.examination import Examination, batch_seed, check_seed, examine
from tightrope.runs.lock import Wait

RADII = (0.25, 0.5, 0.75, 1.0)
MOST_DRAWS = 10_000_000


@dataclass(frozen=True)
class Smoothing:
    """Accuracies of the smoothed classifier; `certified` at l2 radii, by their text.

    Every radius is too large with probability at most `settings["alpha"]`. None of it is a proof
    about the network itself.
    """

    samples: int
    accuracy: float
    abstained: float
    average_radius: float
    certified: dict[str, float]
    seconds: float
    settings: dict[str, Any]
    records: tuple[dict[str, Any], ...]


@explaining_memory(PROVING_ADVICE)
def smooth(
    run: Run | str | Path,
    *,
    sigma: float = 0.25,
    draws: int = 1000,
    selection: int = 100,
    alpha: float = 0.001,
    radii: Sequence[float] = RADII,
    samples: int | None = None,
    start: int = 0,
    seed: int = 0,
    device: str | None = None,
    wait: Wait = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Smoothing:
    """Certify the smoothed classifier of a run's network and write `smoothing.json`.

    Noise of deviation `sigma` is added to inputs in [0, 1]. `selection` draws choose a class for
    each sample, `draws` others bound how often it wins. `radii` are those whose certified accuracy
    is reported. A run that another command is working on is an error unless `wait` queues for it.
    """
    run = open_run(run)
    noise = Noise(sigma, draws, selection, alpha)
    _check(noise, radii, seed)
    run.check()
    with run.lock("smooth", wait):
        examination = examine(run, None, samples, start, device)
        began = time.perf_counter()
        answers = _answers(examination, noise, seed, progress)
        settings = {
            "norm": "l2",
            "sigma": sigma,
            "draws": draws,
            "selection": selection,
            "alpha": alpha,
            "start": start,
            "seed": seed,
            **run.fingerprints(),
        }
        result = _summary(answers, noise, radii, time.perf_counter() - began, settings)
        run.tidy()
        write_json(run.smoothing, asdict(result))
    return result


def _check(noise: Noise, radii: Sequence[float], seed: int) -> None:
    """Refuse settings that make no sense."""
    check_seed(seed)
    if not (math.isfinite(noise.sigma) and noise.sigma > 0):
        raise UserError(f"sigma must be positive, got {shorten(noise.sigma)}")
    if not 0 < noise.alpha < 0.5:
        raise UserError(f"alpha must lie between 0 and 0.5, got {shorten(noise.alpha)}")
    for name, count in (("draws", noise.draws), ("selection", noise.selection)):
        if not 1 <= count <= MOST_DRAWS:
            raise UserError(f"{name} must lie in [1, {MOST_DRAWS}], got {shorten(count)}")
    wrong = [radius for radius in radii if not (math.isfinite(radius) and radius >= 0)]
    if wrong:
        raise UserError(f"radii must not be negative, got {shorten(wrong[0])}")


def _answers(
    examination: Examination, noise: Noise, seed: int, progress: Callable[[int, int], None]
) -> list[tuple[int, int, Smoothed]]:
    """Return index, label and what votes say, for each sample."""
    network = examination.module.eval()
    found, total = [], len(examination.indices)
    with forked_random(examination.device), full_precision():
        for place in range(total):
            indices, x, labels = examination.batch(place, place + 1)
            index = int(indices[0])
            torch.manual_seed(batch_seed(seed, index))  # whichever samples are asked for
            found.append((index, int(labels[0]), certify_votes(network, x[0], noise)))
            progress(place + 1, total)
    return found


def _summary(
    answers: list[tuple[int, int, Smoothed]],
    noise: Noise,
    radii: Sequence[float],
    seconds: float,
    settings: dict[str, Any],
) -> Smoothing:
    total = len(answers)
    right = [said.radius for _, label, said in answers if said.prediction == label]
    settings = {**settings, "largest": largest_radius(noise.draws, noise.sigma, noise.alpha)}
    return Smoothing(
        samples=total,
        accuracy=len(right) / total,
        abstained=sum(said.prediction is None for _, _, said in answers) / total,
        average_radius=sum(right) / total,
        certified={_named(r): sum(have >= r for have in right) / total for r in radii},
        seconds=seconds,
        settings=settings,
        records=tuple(
            {"index": index, "label": label, **asdict(said)} for index, label, said in answers
        ),
    )


def _named(radius: float) -> str:
    """Return a radius as text, in as many digits as it has: with fewer it could be larger."""
    short = f"{radius:g}"
    return short if float(short) == radius else repr(float(radius))
