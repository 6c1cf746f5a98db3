"""The cascade: cheap stages first, each on many problems at once, what is left to the next one.

From the first `single` stage on, each problem goes through the rest by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.answer import Answer, Cause, Verdict, undecided
from tightrope.attacks import worst_margin
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.problem import CHOICES, Choices, OpenProblem, Problem, robustness
from tightrope.certification.properties import PIXELS, Ball, Domain
from tightrope.certification.search.shared import suits
from tightrope.certification.stages import STAGES, Examine, Stage, StageSettings
from tightrope.certification.subjects import Subject, proving
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains import lipschitz
from tightrope.runs.examination import batch_seed
from tightrope.runs.journal import Record

# Called with a sample's index and its counterexample; returns the name to put in the journal.
Keep = Callable[[int, Tensor], str]

SINGLE_SETTINGS = StageSettings(steps=50, restarts=1)


@dataclass
class Alone:
    """A problem that goes on by itself: its position, what is known of it, and its randomness."""

    position: int
    opened: OpenProblem
    seed: int


# Called between problems that go on by themselves, with those that wait; it may take some out.
Spare = Callable[[list[Alone]], None]


def walk(
    subject: Subject,
    problems: Sequence[OpenProblem],
    stages: Mapping[str, Stage],
    settings: StageSettings,
    skip: Container[int] = (),
    spare: Spare = lambda waiting: None,
) -> Iterator[tuple[int, Answer]]:
    """Send problems through the stages; yield position and answer of each as it is decided.

    Those at the positions in `skip` take part in the common stages only.
    """
    left = list(range(len(problems)))
    shared = suits(subject, problems, settings.choices) if problems else False
    for name, examine in for_all(stages, shared):
        if left:
            share = stages[name].share
            answers = _run(subject, [problems[i] for i in left], name, examine, share, settings)
            yield from ((i, a) for i, a in zip(left, answers, strict=True) if _decided(a))
            left = [i for i, a in zip(left, answers, strict=True) if not _decided(a)]
    # Each has its own randomness from here on, whatever becomes of those before it.
    seeds = torch.randint(1 << 62, (len(problems),)).tolist()
    waiting = [Alone(i, problems[i], seeds[i]) for i in left if i not in skip]
    yield from walk_alone(subject, waiting, stages, settings, spare)


def for_all(stages: Mapping[str, Stage], shared: bool) -> Iterator[tuple[str, Examine]]:
    """Yield what is done for all problems at once, in order.

    Where problems have `shared` searches, what is light of some stages is done first, and what the
    common ones leave of that for the end.
    """
    common, light = together(stages), [name for name in stages if shared and stages[name].light]
    postponed = [name for name in common if name in light[:-1]]
    for name, stage in stages.items():
        if stage.light is not None and (name in postponed or (name in light and stage.single)):
            yield name, stage.light
        elif name in common:
            yield name, stage.examine
    yield from ((name, stages[name].examine) for name in postponed)


def together(stages: Mapping[str, Stage]) -> list[str]:
    """Return the names of the common stages, those before the first `single` one."""
    names = list(stages)
    return names[: next((k for k, name in enumerate(names) if stages[name].single), len(names))]


def walk_alone(
    subject: Subject,
    waiting: list[Alone],
    stages: Mapping[str, Stage],
    settings: StageSettings,
    spare: Spare,
) -> Iterator[tuple[int, Answer]]:
    """Send problems through the rest of the stages, one after the other."""
    before = together(stages)
    while True:
        spare(waiting)
        if not waiting:
            return
        one = waiting.pop(0)
        torch.manual_seed(one.seed)
        answer = _summary(one.opened, before[-1] if before else "")
        for name in [*stages][len(before) :]:
            stage = stages[name]
            (answer,) = _run(subject, [one.opened], name, stage.examine, stage.share, settings)
            if _decided(answer):
                break
        one.opened.search = None  # large
        yield one.position, answer


def _decided(answer: Answer) -> bool:
    return answer.verdict is not Verdict.UNKNOWN


def _run(
    subject: Subject,
    problems: Sequence[OpenProblem],
    name: str,
    examine: Examine,
    share: float,
    settings: StageSettings,
) -> list[Answer]:
    """Run a stage on open problems; each is charged its share of the time, by rows."""
    started = time.perf_counter()
    left = sum(max(opened.left, 0.0) for opened in problems)
    deadline = Deadline.after(share * left)
    for opened in problems:
        opened.rows = 0
    try:
        with until(deadline):
            answers = examine(subject, problems, settings, deadline)
    except OutOfTimeError:
        answers = [undecided(Cause.TIME, f"{name} had not ended")] * len(problems)
    elapsed = time.perf_counter() - started
    rows = sum(opened.rows for opened in problems)
    complete = []
    for opened, answer in zip(problems, answers, strict=True):
        part = opened.rows / rows if rows else 1 / len(problems)
        opened.times[name] = opened.times.get(name, 0.0) + part * elapsed
        if _decided(answer):
            seconds = sum(opened.times.values())
            subproblems = answer.subproblems or opened.last.subproblems
            answer = replace(answer, stage=name, seconds=seconds, subproblems=subproblems)
        else:
            opened.note(answer)
            answer = _summary(opened, name)
        complete.append(answer)
    return complete


def _summary(opened: OpenProblem, stage: str) -> Answer:
    """Return what is known of an open problem."""
    seconds = sum(opened.times.values())
    return replace(opened.last, stage=stage, seconds=seconds, bound=opened.bound)


def solve(
    subject: Subject,
    problem: Problem,
    *,
    timeout: float = 60.0,
    seed: int = 0,
    stages: Sequence[str] | None = None,
    choices: Choices = CHOICES,
) -> Answer:
    """Decide one problem within a number of seconds."""
    settings = replace(SINGLE_SETTINGS, choices=choices)
    subject = subject.for_rows(problem.unsafe.matrix, problem.unsafe.offset)
    if stages is None:
        own = ("lipschitz",) if lipschitz.applies(subject.graph) else ()
        stages = (*own, *DEFAULT_STAGES)
    chosen = {name: STAGES[name] for name in stages}
    alone = replace(problem, label=None)  # every group of rows is attacked, not the worst one alone
    with proving(subject):
        torch.manual_seed(seed)
        ((_, answer),) = walk(subject, [OpenProblem(alone, timeout)], chosen, settings)
    return answer


@dataclass(frozen=True)
class Samples:
    """Samples of a test set to be decided together: indices, inputs, labels and the balls."""

    indices: Tensor
    x: Tensor
    labels: Tensor
    eps: Fraction
    domain: Domain = PIXELS
    norm: float = math.inf


def decide(
    subject: Subject,
    samples: Samples,
    *,
    stages: Mapping[str, Stage],
    keep: Keep,
    settings: StageSettings,
    seed: int = 0,
    known: Container[int] = (),
    spare: Callable[[list[Alone], list[int]], None] = lambda waiting, indices: None,
) -> Iterator[Record]:
    """Run the stages on one batch and yield a record per sample, as each is decided.

    Randomness depends on `seed` and the first index only, so that a batch that is run again
    gives the same records. Samples in `known` have their records already: they take part in
    what is computed for the batch as a whole, and are left out of the long stages. Between those,
    `spare` may take samples out that wait for them; it gets the indices of all positions.
    """
    with proving(subject):
        torch.manual_seed(batch_seed(seed, int(samples.indices[0])))
        started = time.perf_counter()
        predictions = _predict(subject, samples)
        share = (time.perf_counter() - started) / len(predictions)
        right = (predictions == samples.labels).nonzero()[:, 0]
        yield from _wrong_from_the_start(subject, samples, predictions, share)
        indices = samples.indices[right.cpu()].tolist()
        problems = open_problems(subject, samples, right, settings.timeout)
        for opened in problems:
            opened.times["natural"] = share
        skip = {i for i, index in enumerate(indices) if index in known}

        def offer(waiting: list[Alone]) -> None:
            spare(waiting, indices)

        for i, answer in walk(subject, problems, stages, settings, skip, offer):
            yield to_record(subject, indices[i], problems[i], answer, keep)


def open_problems(
    subject: Subject, samples: Samples, chosen: Tensor, seconds: float
) -> list[OpenProblem]:
    """Return the problems of some samples of a batch, that nothing is known of yet."""
    ball = Ball(samples.x[chosen], samples.eps, samples.domain, samples.norm)
    found = robustness(subject, ball, samples.labels[chosen])
    return [OpenProblem(problem, seconds) for problem in found]


def _predict(subject: Subject, samples: Samples) -> Tensor:
    """Return the predicted classes; a wrong one has to be so for the sample alone."""
    predictions = subject.predict(samples.x)
    wrong = subject.fooled(samples.x, samples.labels, predictions != samples.labels)
    return torch.where(wrong, predictions, samples.labels)


def _wrong_from_the_start(
    subject: Subject, samples: Samples, predictions: Tensor, seconds: float
) -> Iterator[Record]:
    """Settle samples that the network misclassifies: each is its own counterexample."""
    wrong = (predictions != samples.labels).nonzero()[:, 0]
    if not len(wrong):
        return
    margins = worst_margin(subject.outputs(samples.x[wrong]), samples.labels[wrong]).double()
    for i, margin in zip(wrong.tolist(), margins.tolist(), strict=True):
        yield Record(
            index=int(samples.indices[i]),
            label=int(samples.labels[i]),
            prediction=int(predictions[i]),
            verdict=Verdict.FALSIFIED,
            stage="natural",
            margin=margin if math.isfinite(margin) else None,
            seconds=seconds,
            times={"natural": seconds},
        )


def to_record(
    subject: Subject, index: int, opened: OpenProblem, answer: Answer, keep: Keep
) -> Record:
    """Return the journal's record of an answer: of a counterexample, the margin there."""
    label, margin, name = opened.problem.label, answer.bound, None
    assert label is not None
    if answer.counterexample is not None:
        name = keep(index, answer.counterexample)
        outputs = subject.outputs(answer.counterexample[None])
        margin = float(worst_margin(outputs, torch.tensor([label], device=outputs.device)))
    return Record(
        index=index,
        label=label,
        prediction=label,
        verdict=answer.verdict,
        stage=answer.stage,
        margin=margin if margin is not None and math.isfinite(margin) else None,
        seconds=answer.seconds,
        times=opened.times,
        counterexample=name,
        reason=answer.reason or None,
        domains=answer.subproblems or None,
    )
