"""Deciding batches of samples, in whatever process."""

from __future__ import annotations

import io
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tightrope.certification.cascade import (
    Alone,
    Samples,
    decide,
    open_problems,
    to_record,
    walk_alone,
)
from tightrope.certification.problem import CHOICES, Choices
from tightrope.certification.properties import PIXELS, Domain
from tightrope.certification.search.branch_and_bound import BranchAndBound
from tightrope.certification.search.sharing import Sharing, sharing
from tightrope.certification.stages import STAGES, StageSettings
from tightrope.certification.subjects import Subject, proving
from tightrope.certification.work_items import Batch, Left, Part, Partial, Point, Portion, Rest
from tightrope.files import write_bytes
from tightrope.graph import Graph
from tightrope.nets.onnx.importing import read_onnx
from tightrope.parallel import Send, Shared, current_wishes
from tightrope.radius import format_radius
from tightrope.runs import Run
from tightrope.runs.journal import Record


@dataclass(frozen=True)
class OnnxContent:
    """An ONNX file on its way to a machine that does not have it."""

    name: str
    content: bytes


Network = nn.Module | Graph | Path | OnnxContent


@dataclass(frozen=True)
class Task:
    """What a process must know to decide batches of a run.

    The folder's `own` radius is not named by its records; inputs have the values of `domain`, and
    the radius is one of `norm`. Without a `run`, the process writes no files, and sends what is to
    be written.
    """

    run: Run | None
    module: Network
    input_shape: tuple[int, ...]
    eps: Fraction
    settings: dict[str, Any]
    device: torch.device
    own: bool = True
    domain: Domain = PIXELS
    norm: float = math.inf

    def point(self, run: Run, index: int) -> Path:
        """Return where in a run folder the counterexample to a sample belongs."""
        return run.counterexample(index, None if self.own else format_radius(self.eps))


def open_subject(network: Network, input_shape: tuple[int, ...], device: torch.device) -> Subject:
    """Return the network under examination: a module, a graph, or what is in an ONNX file."""
    if isinstance(network, nn.Module):
        return Subject.of(network.to(device), input_shape)
    if isinstance(network, Graph):
        graph = network.to(device)
        return Subject(graph, graph)
    if isinstance(network, OnnxContent):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / network.name
            write_bytes(path, network.content)
            return open_subject(path, input_shape, device)
    read = read_onnx(network)
    return Subject(read.graph.to(device), read.run)


