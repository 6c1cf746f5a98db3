"""The cascade: cheap stages first, each batched over images, what is left to the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.attacks import worst_margin
from tightrope.certification.journal import Record
from tightrope.certification.properties import Ball, Verdict
from tightrope.certification.stages import Findings, Stage, Subject
from tightrope.precision import full_precision

# Called with a sample's index and its counterexample; returns the name to put in the journal.
Keep = Callable[[int, Tensor], str]


def batch_seed(seed: int, first_index: int) -> int:
    """Return the seed of the batch that begins with a sample."""
    return (seed * 1_000_003 + first_index) % 2**63


@dataclass
class _Batch:
    """The samples of a batch that are still open."""

    indices: Tensor
    ball: Ball
    labels: Tensor
    predictions: Tensor
    margins: Tensor
    times: dict[str, float] = field(default_factory=dict)

    def narrow(self, keep: Tensor) -> None:
        """Drop the samples that were decided."""
        self.indices, self.labels = self.indices[keep], self.labels[keep]
        self.predictions, self.margins = self.predictions[keep], self.margins[keep]
        self.ball = self.ball.select(keep)

    def record(self, i: int, verdict: Verdict, stage: str, margin: float) -> Record:
        """Return the record of the i-th open sample."""
        return Record(
            index=int(self.indices[i]),
            label=int(self.labels[i]),
            prediction=int(self.predictions[i]),
            verdict=verdict,
            stage=stage,
            margin=margin if abs(margin) < float("inf") else None,
            seconds=sum(self.times.values()),
            times=dict(self.times),
        )


def decide(
    subject: Subject,
    indices: Tensor,
    x: Tensor,
    labels: Tensor,
    *,
    eps: Fraction,
    stages: Mapping[str, Stage],
    keep: Keep,
    seed: int = 0,
) -> Iterator[Record]:
    """Run the stages on one batch and yield a record per sample, as each is decided.

    Randomness depends on `seed` and the first index only, so that a batch that is run again
    gives the same records in the same order.
    """
    with torch.random.fork_rng(), full_precision():
        torch.manual_seed(batch_seed(seed, int(indices[0])))
        started = time.perf_counter()
        logits = subject.outputs(x)
        margins = -worst_margin(logits, labels).double()
        predictions = subject.predict(x)
        wrong = subject.fooled(x, labels, predictions != labels)
        predictions = torch.where(wrong, predictions, labels)
        batch = _Batch(indices, Ball(x, eps), labels, predictions, margins)
        batch.times["natural"] = (time.perf_counter() - started) / len(labels)
        yield from _wrong_from_the_start(batch)
        batch.margins = torch.full_like(batch.margins, torch.nan)  # no bound is known yet
        last = "natural"
        for name, stage in stages.items():
            if not len(batch.labels):
                return
            yield from _run_stage(subject, batch, name, stage, keep)
            last = name
        for i in range(len(batch.labels)):
            yield batch.record(i, Verdict.UNKNOWN, last, float(batch.margins[i]))


def _wrong_from_the_start(batch: _Batch) -> Iterator[Record]:
    """Settle samples that the network misclassifies: each is its own counterexample."""
    wrong = batch.predictions != batch.labels
    for i in wrong.nonzero()[:, 0].tolist():
        yield batch.record(i, Verdict.FALSIFIED, "natural", float(batch.margins[i]))
    batch.narrow(~wrong)


def _run_stage(
    subject: Subject, batch: _Batch, name: str, stage: Stage, keep: Keep
) -> Iterator[Record]:
    started = time.perf_counter()
    findings = stage(subject, batch.ball, batch.labels)
    batch.times[name] = (time.perf_counter() - started) / len(batch.labels)
    for i in (findings.verified | findings.falsified).nonzero()[:, 0].tolist():
        yield _settle(batch, i, name, findings, keep)
    # A stage that bounds nothing says NaN; the best lower bound so far stands.
    known = torch.where(findings.falsified, torch.nan, findings.margin)
    batch.margins = torch.fmax(batch.margins, known)
    batch.narrow(~(findings.verified | findings.falsified))


def _settle(batch: _Batch, i: int, name: str, findings: Findings, keep: Keep) -> Record:
    if findings.verified[i]:
        return batch.record(i, Verdict.VERIFIED, name, float(findings.margin[i]))
    assert findings.points is not None
    file = keep(int(batch.indices[i]), findings.points[i])
    record = batch.record(i, Verdict.FALSIFIED, name, float(findings.margin[i]))
    return Record(**{**vars(record), "counterexample": file})
