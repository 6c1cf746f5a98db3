"""The stages of the cascade: each looks at some samples and decides what it can.

A stage returns what it proved or refuted and leaves the rest to the next one. Proofs come
from strict float64 bounds only; refutations are points that the original network
misclassifies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.attacks import strong_attack, worst_margin
from tightrope.box import Box
from tightrope.certification import complete
from tightrope.certification.properties import Samples, Unsafe
from tightrope.certification.subjects import Subject
from tightrope.domains import interval
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import ALPHA, CROWN_IBP, best_bounds, relax
from tightrope.precision import ROUNDING

# Neurons whose bounds are held at a time.
NEURONS = 1 << 22


@dataclass(frozen=True)
class StageSettings:
    """How hard the stages try; `timeout` in seconds, for each complete stage and sample."""

    steps: int = 200
    restarts: int = 5
    timeout: float = 60.0


@dataclass(frozen=True)
class Findings:
    """What a stage says of each sample of a batch.

    `margin` is a lower bound on the worst `o_y - o_i` where `verified`, the margin at `points`
    where `falsified`, and the best bound known (or NaN) elsewhere. `bounds` are for later stages;
    `reasons` say why a sample stayed open, `domains` how many subproblems were looked at.
    """

    verified: Tensor
    falsified: Tensor
    margin: Tensor
    points: Tensor | None = None
    bounds: tuple[Mapping[int, Box] | None, ...] = ()
    reasons: tuple[str | None, ...] = ()
    domains: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Stage:
    """A stage; `single` ones take so long that each sample's outcome is written at once."""

    examine: Callable[[Subject, Samples, StageSettings], Findings]
    single: bool = False


def ibp_stage(subject: Subject, samples: Samples, settings: StageSettings) -> Findings:
    """Prove by interval bounds, with every rounding error accounted for."""
    labels = samples.labels
    with torch.no_grad():
        margins, _ = interval.margins(
            subject.exact, samples.ball.outer(), labels, rounding=ROUNDING
        )
    others = margins.scatter(1, labels[:, None], torch.inf)
    worst = others.amin(1)
    verified = torch.isfinite(margins).all(1) & (worst > 0)
    return Findings(verified, torch.zeros_like(verified), worst)


def attack_stage(subject: Subject, samples: Samples, settings: StageSettings) -> Findings:
    """Refute by points that lie in the exact ball and fool the original network."""
    box, labels = samples.ball.inner(), samples.labels
    points = strong_attack(
        subject.attacked, box, labels, steps=settings.steps, restarts=settings.restarts
    )
    candidates = (subject.predict(points) != labels) & box.contains(points)
    falsified = subject.fooled(points, labels, candidates)
    logits = subject.outputs(points)
    margin = torch.where(falsified, -worst_margin(logits, labels).double(), torch.nan)
    return Findings(torch.zeros_like(falsified), falsified, margin, points)


def crown_ibp_stage(subject: Subject, samples: Samples, settings: StageSettings) -> Findings:
    """Prove by one backward pass over interval bounds."""
    worst = [
        _worst(relax(subject.exact, part.ball.outer(), effort=CROWN_IBP, rounding=ROUNDING), part)
        for part in _parts(subject, samples)
    ]
    return _proofs(torch.cat(worst))


def alpha_stage(subject: Subject, samples: Samples, settings: StageSettings) -> Findings:
    """Prove by linear bounds of all layers with optimised slopes."""
    worst, bounds = [], []
    for i in range(len(samples)):
        alone = samples.select(torch.tensor([i], device=samples.labels.device))
        relaxation = relax(subject.exact, alone.ball.outer(), effort=ALPHA, rounding=ROUNDING)
        unsafe = complete.robustness(subject, alone).unsafe
        margin = best_bounds(relaxation, unsafe.matrix).amin()
        worst.append(margin)
        bounds.append(None if margin > 0 else relaxation.known(0))
    return replace(_proofs(torch.stack(worst)), bounds=tuple(bounds))


def _parts(subject: Subject, samples: Samples) -> list[Samples]:
    """Split samples so that the bounds of all their neurons fit into memory."""
    size = sum(torch.Size(node.shape).numel() for node in subject.exact.nodes)
    order = torch.arange(len(samples), device=samples.labels.device)
    return [samples.select(part) for part in order.split(max(1, NEURONS // size))]


def _worst(relaxation: Relaxation, samples: Samples) -> Tensor:
    """Return strict lower bounds on the worst margin of each sample."""
    classes = relaxation.graph.output_shape[0]
    device = samples.labels.device
    unsafe = [Unsafe.misclassification(int(y), classes, device) for y in samples.labels]
    owner = torch.arange(len(samples), device=device).repeat_interleave(classes - 1)
    rows = Coefficients(torch.cat([u.matrix for u in unsafe]), owner)
    bounds = relaxation.lower(relaxation.output, rows)
    return bounds.view(len(samples), classes - 1).amin(1)


def _proofs(worst: Tensor) -> Findings:
    verified = torch.isfinite(worst) & (worst > 0)
    return Findings(verified, torch.zeros_like(verified), worst)


def bab_stage(subject: Subject, samples: Samples, settings: StageSettings) -> Findings:
    """Decide one sample by branch and bound."""
    return _complete(complete.branch_and_bound, subject, samples, settings)


def milp_stage(subject: Subject, samples: Samples, settings: StageSettings) -> Findings:
    """Decide one sample by mixed-integer programming."""
    return _complete(complete.mixed_integer_program, subject, samples, settings)


def _complete(
    method: complete.Method, subject: Subject, samples: Samples, settings: StageSettings
) -> Findings:
    assert len(samples) == 1
    problem = complete.robustness(subject, samples)
    known = samples.bounds[0] if samples.bounds else None
    answer = method(subject, problem, known, timeout=settings.timeout)
    points, margin = None, answer.bound
    if answer.point is not None:
        points = answer.point[None]
        margin = -float(worst_margin(subject.outputs(points), samples.labels)[0])
    return Findings(
        torch.tensor([answer.verified], device=samples.labels.device),
        torch.tensor([points is not None], device=samples.labels.device),
        torch.tensor([margin], dtype=torch.float64, device=samples.labels.device),
        points,
        bounds=samples.bounds,
        reasons=(answer.reason or None,),
        domains=(answer.domains,),
    )


STAGES: dict[str, Stage] = {
    "ibp": Stage(ibp_stage),
    "attack": Stage(attack_stage),
    "crown-ibp": Stage(crown_ibp_stage),
    "alpha": Stage(alpha_stage),
    "bab": Stage(bab_stage, single=True),
    "milp": Stage(milp_stage, single=True),
}
# A mixed-integer program is exact up to its solver's tolerances only, so it has to be asked for.
DEFAULT_STAGES = tuple(name for name in STAGES if name != "milp")
