"""The cascade: cheap stages first, each batched over images, what is left to the next one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.attacks import worst_margin
from tightrope.certification.properties import Ball, Samples
from tightrope.certification.stages import Findings, Stage, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.precision import full_precision
from tightrope.runs.examination import batch_seed
from tightrope.runs.journal import Record
from tightrope.verdict import Verdict

# Called with a sample's index and its counterexample; returns the name to put in the journal.
Keep = Callable[[int, Tensor], str]


@dataclass
class _Open:
    """What is known of one sample that is still open."""

    index: int
    label: int
    prediction: int
    margin: float = math.nan
    times: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    domains: int | None = None

    def record(self, verdict: Verdict, stage: str, counterexample: str | None = None) -> Record:
        return Record(
            index=self.index,
            label=self.label,
            prediction=self.prediction,
            verdict=verdict,
            stage=stage,
            margin=self.margin if math.isfinite(self.margin) else None,
            seconds=sum(self.times.values()),
            times=self.times,
            counterexample=counterexample,
            reason=self.reason if verdict is Verdict.UNKNOWN else None,
            domains=self.domains,
        )


@dataclass
class _Batch:
    """The samples of a batch that are still open."""

    entries: list[_Open]
    samples: Samples

    def narrow(self, index: Tensor) -> None:
        """Go on with some samples only, by their positions."""
        self.entries = [self.entries[i] for i in index.tolist()]
        self.samples = self.samples.select(index)


def decide(
    subject: Subject,
    indices: Tensor,
    x: Tensor,
    labels: Tensor,
    *,
    eps: Fraction,
    stages: Mapping[str, Stage],
    keep: Keep,
    settings: StageSettings,
    seed: int = 0,
    known: Container[int] = (),
) -> Iterator[Record]:
    """Run the stages on one batch and yield a record per sample, as each is decided.

    Randomness depends on `seed` and the first index only, so that a batch that is run again
    gives the same records. Samples in `known` have their records already: they take part in
    what is computed for the batch as a whole, and are left out of the long stages.
    """
    with torch.random.fork_rng(), full_precision():
        torch.manual_seed(batch_seed(seed, int(indices[0])))
        batch = _begin(subject, indices, x, labels, eps)
        yield from _wrong_from_the_start(subject, batch)
        last = "natural"
        for name, stage in stages.items():
            if stage.single:
                rest = [i for i, entry in enumerate(batch.entries) if entry.index not in known]
                batch.narrow(torch.tensor(rest, dtype=torch.long, device=labels.device))
                yield from _run_one_by_one(subject, batch, name, stage, settings, keep)
            elif batch.entries:
                yield from _run_stage(subject, batch, name, stage, settings, keep)
            last = name
        for entry in batch.entries:
            yield entry.record(Verdict.UNKNOWN, last)


def _begin(subject: Subject, indices: Tensor, x: Tensor, labels: Tensor, eps: Fraction) -> _Batch:
    started = time.perf_counter()
    predictions = subject.predict(x)
    wrong = subject.fooled(x, labels, predictions != labels)
    predictions = torch.where(wrong, predictions, labels)
    share = (time.perf_counter() - started) / len(labels)
    entries = [
        _Open(i, y, p, times={"natural": share})
        for i, y, p in zip(indices.tolist(), labels.tolist(), predictions.tolist(), strict=True)
    ]
    return _Batch(entries, Samples(Ball(x, eps), labels))


def _wrong_from_the_start(subject: Subject, batch: _Batch) -> Iterator[Record]:
    """Settle samples that the network misclassifies: each is its own counterexample."""
    margins = -worst_margin(subject.outputs(batch.samples.ball.x), batch.samples.labels).double()
    rest = []
    for i, entry in enumerate(batch.entries):
        if entry.prediction == entry.label:
            rest.append(i)
            continue
        entry.margin = float(margins[i])
        yield entry.record(Verdict.FALSIFIED, "natural")
    batch.narrow(torch.tensor(rest, dtype=torch.long, device=margins.device))


def _run_stage(
    subject: Subject,
    batch: _Batch,
    name: str,
    stage: Stage,
    settings: StageSettings,
    keep: Keep,
) -> Iterator[Record]:
    """Run a stage on all open samples together."""
    started = time.perf_counter()
    findings = stage.examine(subject, batch.samples, settings)
    share = (time.perf_counter() - started) / len(batch.entries)
    rest = []
    for i, entry in enumerate(batch.entries):
        entry.times[name] = share
        record = _settle(entry, i, name, findings, keep)
        if record is None:
            rest.append(i)
        else:
            yield record
    if findings.bounds:
        batch.samples = Samples(batch.samples.ball, batch.samples.labels, findings.bounds)
    batch.narrow(torch.tensor(rest, dtype=torch.long, device=batch.samples.labels.device))


def _run_one_by_one(
    subject: Subject,
    batch: _Batch,
    name: str,
    stage: Stage,
    settings: StageSettings,
    keep: Keep,
) -> Iterator[Record]:
    """Run a stage on each open sample, so that each outcome is known as soon as it can be."""
    left: list[int] = []
    for i in range(len(batch.entries)):
        position = torch.tensor([i], device=batch.samples.labels.device)
        alone = _Batch([batch.entries[i]], batch.samples.select(position))
        yield from _run_stage(subject, alone, name, stage, settings, keep)
        if alone.entries:
            left.append(i)
    batch.narrow(torch.tensor(left, dtype=torch.long, device=batch.samples.labels.device))


def _settle(entry: _Open, i: int, name: str, findings: Findings, keep: Keep) -> Record | None:
    """Return the record of a sample that a stage decided; else take note of what it found."""
    margin = float(findings.margin[i])
    entry.domains = findings.domains[i] if findings.domains else entry.domains
    if findings.verified[i]:
        entry.margin = margin
        return entry.record(Verdict.VERIFIED, name)
    if findings.falsified[i]:
        assert findings.points is not None
        entry.margin = margin
        return entry.record(Verdict.FALSIFIED, name, keep(entry.index, findings.points[i]))
    # A stage that bounds nothing says NaN; the best lower bound so far stands.
    entry.margin = max((m for m in (entry.margin, margin) if not math.isnan(m)), default=math.nan)
    entry.reason = findings.reasons[i] if findings.reasons else entry.reason
    return None
