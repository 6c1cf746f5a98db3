"""`tightrope.certify`: verdicts for the samples of a run, journalled as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.budget import PROVING_ADVICE, explaining_memory
from tightrope.certification.deciding import Batch, Decider, Task
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.problem import CHOICES, Choices, check_choices, check_timeout
from tightrope.certification.properties import PIXELS, Domain, parse_norm
from tightrope.certification.resuming import earlier
from tightrope.certification.sources import Source, Wanted, opened
from tightrope.certification.stages import STAGES
from tightrope.errors import UserError, shorten, unknown_name
from tightrope.files import write_json
from tightrope.graph import Graph
from tightrope.parallel import Watcher, run_here, run_in_processes
from tightrope.radius import Radius, format_radius
from tightrope.runs import Run
from tightrope.runs.coverage import Ranges, at_radius, joined, named, summarize_radii
from tightrope.runs.examination import check_attack
from tightrope.runs.journal import Journal, Record
from tightrope.runs.lock import Lock, Wait
from tightrope.runs.summary import Certification

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
    run: Run | nn.Module | Graph | str | Path,
    *,
    data: tuple[Tensor, Tensor] | str | Path | None = None,
    out: str | Path | None = None,
    eps: Radius | Sequence[Radius] | None = None,
    samples: int | None = None,
    start: int = 0,
    domain: Domain = PIXELS,
    norm: float | str = "linf",
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

    Instead of a run, it may be a module, a graph or the path of an ONNX file, with `data`: a pair
    (x, y) or an .npz file of `x_test` and `y_test`. The files then go to the folder `out`; without
    it nothing is written. `domain` is the range of values that its inputs can have.

    The radius is one of `norm`: linf, l2 or l1; a folder is about one of them. `eps` may be several
    radii: the `curve` of the result then has the accuracies of each. A certification that was
    interrupted continues where it stopped; one of more samples or of other radii adds to what is in
    the folder. One with other settings, of another network or of other samples is an error unless
    `force` discards it; so is one by an earlier version that did not note what it was of. `timeout`
    is how many seconds one sample may take; `steps` and `restarts` belong to the attack; `split`,
    `branching` and `cuts` to the search. A run that another command is working on is an error
    unless `wait` queues for it.

    With `jobs`, several processes share the samples, each with its part of the threads. The
    records are the same (as far as rounding does not depend on the number of threads), in the
    order in which they come. `progress` gets the summary so far, at least after each batch.
    """
    _check_stages(stages)
    check_attack(steps, restarts, seed)
    _check_jobs(jobs)
    check_timeout(timeout)
    settings = {
        "stages": list(stages),
        "timeout": float(timeout),
        "steps": steps,
        "restarts": restarts,
        "seed": seed,
        **_chosen(check_choices(split, branching, cuts)),
    }
    wanted = Wanted(eps, samples, start, device, parse_norm(norm))
    with opened(run, data, out, domain, wanted, wait) as (source, lock):
        settings |= source.settings
        return _Session(source, settings, force, progress).decide_all(jobs, lock)


def _chosen(choices: Choices) -> dict[str, str]:
    """Return what was chosen; earlier certifications do not name what was not to be chosen."""
    return {name: v for name, v in asdict(choices).items() if v != getattr(CHOICES, name)}


def _check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {shorten(jobs)}")


def _check_stages(stages: Sequence[str]) -> None:
    for name in stages:
        if name not in STAGES:
            raise unknown_name("stage", name, STAGES)
    if not stages or len(set(stages)) < len(stages):
        raise UserError(f"stages must be different names out of: {', '.join(STAGES)}")


def _bisected(radii: Sequence[Fraction]) -> list[Fraction]:
    """Order radii so that each answers for as many of the others as it can: the middle first."""
    left, order = [sorted(radii)], []
    while left:
        part = left.pop(0)
        if part:
            middle = len(part) // 2
            order.append(part[middle])
            left += [part[:middle], part[middle + 1 :]]
    return order


