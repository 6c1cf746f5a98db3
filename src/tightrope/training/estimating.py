"""`tightrope.estimate`: robust accuracy as the training approximations see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightrope.attacks import Margin, Steps, misclassified, pgd, worst_margin
from tightrope.attacks.ensemble import MILESTONES
from tightrope.box import Box
from tightrope.budget import PROVING_ADVICE, explaining_memory
from tightrope.devices import forked_random
from tightrope.domains import interval
from tightrope.files import write_json
from tightrope.graph import Graph, trace
from tightrope.precision import full_precision
from tightrope.radius import Radius, format_radius
from tightrope.runs import Run, open_run
from tightrope.runs.examination import Examination, batch_seed, check_attack, examine
from tightrope.runs.lock import Wait
from tightrope.training.batchnorm import FixedModel, evaluation_model
from tightrope.training.objectives import IBP, METHODS, PGD, SABR, TAPS, Objective
from tightrope.training.objectives.propagation import evaluation_batch
from tightrope.training.objectives.taps import LatentAttack
from tightrope.training.settings import stored_settings

BATCH = 250


@dataclass(frozen=True)
class Estimate:
    """Robust accuracies by approximation. None of them is a proof, in either direction.

    `pgd` is an upper bound of the exact robust accuracy; `ibp` is a lower bound up to rounding
    (`tightrope certify` is the one that proves); `sabr` and `taps` lie anywhere.
    """

    samples: int
    natural: float
    pgd: float
    sabr: float
    taps: float
    ibp: float
    seconds: float
    settings: dict[str, Any]


@explaining_memory(PROVING_ADVICE)
def estimate(
    run: Run | str | Path,
    *,
    eps: Radius | None = None,
    samples: int | None = None,
    start: int = 0,
    classifier_relus: int | None = None,
    steps: int = 20,
    restarts: int = 1,
    ratio: float = 0.4,
    seed: int = 0,
    device: str | None = None,
    wait: Wait = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Estimate:
    """Estimate the robust accuracy of a run's network and write `estimate.json`.

    TAPS accuracy is the share of samples whose latent attack (`steps`, `restarts`) finds no
    wrong class, for the split with `classifier_relus` ReLUs in the classifier (by default the
    one the run was trained with, else the smallest that has any). `ratio` is the size of SABR's
    box. PGD takes 50 steps on the margin from each of 3 starts, as in the paper's comparison. A run
    that another command is working on is an error unless `wait` queues for it.
    """
    run = open_run(run)
    check_attack(steps, restarts, seed)
    run.check()
    with run.lock("estimate", wait):
        examination = examine(run, eps, samples, start, device)
        graph = trace(examination.module, examination.input_shape)
        relus = trained_split(run, graph) if classifier_relus is None else classifier_relus
        objectives = estimators(relus, steps=steps, restarts=restarts, ratio=ratio)
        began = time.perf_counter()
        counts = _count_robust(examination, graph, relus, objectives, seed, progress)
        total = len(examination.indices)
        result = Estimate(
            samples=total,
            **{name: count / total for name, count in counts.items()},
            seconds=time.perf_counter() - began,
            settings={
                "eps": format_radius(examination.eps),
                "start": start,
                "classifier_relus": relus,
                "steps": steps,
                "restarts": restarts,
                "ratio": ratio,
                "seed": seed,
                **run.fingerprints(),
            },
        )
        run.tidy()
        write_json(run.estimate, asdict(result))
    return result


def _count_robust(
    examination: Examination,
    graph: Graph,
    relus: int,
    objectives: dict[str, Objective],
    seed: int,
    progress: Callable[[int, int], None],
) -> dict[str, int]:
    """Return how many samples each approximation considers robust."""
    counts = dict.fromkeys(("natural", *objectives), 0)
    for model, x, y, first in evaluated(examination, graph, relus, progress):
        counts["natural"] += int((~misclassified(model.logits, y)).sum())
        for name, objective in objectives.items():
            torch.manual_seed(batch_seed(seed, first))
            margins = estimated_margin(objective, model, x, y, float(examination.eps))
            counts[name] += int((margins > 0).sum())
    return counts


def evaluated(
    examination: Examination, graph: Graph, relus: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[FixedModel, Tensor, Tensor, int]]:
    """Yield batches that suit a split: the network, inputs, labels, the first sample's number."""
    size = min(BATCH, evaluation_batch(graph.split(relus)[1]))
    total = len(examination.indices)
    with forked_random(examination.device), torch.no_grad(), full_precision():
        for first in range(0, total, size):
            indices, x, y = examination.batch(first, first + size)
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            yield evaluation_model(graph, x), x, y, int(indices[0])
            progress(min(first + size, total), total)


def estimators(
    classifier_relus: int, *, steps: int = 20, restarts: int = 1, ratio: float = 0.4
) -> dict[str, Objective]:
    """Return the approximations by name, with the settings of the paper's comparison."""
    return {
        "pgd": PGD(steps=50, restarts=3),
        "sabr": SABR(ratio=ratio, steps=10, step_size=0.2, step_decay=1.0),
        "taps": TAPS(classifier_relus, steps=steps, restarts=restarts, loss="taps"),
        "ibp": IBP(),
    }


def estimated_margin(
    objective: Objective, model: FixedModel, x: Tensor, y: Tensor, radius: float
) -> Tensor:
    """Return the worst margin over the ball, per sample, as an approximation estimates it.

    Below the exact one for IBP, above it for PGD, anywhere for SABR, TAPS and STAPS.
    """
    box = Box.ball(x, radius)
    if isinstance(objective, PGD):
        # On the margin itself: the point of the largest cross-entropy need not have the worst one.
        steps = Steps(objective.steps, objective.step_size or 0.25, milestones=MILESTONES)
        points = pgd(model.frozen, box, Margin(y), steps=steps, restarts=objective.restarts)
        return worst_margin(model.graph(points), y)
    if isinstance(objective, LatentAttack | SABR):
        box = objective.region(model, x, y, radius)
    if isinstance(objective, LatentAttack) and objective.classifier_relus:
        extractor, classifier = model.graph.split(objective.classifier_relus)
        latent, _ = interval.bounds(extractor, box)
        margins = objective.margins(classifier, latent, y)
    else:
        assert isinstance(objective, IBP | SABR | LatentAttack)
        margins, _ = interval.margins(model.graph, box, y)
    return worst_margin(-margins, y)


def trained_split(run: Run, graph: Graph) -> int:
    """Return how many ReLUs the classifier of a run's training had, else the fewest it can have.

    A classifier without any is not attacked: interval bounds have a name of their own.
    """
    smallest = min((relus for relus in graph.cuts() if relus), default=0)
    if run.settings().method not in METHODS:
        return smallest  # the options of a method of one's own mean what it likes
    return int(stored_settings(run).options.get("classifier_relus", 0)) or smallest
