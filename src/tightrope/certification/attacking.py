"""`tightrope.attack`: how many samples an attack breaks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tightrope.attacks.autoattack import ATTACKS
from tightrope.budget import PROVING_ADVICE, explaining_memory
from tightrope.certification.names import SUITES
from tightrope.certification.problem import OpenProblem, robustness
from tightrope.certification.properties import PIXELS, Ball, norm_setting, parse_norm, radius_limit
from tightrope.certification.sources import check_own_radius
from tightrope.certification.stages import StageSettings, attack_stage, broken_by_suite
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.devices import forked_random
from tightrope.errors import UserError, unknown_name
from tightrope.files import write_json
from tightrope.precision import full_precision
from tightrope.radius import Radius, format_radius
from tightrope.runs import Run, open_run
from tightrope.runs.examination import Examination, batch_seed, check_attack, examine
from tightrope.runs.lock import Wait

BATCH = 250


@dataclass(frozen=True)
class AttackResult:
    """Accuracies under attack; `adversarial` counts samples that stayed correct.

    `after` has what was left of them after each attack of a suite.
    """

    samples: int
    natural: float
    adversarial: float
    seconds: float
    settings: dict[str, Any]
    after: dict[str, float] = field(default_factory=dict)


@explaining_memory(PROVING_ADVICE)
def attack(
    run: Run | str | Path,
    *,
    eps: Radius | None = None,
    norm: float | str = "linf",
    samples: int | None = None,
    start: int = 0,
    steps: int = 200,
    restarts: int = 5,
    suite: str = "pgd",
    seed: int = 0,
    device: str | None = None,
    wait: Wait = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AttackResult:
    """Attack test samples of a run and write `attack.json`.

    The radius `eps` is one of `norm`: linf, l2 or l1. `suite` is `pgd`, with `steps` and
    `restarts`, or `autoattack`, whose parameters are fixed, in linf: APGD on the cross-entropy,
    targeted APGD, FAB-T and Square, each on what the one before has left. A sample counts as broken
    only if the original network misclassifies a point of the exact ball. A run that another command
    is working on is an error unless `wait` queues for it. `progress(done, total)` is called after
    each batch.
    """
    run = open_run(run)
    check_attack(steps, restarts, seed)
    if suite not in SUITES:
        raise unknown_name("suite", suite, SUITES)
    number = parse_norm(norm)
    if suite != "pgd" and number != math.inf:
        raise UserError(f"the suite {suite} attacks linf balls only; other norms take suite pgd")
    check_own_radius(eps, number)
    run.check()
    with run.lock("attack", wait):
        largest = radius_limit(PIXELS, number)
        examination = examine(run, eps, samples, start, device, largest)
        how = _How(suite, StageSettings(steps, restarts), seed, number)
        result = _attack(run, examination, how, progress)
        run.tidy()
        write_json(run.attack, asdict(result))
    return result


@dataclass(frozen=True)
class _How:
    suite: str
    settings: StageSettings
    seed: int
    norm: float

    def to_json(self) -> dict[str, Any]:
        if self.suite != "pgd":
            return {"suite": self.suite, "seed": self.seed}
        return {
            "steps": self.settings.steps,
            "restarts": self.settings.restarts,
            "seed": self.seed,
            **norm_setting(self.norm),
        }


def _attack(
    run: Run, examination: Examination, how: _How, progress: Callable[[int, int], None]
) -> AttackResult:
    subject = Subject.of(examination.module, examination.input_shape)
    total, natural, adversarial = len(examination.indices), 0, 0
    after: dict[str, int] = {}
    started = time.perf_counter()
    with forked_random(examination.device), full_precision():
        for first in range(0, total, BATCH):
            indices, x, labels = examination.batch(first, first + BATCH)
            torch.manual_seed(batch_seed(how.seed, int(indices[0])))
            right = (subject.predict(x) == labels).nonzero()[:, 0]
            natural += len(right)
            ball = Ball(x[right], examination.eps, norm=how.norm)
            problems = [OpenProblem(p) for p in robustness(subject, ball, labels[right])]
            for name, left in _broken(subject, problems, how):
                after[name] = after.get(name, 0) + left
            adversarial = list(after.values())[-1]
            progress(min(first + BATCH, total), total)
    return AttackResult(
        total,
        natural / total,
        adversarial / total,
        time.perf_counter() - started,
        {
            "eps": format_radius(examination.eps),
            "start": int(examination.indices[0]),
            **how.to_json(),
            **run.fingerprints(),
        },
        {} if how.suite == "pgd" else {name: left / total for name, left in after.items()},
    )


def _broken(subject: Subject, problems: list[OpenProblem], how: _How) -> Iterator[tuple[str, int]]:
    """Yield the name of each attack and how many samples have withstood so far."""
    if how.suite == "pgd":
        answers = attack_stage(subject, problems, how.settings, Deadline()) if problems else []
        yield "pgd", sum(answer.counterexample is None for answer in answers)
    elif problems:
        yield from broken_by_suite(subject, problems, [None] * len(problems))
    else:
        yield from ((name, 0) for name in ATTACKS)