class Decider:
    """Decides batches in the process that it lives in; shares what is left if that is wished."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.subject = open_subject(task.module, task.input_shape, task.device).for_order()
        self.stages = {name: STAGES[name] for name in task.settings["stages"]}
        chosen = {name: task.settings[name] for name in ("steps", "restarts", "timeout")}
        choices = {name: v for name, v in task.settings.items() if name in vars(CHOICES)}
        self.settings = StageSettings(**chosen, choices=Choices(**choices))

    def __call__(self, item: Portion, send: Send) -> None:
        """Send a record per sample, as each is decided."""
        work = _Work(self, item, send)
        with sharing(Sharing(work.give_samples, work.give_half)):
            for record in work.records():
                if not self.task.own:
                    record = replace(record, eps=format_radius(self.task.eps))
                family = work.families.get(record.index)
                if family is None:
                    send(record)
                else:
                    send(Partial(record, family, root=not isinstance(item, Part)))

    def samples(self, batch: Batch) -> Samples:
        """Return samples as tensors."""
        indices, x, labels = map(torch.from_numpy, (batch.indices, batch.x, batch.labels))
        task, device = self.task, self.task.device
        balls = (task.eps, task.domain, task.norm)
        return Samples(indices, x.to(device), labels.to(device), *balls)


class _Work:
    """The work on one item: its samples, those that wait, and what was given away of them."""

    def __init__(self, decider: Decider, item: Portion, send: Send) -> None:
        self.decider, self.task, self.send, self.item = decider, decider.task, send, item
        self.batch = None if isinstance(item, Part) else item.samples
        self.waiting: list[Alone] = []
        self.indices: list[int] = []
        self.now: int | None = None  # the sample that is searched
        # Samples whose search is in parts, and whose they are.
        self.families = {item.index: item.family} if isinstance(item, Part) else {}

    def records(self) -> Iterator[Record]:
        """Decide what the item is about."""
        if isinstance(self.item, Batch):
            return self._batch(self.item)
        return self._rest(self.item) if isinstance(self.item, Rest) else self._part(self.item)

    def _batch(self, batch: Batch) -> Iterator[Record]:
        return decide(
            self.decider.subject,
            self.decider.samples(batch),
            stages=self.decider.stages,
            settings=self.decider.settings,
            keep=self._keep,
            known=batch.known,
            seed=self.task.settings["seed"],
            spare=self._between,
        )

    def _rest(self, rest: Rest) -> Iterator[Record]:
        if not rest.left:  # another worker had decided them all before it died
            return
        samples, subject = self.decider.samples(rest.samples), self.decider.subject
        place = {int(index): i for i, index in enumerate(rest.samples.indices)}
        chosen = torch.tensor([place[left.index] for left in rest.left])
        settings = self.decider.settings
        with proving(subject):
            problems = open_problems(subject, samples, chosen, settings.timeout)
            pairs = zip(rest.left, problems, strict=True)
            waiting = [left.restored(i, opened) for i, (left, opened) in enumerate(pairs)]
            several = list(waiting)
            indices = [left.index for left in rest.left]
            for i, answer in walk_alone(
                subject,
                waiting,
                self.decider.stages,
                settings,
                lambda queue: self._between(queue, indices),
            ):
                yield to_record(subject, indices[i], several[i].opened, answer, self._keep)

    def _part(self, part: Part) -> Iterator[Record]:
        subject, began = self.decider.subject, time.perf_counter()
        samples = self.decider.samples(part.sample)
        with proving(subject):
            (opened,) = open_problems(subject, samples, torch.tensor([0]), part.seconds)
            search = part.search
            search.refute = opened.problem.refuter(subject)
            self.now = part.index
            answer = search.run(time.monotonic() + part.seconds)
            seconds = time.perf_counter() - began
            opened.times["bab"] = seconds
            yield to_record(
                subject,
                part.index,
                opened,
                replace(answer, stage="bab", seconds=seconds),
                self._keep,
            )

    def _between(self, waiting: list[Alone], indices: list[int]) -> None:
        """Before the next sample: see who waits, and give some away if that is wished."""
        self.waiting, self.indices = waiting, indices
        wishes = current_wishes()
        if wishes.share and len(waiting) > 1 and self.give_samples():
            wishes.share = False
        self.now = indices[waiting[0].position] if waiting else None

    def give_samples(self) -> bool:
        """Give away every second one of the samples that wait; return whether there are any."""
        chosen = self.waiting[::2]
        if not chosen:
            return False
        assert self.batch is not None
        self.waiting[:] = self.waiting[1::2]
        left = [Left.of(self.indices[one.position], one) for one in chosen]
        samples = self.batch.some([one.index for one in left])
        self.send(Shared([Rest(samples, left)]))
        return True

    def give_half(self, search: BranchAndBound, seconds: float) -> None:
        """Give away a part of a search."""
        assert self.now is not None
        if isinstance(self.item, Part):
            sample, family = self.item.sample, self.item.family
        else:
            assert self.batch is not None
            sample, family = self.batch.some([self.now]), self.item.origin
        self.families[self.now] = family
        self.send(Shared([Part(sample, family, search, seconds)]))

    def _keep(self, index: int, point: Tensor) -> str:
        """Store a counterexample and return its name relative to the run folder."""
        buffer = io.BytesIO()
        np.save(buffer, point.cpu().numpy(), allow_pickle=False)
        path = self.task.point(self.task.run or Run(Path()), index)
        if self.task.run is None:
            self.send(Point(index, buffer.getvalue()))
        else:
            write_bytes(path, buffer.getvalue(), own_folder=True)
        return f"{path.parent.name}/{path.name}"
