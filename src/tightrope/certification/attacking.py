"""`tightrope.attack`: how many samples an attack breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tightrope.budget import PROVING_ADVICE, explaining_memory
from tightrope.certification.problem import OpenProblem, robustness
from tightrope.certification.properties import PIXELS, Ball, norm_setting, parse_norm, radius_limit
from tightrope.certification.sources import check_own_radius
from tightrope.certification.stages import StageSettings, attack_stage
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.devices import forked_random
from tightrope.files import write_json
from tightrope.precision import full_precision
from tightrope.radius import Radius, format_radius
from tightrope.runs import Run, open_run
from tightrope.runs.examination import Examination, batch_seed, check_attack, examine
from tightrope.runs.lock import Wait

BATCH = 250


@dataclass(frozen=True)
class AttackResult:
    """Accuracies under attack; `adversarial` counts samples that stayed correct."""

    samples: int
    natural: float
    adversarial: float
    seconds: float
    settings: dict[str, Any]


def attack(
    run: Run | str | Path,
    *,
    eps: Radius | None = None,
    norm: float | str = "linf",
    samples: int | None = None,
    start: int = 0,
    steps: int = 200,
    restarts: int = 5,
    seed: int = 0,
    device: str | None = None,
    wait: Wait = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AttackResult:
    """Attack test samples of a run by PGD and write `attack.json`.

    The radius `eps` is one of `norm`: linf, l2 or l1. A sample counts as broken only if the
    original network misclassifies a point of the exact ball. A run that another command is working
    on is an error unless `wait` queues for it. `progress(done, total)` is called after each batch.
    """
    run = open_run(run)
    check_attack(steps, restarts, seed)
    number = parse_norm(norm)
    check_own_radius(eps, number)
    run.check()
    with run.lock("attack", wait):
        largest = radius_limit(PIXELS, number)
        examination = examine(run, eps, samples, start, device, largest)
        stage = StageSettings(steps, restarts)
        with explaining_memory(PROVING_ADVICE):
            result = _attack(run, examination, number, stage, seed, progress)
        write_json(run.attack, asdict(result))
    return result


def _attack(
    run: Run,
    examination: Examination,
    norm: float,
    settings: StageSettings,
    seed: int,
    progress: Callable[[int, int], None],
) -> AttackResult:
    subject = Subject.of(examination.module, examination.input_shape)
    total, natural, adversarial = len(examination.indices), 0, 0
    started = time.perf_counter()
    with forked_random(examination.device), full_precision():
        for first in range(0, total, BATCH):
            indices, x, labels = examination.batch(first, first + BATCH)
            torch.manual_seed(batch_seed(seed, int(indices[0])))
            right = (subject.predict(x) == labels).nonzero()[:, 0]
            natural += len(right)
            if len(right):
                ball = Ball(x[right], examination.eps, norm=norm)
                problems = [OpenProblem(p) for p in robustness(subject, ball, labels[right])]
                answers = attack_stage(subject, problems, settings, Deadline())
                adversarial += sum(a.counterexample is None for a in answers)
            progress(min(first + BATCH, total), total)
    return AttackResult(
        total,
        natural / total,
        adversarial / total,
        time.perf_counter() - started,
        {
            "eps": format_radius(examination.eps),
            "start": int(examination.indices[0]),
            "steps": settings.steps,
            "restarts": settings.restarts,
            "seed": seed,
            **norm_setting(norm),
            **run.fingerprints(),
        },
    )
