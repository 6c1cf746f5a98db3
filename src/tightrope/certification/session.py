"""One certification, tied to its folder: batches go out, records come back and are journalled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightrope.certification.deciding import Batch, Decider, Task
from tightrope.certification.resuming import earlier
from tightrope.certification.sources import Source
from tightrope.files import write_json
from tightrope.parallel import Watcher, run_here, run_in_processes
from tightrope.radius import format_radius
from tightrope.runs.coverage import Ranges, at_radius, joined, named, summarize_radii
from tightrope.runs.journal import Journal, Record
from tightrope.runs.lock import Lock
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


def bisected(radii: Sequence[Fraction]) -> list[Fraction]:
    """Order radii so that each answers for as many of the others as it can: the middle first."""
    left, order = [sorted(radii)], []
    while left:
        part = left.pop(0)
        if part:
            middle = len(part) // 2
            order.append(part[middle])
            left += [part[:middle], part[middle + 1 :]]
    return order


class Session(Watcher[Batch]):
    """One certification, tied to its folder: one radius after the other."""

    def __init__(
        self, source: Source, settings: dict[str, Any], force: bool, progress: Progress
    ) -> None:
        self.source, self.settings, self.progress = source, settings, progress
        self.run, self.radii = source.run, source.radii
        run = self.run
        self.batch = self._batch_size()
        indices = source.indices.tolist()
        self.portions = None if source.shard is None else source.shard.of(self._batches(indices))
        shares = [indices] if self.portions is None else [p.own for p in self.portions]
        self.own_samples = frozenset(index for share in shares for index in share)
        if force or not run.journal.exists():
            run.clear_certification()  # without a journal, what else is there is a remnant
        run.tidy()
        before = earlier(run, settings, source.data, source.own)
        self.records, self.own = before.records, before.own
        here = [(index, index + 1) for index in self.own_samples]
        self.asked = joined({format_radius(radius): here for radius in self.radii})
        self.ranges = joined(before.ranges, self.asked)
        self.fingerprints: dict[int, str] = {}
        self.shown = time.monotonic()
        self.journal = Journal(run.journal)
        self.eps = self.radii[0]
        self.known: dict[int, Record] = {}
        # Written before the first sample, so that a journal always has its settings beside it.
        self._write()

    def decide_all(self, jobs: int, lock: Lock | None) -> Certification:
        """Decide all samples that are still open, radius by radius, batch by batch."""
        with self.journal:
            for eps in bisected(self.radii):
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
        known = frozenset(i for i in batch.indices.tolist() if not self._is_open(i))
        return replace(batch, known=known)

    def message(self, batch: Batch, record: Record) -> None:
        """Write a record down, unless it is known or another shard's."""
        if self._is_open(record.index):
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

        def is_here(index: int) -> bool:
            return index in direct or index not in self.known

        if self.portions is None:
            batches = self._batches(list(filter(is_here, self.source.indices.tolist())))
        else:
            batches = [list(filter(is_here, portion.batch)) for portion in self.portions]
        return [torch.tensor(b) for b in batches if any(map(self._is_open, b))]

    def _batches(self, indices: list[int]) -> list[list[int]]:
        return [indices[first : first + self.batch] for first in range(0, len(indices), self.batch)]

    def _is_open(self, index: int) -> bool:
        """Return whether a sample is ours to decide, and not decided yet."""
        return index in self.own_samples and index not in self.known

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
