"""The stages: each looks at some open problems and decides what it can.

A stage returns an answer for each problem, open ones with the best bound it proved, and leaves
them to the next. Proofs come from strict float64 bounds only; refutations are points at which the
original network fails.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, falsified, undecided
from tightrope.attacks import strong_attack
from tightrope.attacks.apgd import Ball as AttackedBall
from tightrope.attacks.autoattack import autoattack
from tightrope.box import BallBox, Box, joined
from tightrope.budget import LARGEST_PART, fitting
from tightrope.certification import complete
from tightrope.certification.problem import CHOICES, Choices, OpenProblem, Problem, proof, worst_row
from tightrope.certification.refutation import confirmed
from tightrope.certification.search import shared
from tightrope.certification.search.inputs import SOME_INPUTS, few_vary, splits_inputs
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.devices import launches
from tightrope.domains import interval, lipschitz
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, CROWN_IBP, relax
from tightrope.graph.graph import Rules
from tightrope.precision import ROUNDING

# Neurons whose bounds are held at a time: by one pass, and by a pass for each unstable neuron.
NEURONS = 1 << 22
CROWN_NEURONS = 1 << 18
NEURON_BYTES = 128  # bounds, lines and magnitudes of a neuron
# Where few inputs vary: points that are looked at first, and seconds for them and what follows.
PROBES, PROBING = 8192, 2.0
QUICK_STEPS, FIRST_STEPS = 10, 50

Open = Sequence[OpenProblem]


@dataclass(frozen=True)
class StageSettings:
    """How hard the stages try; `timeout` in seconds, for all that is done for one problem."""

    steps: int = 200
    restarts: int = 5
    timeout: float = 60.0
    choices: Choices = CHOICES


Examine = Callable[[Subject, Open, StageSettings, Deadline], list[Answer]]


@dataclass(frozen=True)
class Stage:
    """A stage; `single` ones take so long that each problem's answer is known at once.

    It may take a `share` of the time that is left. A stage with a `light` part does that before:
    for all problems together, and before what other stages do at length.
    """

    examine: Examine
    single: bool = False
    share: float = 1.0
    light: Examine | None = None


def ibp_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Prove by interval bounds, with every rounding error accounted for."""
    return _forward_proofs(subject, problems, interval.RULES)


def lipschitz_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Prove that outputs are too far apart for distance layers to exchange them."""
    if not lipschitz.applies(subject.exact):
        return [undecided()] * len(problems)
    return _forward_proofs(subject, problems, lipschitz.RULES)


def _forward_proofs(subject: Subject, problems: Open, rules: Rules) -> list[Answer]:
    """Prove by the boxes that one pass through the network gives."""
    if any(opened.problem.label is None for opened in problems):
        return [proof(bound) for bound in _output_bounds(subject, problems, rules)]
    parts = _parts(subject, problems)
    return [proof(bound) for part in parts for bound in _margins(subject, part, rules)]


@torch.no_grad()
def _margins(subject: Subject, problems: Open, rules: Rules) -> list[float]:
    """Bound the margins of samples."""
    labels = [p.problem.label for p in problems]
    chosen = torch.tensor(labels, device=problems[0].problem.outer.lower.device)
    box = _outer(problems)
    margins, _ = interval.margins(subject.exact, box, chosen, rounding=ROUNDING, rules=rules)
    worst = margins.scatter(1, chosen[:, None], torch.inf).amin(1)
    found: list[float] = torch.where(torch.isfinite(margins).all(1), worst, -torch.inf).tolist()
    return found


def _output_bounds(subject: Subject, problems: Open, rules: Rules) -> Iterator[float]:
    """Bound any rows of the outputs by the box of the outputs."""
    box = _outer(problems)
    with torch.no_grad():
        output, _ = interval.bounds(subject.exact, box, rounding=ROUNDING, rules=rules)
    output = Box(*output.corners)
    for i, opened in enumerate(problems):
        unsafe = opened.problem.unsafe
        rows = interval.row_bounds(output[i : i + 1], unsafe.matrix, rounding=ROUNDING)
        yield worst_row(unsafe, rows)


def quick_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Refute what a few steps of an attack refute."""
    light = replace(settings, steps=min(settings.steps, QUICK_STEPS), restarts=1)
    return attack_stage(subject, problems, light, deadline)


