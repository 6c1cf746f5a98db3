"""`tightrope.certify`: verdicts for the samples of a run, journalled as they come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tightrope import data
from tightrope.certification.deciding import Batch, Decider, Task
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.problem import CHOICES, check_choices, check_timeout
from tightrope.certification.stages import STAGES
from tightrope.errors import UserError, shorten, unknown_name
from tightrope.files import write_json
from tightrope.graph import trace
from tightrope.parallel import Watcher, run_here, run_in_processes
from tightrope.radius import Radius, format_radius
from tightrope.runs.examination import Examination, check_attack, examine
from tightrope.runs.folder import FINGERPRINTS, Run, open_run
from tightrope.runs.journal import Journal, Record
from tightrope.runs.lock import Lock, Wait
from tightrope.runs.summary import Certification, read_summary, summarize

# The unit of work and of randomness, whatever the number of jobs. Few samples of a batch are left
# for the attack, which is wasteful on few; but large networks need their memory, and what a large
# batch had done is done again after an interruption.
BATCH = 500
SMALLEST_BATCH = 50
NEURONS = 1 << 23  # of all samples of a batch
# Within a batch, progress is reported no more often than this.
PROGRESS_SECONDS = 5.0

Progress = Callable[[Certification], None]


def certify(
    run: Run | str | Path,
    *,
    eps: Radius | None = None,
    samples: int | None = None,
    start: int = 0,
    stages: Sequence[str] = DEFAULT_STAGES,
    timeout: float = 60.0,
    steps: int = 200,
    restarts: int = 5,
    split: str = "auto",
    branching: str = "intercept",
    cuts: str = "auto",
    seed: int = 0,
    jobs: int = 1,
    device: str | None = None,
    force: bool = False,
    wait: Wait = False,
    progress: Progress = lambda summary: None,
) -> Certification:
    """Certify test samples of a run; write `certification.jsonl` and `certification.json`.

    A certification that was interrupted continues where it stopped. One with other settings, of
    another network or of other samples is an error unless `force` discards it; so is one by an
    earlier version that did not note what it was of. `timeout` is how many seconds one sample may
    take; `steps` and `restarts` belong to the attack; `split` (auto, input, relu), `branching` and
    `cuts` (auto, off, on: multi-neuron constraints) to the search. A run that another command is
    working on is an error unless `wait` queues for it.

    With `jobs`, several processes share the samples, each with its part of the threads. The
    records are the same (as far as rounding does not depend on the number of threads), in the
    order in which they come. `progress` gets the summary so far, at least after each batch.
    """
    run = open_run(run)
    _check_stages(stages)
    check_attack(steps, restarts, seed)
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {shorten(jobs)}")
    check_timeout(timeout)
    choices = asdict(check_choices(split, branching, cuts))
    run.check()
    with run.lock("certify", wait) as lock:
        examination = examine(run, eps, samples, start, device)
        settings = {
            "eps": format_radius(examination.eps),
            "start": start,
            "samples": len(examination.indices),
            "stages": list(stages),
            "timeout": float(timeout),
            "steps": steps,
            "restarts": restarts,
            "seed": seed,
            # Earlier certifications do not name what was not to be chosen.
            **{name: value for name, value in choices.items() if value != getattr(CHOICES, name)},
            **run.fingerprints(),
        }
        return _begin(run, examination, settings, force, progress).decide_all(jobs, lock)


def _check_stages(stages: Sequence[str]) -> None:
    for name in stages:
        if name not in STAGES:
            raise unknown_name("stage", name, STAGES)
    if not stages or len(set(stages)) < len(stages):
        raise UserError(f"stages must be different names out of: {', '.join(STAGES)}")


def _begin(
    run: Run, examination: Examination, settings: dict[str, Any], force: bool, progress: Progress
) -> _Session:
    """Start over, or go on from the records of earlier sessions."""
    if force or not run.journal.exists():
        run.clear_certification()  # without a journal, what else is there is a remnant
    run.tidy()
    records = _earlier_records(run, settings, examination)
    session = _Session(run, examination, settings, records, progress)
    # Written before the first sample, so that a journal always has its settings beside it.
    write_json(run.certification, session.summary().to_json())
    return session


def _earlier_records(
    run: Run, settings: dict[str, Any], examination: Examination
) -> dict[int, Record]:
    if not run.journal.exists() or not run.journal.stat().st_size:
        return {}
    summary = read_summary(run.certification).whole("start over with --force")
    _check_settings(run, settings, summary["settings"])
    records = Journal(run.journal).read(set(examination.indices.tolist()))
    _check_samples(run, records, examination.data)
    return records


def _check_settings(run: Run, settings: dict[str, Any], before: dict[str, Any]) -> None:
    """Refuse to go on with other settings, or with another network, than before."""
    network = [name for name in FINGERPRINTS if before.get(name) not in (None, settings[name])]
    if network:
        raise UserError(
            f"{run.folder} was certified with another network (since then changed: "
            f"{', '.join(network)}); restore it, or start over with --force"
        )
    missing = [name for name in FINGERPRINTS if before.get(name) is None]
    named = [*settings, *(name for name in asdict(CHOICES) if name not in settings)]
    changed = [n for n in named if before.get(n) != settings.get(n) and n not in missing]
    if changed:
        raise UserError(
            f"{run.folder} was certified with other settings ({', '.join(changed)}); "
            "repeat those, or start over with --force"
        )
    if missing:
        raise _untraceable(run)


def _untraceable(run: Run) -> UserError:
    return UserError(
        f"{run.folder} was certified by an earlier version, which did not note the network and the "
        "samples that its verdicts are of; start over with --force"
    )


def _check_samples(run: Run, records: dict[int, Record], dataset: data.Dataset) -> None:
    """Refuse records of samples that are not those of the data set any more."""
    known = {i: record.fingerprint for i, record in records.items() if record.fingerprint}
    if len(known) < len(records):
        raise _untraceable(run)
    changed = dataset.changed_sample(known)
    if changed is not None:
        what = "image" if records[changed].label == int(dataset.y_test[changed]) else "label"
        raise UserError(
            f"{dataset.name} has changed since {run.folder} was certified: test sample {changed} "
            f"has another {what}; restore it, or start over with --force"
        )


def _batch_size(examination: Examination) -> int:
    """Return how many samples go together: as many as memory allows, within limits."""
    graph = trace(examination.module, examination.input_shape)
    neurons = sum(math.prod(node.shape) for node in graph.nodes)
    return min(BATCH, max(SMALLEST_BATCH, NEURONS // neurons))


class _Session(Watcher[Batch]):
    """One certification, tied to its run folder."""

    def __init__(
        self,
        run: Run,
        examination: Examination,
        settings: dict[str, Any],
        records: dict[int, Record],
        progress: Progress,
    ) -> None:
        self.run, self.examination, self.settings = run, examination, settings
        self.records, self.progress = records, progress
        self.fingerprints: dict[int, str] = {}
        self.batch = _batch_size(examination)
        self.shown = time.monotonic()
        self.journal = Journal(run.journal)

    def decide_all(self, jobs: int, lock: Lock) -> Certification:
        """Decide all samples that are still open, batch by batch."""
        batches = self._open_batches()
        workers = min(jobs, len(batches))
        todo = (self._batch(first) for first in batches)
        known = self.examination
        task = partial(
            Decider,
            Task(self.run, known.module, known.input_shape, known.eps, self.settings, known.device),
        )
        with self.journal:
            if workers > 1:
                threads = max(1, torch.get_num_threads() // jobs)
                try:
                    run_in_processes(task, todo, self, workers=workers, threads=threads, share=lock)
                finally:
                    self.run.tidy()  # what a worker that was ended was just writing
            elif workers:
                run_here(task, todo, self)
        summary = self.summary()
        assert summary.complete
        assert summary.verified + summary.falsified + summary.unknown == summary.samples
        write_json(self.run.certification, summary.to_json())
        return summary

    def summary(self) -> Certification:
        """Summarise what is known so far."""
        total = len(self.examination.indices)
        return summarize(self.records.values(), total, self.settings)

    def give(self, batch: Batch) -> Batch:
        """Say which samples of a batch are known, also by a worker that died of the others."""
        known = frozenset(i for i in batch.indices.tolist() if i in self.records)
        return replace(batch, known=known)

    def message(self, batch: Batch, record: Record) -> None:
        """Write a record down, unless it is known."""
        if record.index not in self.records:
            record = replace(record, fingerprint=self.fingerprints[record.index])
            self.records[record.index] = record
            self.journal.append(record)
        self._show(at_once=False)

    def finished(self, batch: Batch, result: None) -> None:
        """Report a batch."""
        self._show(at_once=True)

    def _open_batches(self) -> list[int]:
        """Return the positions where batches with undecided samples begin.

        Such a batch runs again as a whole: same numbers as without the interruption.
        """
        indices = self.examination.indices.tolist()
        return [
            first
            for first in range(0, len(indices), self.batch)
            if any(i not in self.records for i in indices[first : first + self.batch])
        ]

    def _batch(self, first: int) -> Batch:
        tensors = self.examination.batch(first, first + self.batch)
        indices, x, labels = (t.cpu().numpy() for t in tensors)
        hashes = self.examination.data.fingerprints(tensors[0])
        self.fingerprints |= dict(zip(indices.tolist(), hashes, strict=True))
        return Batch(indices, x, labels)

    def _show(self, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self.shown >= PROGRESS_SECONDS:
            self.shown = now
            self.progress(self.summary())
