"""Deciding batches of samples, in whatever process."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tightrope.certification.cascade import Samples, decide
from tightrope.certification.problem import CHOICES, Choices
from tightrope.certification.properties import PIXELS, Domain
from tightrope.certification.stages import STAGES, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.files import write_bytes
from tightrope.graph import Graph
from tightrope.nets.onnx.importing import read_onnx
from tightrope.parallel import Send
from tightrope.radius import format_radius
from tightrope.runs import Run


@dataclass(frozen=True)
class Batch:
    """Samples to decide together."""

    indices: np.ndarray
    x: np.ndarray
    labels: np.ndarray
    known: frozenset[int] = frozenset()  # samples that have a record already

    def __str__(self) -> str:
        return f"samples {self.indices[0]} to {self.indices[-1]}"


@dataclass(frozen=True)
class Task:
    """What a process must know to decide batches of a run.

    The folder's `own` radius is not named by its records; inputs have the values of `domain`, and
    the radius is one of `norm`.
    """

    run: Run
    module: nn.Module | Graph | Path
    input_shape: tuple[int, ...]
    eps: Fraction
    settings: dict[str, Any]
    device: torch.device
    own: bool = True
    domain: Domain = PIXELS
    norm: float = math.inf


def open_subject(
    network: nn.Module | Graph | Path, input_shape: tuple[int, ...], device: torch.device
) -> Subject:
    """Return the network under examination: a module, a graph, or what is in an ONNX file."""
    if isinstance(network, nn.Module):
        return Subject.of(network, input_shape)
    if isinstance(network, Graph):
        return Subject(network, network)
    read = read_onnx(network)
    return Subject(read.graph.to(device), read.run)


class Decider:
    """Decides batches in the process that it lives in."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.subject = open_subject(task.module, task.input_shape, task.device).for_order()
        self.stages = {name: STAGES[name] for name in task.settings["stages"]}
        chosen = {name: task.settings[name] for name in ("steps", "restarts", "timeout")}
        choices = {name: v for name, v in task.settings.items() if name in vars(CHOICES)}
        self.settings = StageSettings(**chosen, choices=Choices(**choices))

    def __call__(self, batch: Batch, send: Send) -> None:
        """Send a record per sample, as each is decided."""
        indices, x, labels = map(torch.from_numpy, (batch.indices, batch.x, batch.labels))
        task, device = self.task, self.task.device
        balls = (task.eps, task.domain, task.norm)
        for record in decide(
            self.subject,
            Samples(indices, x.to(device), labels.to(device), *balls),
            stages=self.stages,
            settings=self.settings,
            keep=self._keep,
            known=batch.known,
            seed=task.settings["seed"],
        ):
            send(record if task.own else replace(record, eps=format_radius(task.eps)))

    def _keep(self, index: int, point: Tensor) -> str:
        """Store a counterexample and return its name relative to the run folder."""
        buffer = io.BytesIO()
        np.save(buffer, point.cpu().numpy(), allow_pickle=False)
        eps = None if self.task.own else format_radius(self.task.eps)
        path = self.task.run.counterexample(index, eps)
        write_bytes(path, buffer.getvalue(), own_folder=True)
        return f"{path.parent.name}/{path.name}"