class _Session(Watcher[Batch]):
    """One certification, tied to its folder: one radius after the other."""

    def __init__(
        self, source: Source, settings: dict[str, Any], force: bool, progress: Progress
    ) -> None:
        self.source, self.settings, self.progress = source, settings, progress
        self.run, self.radii = source.run, source.radii
        run = self.run
        if force or not run.journal.exists():
            run.clear_certification()  # without a journal, what else is there is a remnant
        run.tidy()
        before = earlier(run, settings, source.data, source.own)
        self.records, self.own = before.records, before.own
        indices = source.indices.tolist()
        here = (indices[0], indices[-1] + 1)
        names = [format_radius(radius) for radius in self.radii]
        self.ranges = joined(before.ranges, {name: [here] for name in names})
        self.asked = {name: [here] for name in names}
        self.fingerprints: dict[int, str] = {}
        self.batch = self._batch_size()
        self.shown = time.monotonic()
        self.journal = Journal(run.journal)
        self.eps = self.radii[0]
        self.known: dict[int, Record] = {}
        # Written before the first sample, so that a journal always has its settings beside it.
        self._write()

    @explaining_memory(PROVING_ADVICE)
    def decide_all(self, jobs: int, lock: Lock | None) -> Certification:
        """Decide all samples that are still open, radius by radius, batch by batch."""
        with self.journal:
            for eps in _bisected(self.radii):
                self.eps = eps
                self._decide_radius(jobs, lock)
        self._write()
        shown = self.own if self.own in self.radii else self.radii[0]
        summary = self._summary(self.asked, shown)
        assert summary.complete
        assert summary.verified + summary.falsified + summary.unknown == summary.samples
        return summary

    def _decide_radius(self, jobs: int, lock: Lock | None) -> None:
        """Decide what is open at one radius, and not settled by another one."""
        self.known = at_radius(self.records, self.eps, self.own)
        batches = self._open_batches()
        workers = min(jobs, len(batches))
        known = self.source
        task = partial(
            Decider,
            Task(
                self.run,
                known.network,
                known.input_shape,
                self.eps,
                self.settings,
                known.device,
                self.eps == self.own,
                known.domain,
                known.norm,
            ),
        )
        todo = (self._batch(indices) for indices in batches)
        if workers > 1:
            threads = max(1, torch.get_num_threads() // jobs)
            try:
                run_in_processes(task, todo, self, workers=workers, threads=threads, share=lock)
            finally:
                self.run.tidy()  # what a worker that was ended was just writing
        elif workers:
            run_here(task, todo, self)

    def give(self, batch: Batch) -> Batch:
        """Say which samples of a batch are known, also by a worker that died of the others."""
        known = frozenset(i for i in batch.indices.tolist() if i in self.known)
        return replace(batch, known=known)

    def message(self, batch: Batch, record: Record) -> None:
        """Write a record down, unless it is known."""
        if record.index not in self.known:
            record = replace(record, fingerprint=self.fingerprints[record.index])
            self.known[record.index] = record
            self.records.append(record)
            self.journal.append(record)
        self._show(at_once=False)

    def finished(self, batch: Batch, result: None) -> None:
        """Report a batch."""
        self._show(at_once=True)

    def _batch_size(self) -> int:
        """Return how many samples go together: as many as memory allows, within limits."""
        return min(BATCH, max(SMALLEST_BATCH, NEURONS // self.source.neurons))

    def _open_batches(self) -> list[Tensor]:
        """Return the batches that have undecided samples, without those settled elsewhere.

        Such a batch runs again as a whole: same numbers as without the interruption.
        """
        text = None if self.eps == self.own else format_radius(self.eps)
        direct = {record.index for record in self.records if record.eps == text}
        left = [i for i in self.source.indices.tolist() if i in direct or i not in self.known]
        batches = [left[first : first + self.batch] for first in range(0, len(left), self.batch)]
        return [torch.tensor(b) for b in batches if any(i not in self.known for i in b)]

    def _batch(self, indices: Tensor) -> Batch:
        x, labels = self.source.batch(indices)
        hashes = self.source.data.fingerprints(indices)
        self.fingerprints |= dict(zip(indices.tolist(), hashes, strict=True))
        return Batch(indices.numpy(), x.numpy(), labels.numpy())

    def _show(self, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self.shown >= PROGRESS_SECONDS:
            self.shown = now
            self.progress(self._summary(self.asked, self.eps))

    def _write(self) -> None:
        """Write the summary of all that the folder is about."""
        write_json(self.run.certification, self._summary(self.ranges, self.own).to_json())

    def _summary(self, ranges: Ranges, eps: Fraction) -> Certification:
        """Summarise what is known of samples at a radius, and at all of them in the curve."""
        settings = {**named(ranges, format_radius(eps)), **self.settings}
        return summarize_radii(self.records, ranges, eps, self.own, settings)
