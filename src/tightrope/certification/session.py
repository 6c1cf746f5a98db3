"""One certification, tied to its folder: batches go out, records come back and are journalled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightrope.certification.deciding import Decider, Task
from tightrope.certification.families import Families
from tightrope.certification.resuming import earlier
from tightrope.certification.sources import Source
from tightrope.certification.work_items import Batch, Part, Partial, Point, Portion, Rest
from tightrope.files import write_bytes, write_json
from tightrope.parallel import RayCluster, Watcher, run_tasks
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


class Session(Watcher[Portion]):
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
        # Who decides samples that a worker gave away: another item, None for parts of its search.
        self.owners: dict[int, Portion | None] = {}
        self.families = Families()
        self.origins: dict[int, int] = {}  # the last attempt at an item, by its identity
        self.counter = itertools.count(1)
        # Written before the first sample, so that a journal always has its settings beside it.
        self._write()

    def decide_all(
        self, jobs: int | None, lock: Lock | None, cluster: RayCluster | None = None
    ) -> Certification:
        """Decide all samples that are still open, radius by radius, batch by batch."""
        with self.journal:
            for eps in bisected(self.radii):
                self.eps = eps
                self._decide_radius(jobs, lock, cluster)
        self._write()
        shown = self.own if self.own in self.radii else self.radii[0]
        summary = self._summary(self.asked, shown)
        assert summary.complete
        assert summary.verified + summary.falsified + summary.unknown == summary.samples
        return summary

    def _decide_radius(
        self, jobs: int | None, lock: Lock | None, cluster: RayCluster | None
    ) -> None:
        """Decide what is open at one radius, and not settled by another one."""
        self.known = at_radius(self.records, self.eps, self.own)
        self.families, self.owners = Families(), {}
        batches = self._open_batches()
        if not batches:
            return
        known, local = self.source, jobs or 1
        self.task = Task(
            self.run if cluster is None else None,
            known.network if cluster is None else known.portable_network(),
            known.input_shape,
            self.eps,
            self.settings,
            known.device if cluster is None else cluster.device,
            self.eps == self.own,
            known.domain,
            known.norm,
        )
        try:
            run_tasks(
                partial(Decider, self.task),
                (self._batch(indices) for indices in batches),
                self,
                workers=min(local, len(batches)) if cluster is None else jobs,
                threads=max(1, torch.get_num_threads() // local),
                share=lock,
                cluster=cluster,
            )
        finally:
            self.run.tidy()  # what a worker that was ended was just writing

    def give(self, item: Portion) -> Portion:
        """Say which samples are known, also by a worker that died of the others."""
        if isinstance(item, Part):
            return item
        # What a worker that died had given away of a search is of no use.
        self.families.forget(self.origins.get(id(item), 0))
        self.origins[id(item)] = origin = next(self.counter)
        if isinstance(item, Rest):
            left = [one for one in item.left if self._is_here(one.index, item)]
            return replace(item, left=left, origin=origin)
        known = frozenset(i for i in item.indices.tolist() if not self._is_here(i, item))
        return replace(item, known=known, origin=origin)

    def message(self, item: Portion, message: Record | Partial | Point) -> None:
        """Write a record down, unless it is known or another shard's."""
        if isinstance(message, Point):
            if self._is_open(message.index):
                path = self.task.point(self.run, message.index)
                write_bytes(path, message.content, own_folder=True)
        elif isinstance(message, Record):
            self._note(message)
        else:
            if message.root:
                self.owners[message.record.index] = None
            record = self.families.end(message)
            if record is not None:
                self._note(record)
        self._show(at_once=False)

    def shared(self, item: Portion, parts: list[Portion]) -> None:
        """Note whose samples they are from now on."""
        for part in parts:
            if isinstance(part, Part):
                self.families.add(part)
            elif isinstance(part, Rest):
                self.owners |= {left.index: part for left in part.left}

    def size(self, item: Portion) -> float:
        """Return how many samples of an item are left; half a search is less than one."""
        if isinstance(item, Part):
            return 0.5
        return sum(self._is_here(i, item) for i in item.samples.indices.tolist())

    def wanted(self, item: Portion) -> bool:
        """Return whether anybody waits for an item: not for what others begin anew."""
        return not isinstance(item, Part) or self.families.knows(item)

    def finished(self, item: Portion, result: None) -> None:
        """Report a batch."""
        self._show(at_once=True)

    def _note(self, record: Record) -> None:
        if self._is_open(record.index):
            record = replace(record, fingerprint=self.fingerprints[record.index])
            self.known[record.index] = record
            self.records.append(record)
            self.journal.append(record)

    def _is_here(self, index: int, item: Portion) -> bool:
        """Return whether a sample is open, and an item is the one to decide it."""
        return self._is_open(index) and self.owners.get(index, item) is item

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