def first_attack(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Refute what one restart of few steps refutes: most of what the whole attack does."""
    light = replace(settings, steps=min(settings.steps, FIRST_STEPS), restarts=1)
    return attack_stage(subject, problems, light, deadline)


def attack_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Refute by points that lie in the exact set and at which the original network fails."""
    if any(opened.problem.label is None for opened in problems):
        return [
            _refutation(_attack(subject, opened.problem, settings, deadline), deadline)
            for opened in problems
        ]
    box = _inner(problems)
    labels = torch.tensor([p.problem.label for p in problems], device=box.lower.device)
    steps, restarts = settings.steps, settings.restarts
    points = strong_attack(subject.attacked, box, labels, steps=steps, restarts=restarts)
    return [_refutation(point, deadline) for point in confirmed(subject, box, labels, points)]


def autoattack_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Refute by AutoAttack's suite; questions about other things than labels by `attack`."""
    if any(opened.problem.label is None for opened in problems):
        return attack_stage(subject, problems, settings, deadline)
    found: list[Tensor | None] = [None] * len(problems)
    with contextlib.suppress(OutOfTimeError):
        for _ in broken_by_suite(subject, problems, found):
            pass
    return [_refutation(point, deadline) for point in found]


def broken_by_suite(
    subject: Subject, problems: Open, found: list[Tensor | None]
) -> Iterator[tuple[str, int]]:
    """Attack samples, write counterexamples to `found`; yield attacks and how many withstood."""
    inner = _inner(problems)
    balls = [opened.problem.ball for opened in problems]
    x = torch.cat(
        [
            opened.problem.inner.center if b is None else b.x
            for opened, b in zip(problems, balls, strict=True)
        ]
    )
    limits = {None if b is None else b.domain for b in balls}
    domain = limits.pop() if len(limits) == 1 else None
    labels = torch.tensor([p.problem.label for p in problems], device=inner.lower.device)
    unlimited = (-math.inf, math.inf)
    ball = AttackedBall(x, Box(*inner.corners), labels, domain or unlimited)

    def confirm(points: Tensor, index: Tensor) -> Tensor:
        inside = inner[index].contains(points) & (subject.predict(points) != labels[index])
        broken = subject.fooled(points, labels[index], inside)
        for place in broken.nonzero()[:, 0].tolist():
            found[int(index[place])] = points[place]
        return broken

    for name, left in autoattack(subject.attacked, ball, confirm):
        yield name, len(left)


def _attack(
    subject: Subject, problem: Problem, settings: StageSettings, deadline: Deadline
) -> Tensor | None:
    """Attack all groups of a problem; where few inputs vary, from many points."""
    refuter = problem.refuter(subject)
    round_set = isinstance(problem.inner, BallBox)  # points that are spread would miss it
    spread = not round_set and few_vary(problem, SOME_INPUTS)  # more have too many directions
    if spread and splits_inputs(subject, problem, settings.choices.split):
        return refuter.probe(
            PROBES, deadline=Deadline(min(deadline.end, time.monotonic() + PROBING))
        )
    return refuter.search(steps=settings.steps, restarts=settings.restarts, deadline=deadline)


def _refutation(point: Tensor | None, deadline: Deadline) -> Answer:
    if point is not None:
        return falsified(point)
    return undecided(Cause.TIME, "the attack had not ended") if deadline.left <= 0 else undecided()


def crown_ibp_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Prove by one backward pass over interval bounds."""
    answers = []
    for part in _parts(subject, problems):
        relaxation = relax(subject.exact, _outer(part), effort=CROWN_IBP, rounding=ROUNDING)
        for i, (opened, bound) in enumerate(zip(part, worst_rows(relaxation, part), strict=True)):
            answers.append(proof(bound))
            if opened.effort is None:
                opened.nodes, opened.effort = relaxation.known(i), CROWN_IBP
    return answers


def worst_rows(relaxation: Relaxation, problems: Open) -> Iterator[float]:
    """Yield strict lower bounds on the worst row of each problem of a batch."""
    unsafe = [opened.problem.unsafe for opened in problems]
    counts = torch.tensor([len(u.matrix) for u in unsafe], device=relaxation.box.lower.device)
    owner = torch.arange(len(problems), device=counts.device).repeat_interleave(counts)
    shape = relaxation.graph.output_shape
    rows = Coefficients(torch.cat([u.matrix for u in unsafe]).unflatten(1, shape), owner)
    bounds = relaxation.lower(relaxation.output, rows)
    for one, part in zip(unsafe, bounds.split(counts.tolist()), strict=True):
        yield worst_row(one, part)


def crown_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Prove by linear bounds of all layers, of several problems at once where they are small."""
    size = _crowned(subject)
    together = size > 1 or launches(problems[0].problem.outer.lower)
    if not together or any(opened.problem.label is None for opened in problems):
        return [complete.linear_bounds(subject, opened, settings.choices) for opened in problems]
    answers = []
    for part in _parts(subject, problems, size):
        relaxation = _by_lines(subject, part)
        found = [proof(bound) for bound in worst_rows(relaxation, part)]
        left = [opened for opened, answer in zip(part, found, strict=True) if not answer]
        if left and shared.suits(subject, left, settings.choices):
            some = shared.parts(subject, left)
            better = iter([a for few in some for a in shared.SharedSearch(subject, few).root()])
            found = [answer or next(better) for answer in found]
        answers += found
        for opened in part:
            opened.rows = 0
    return answers


def _by_lines(subject: Subject, problems: Open) -> Relaxation:
    """Bound all layers of several problems by lines, and remember the bounds."""
    known = shared.joined_nodes(problems)
    relaxation = relax(
        subject.exact, _outer(problems), effort=CROWN, rounding=ROUNDING, known=known
    )
    for i, opened in enumerate(problems):
        opened.nodes, opened.effort = relaxation.known(i), CROWN
    return relaxation


def alpha_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Prove by linear bounds of all layers with optimised slopes: the root of the search."""
    return [complete.root(subject, opened, deadline, settings.choices) for opened in problems]


def bab_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Decide by branch and bound."""
    return [
        complete.branch_and_bound(subject, opened, deadline, settings.choices)
        for opened in problems
    ]


def shared_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Decide what few splits decide, in batches that all problems share."""
    answers: list[Answer] = []
    try:
        for part in shared.parts(subject, problems):
            unknown = [opened for opened in part if opened.effort is not CROWN]
            for some in _parts(subject, unknown, _crowned(subject)) if unknown else ():
                _by_lines(subject, some)
            answers += shared.SharedSearch(subject, part).run(deadline)
    except OutOfTimeError:  # what was decided before stands
        late = undecided(Cause.TIME, complete.NOT_BOUNDED)
        answers += [late] * (len(problems) - len(answers))
    return answers


def milp_stage(
    subject: Subject, problems: Open, settings: StageSettings, deadline: Deadline
) -> list[Answer]:
    """Decide by mixed-integer programming."""
    return [complete.mixed_integer_program(subject, opened, deadline) for opened in problems]


def _outer(problems: Open) -> Box:
    return joined([opened.problem.outer for opened in problems])


def _inner(problems: Open) -> Box:
    return joined([opened.problem.inner for opened in problems])


def _crowned(subject: Subject) -> int:
    """Return how many problems' neurons are bounded by lines at once."""
    return max(1, CROWN_NEURONS // subject.neurons)


def _parts(subject: Subject, problems: Open, most: int | None = None) -> Iterator[Open]:
    """Split problems so that the bounds of all their neurons fit into memory.

    On a GPU as many as fit go together; elsewhere `most`, or as many as are of use.
    """
    neurons = sum(math.prod(node.shape) for node in subject.exact.nodes)
    lower = problems[0].problem.outer.lower
    if launches(lower):
        size = max(1, fitting(LARGEST_PART, lower.device) // (NEURON_BYTES * neurons))
    else:
        memory = fitting(NEURON_BYTES * NEURONS, lower.device)
        size = most or max(1, memory // (NEURON_BYTES * neurons))
    for first in range(0, len(problems), size):
        yield problems[first : first + size]


STAGES: dict[str, Stage] = {
    "lipschitz": Stage(lipschitz_stage),
    "ibp": Stage(ibp_stage),
    "quick": Stage(quick_stage, share=0.1),
    "crown-ibp": Stage(crown_ibp_stage, share=0.5),
    "crown": Stage(crown_stage, share=0.25),
    "attack": Stage(attack_stage, share=0.5, light=first_attack),
    "autoattack": Stage(autoattack_stage, share=0.5),
    "alpha": Stage(alpha_stage, single=True),
    "bab": Stage(bab_stage, single=True, light=shared_stage),
    "milp": Stage(milp_stage, single=True),
}
