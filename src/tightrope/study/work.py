"""Carrying out one plan: train, certify, and measure what the experiments want to know."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tightrope.certification.certifying import certify
from tightrope.certification.smoothing.smoothing import smooth
from tightrope.devices import pick_device
from tightrope.errors import UserError
from tightrope.files import open_to_append
from tightrope.parallel import Send
from tightrope.runs import Run
from tightrope.runs.examination import proving_device
from tightrope.study import remaining
from tightrope.study.margins import estimate_margins, exact_margins, measure_splits
from tightrope.study.plans import Plan
from tightrope.training.training import train

# Says how far a part has come: part, done, total.
Watch = Callable[[str, int, int], None]


def carry_out(
    plan: Plan, folder: Path, *, threads: int = 1, wait: bool = False, watch: Watch
) -> None:
    """Do what is left of a plan; everything goes on where it was interrupted.

    With `wait`, a run folder that somebody else is working on is waited for.
    """
    run = Run(folder)
    queue = (lambda reason: watch("waiting", 0, 1)) if wait else False
    if "train" in remaining.unfinished(plan, folder):
        train(
            out=folder,
            preset=plan.preset,
            resume=run.config.exists(),
            wait=queue,
            progress=_Epochs(int(plan.wanted().get("epochs", 70)), watch),
            **{**plan.settings, **_teacher(plan, run), "seed": plan.seed},
        )
    if "smooth" in remaining.unfinished(plan, folder):
        progress = partial(watch, "smooth")
        smooth(run, **plan.smooth, wait=queue, progress=progress)
    if "certify" in remaining.unfinished(plan, folder):
        certify(
            run,
            jobs=_workers(run, threads),
            **plan.certify,
            wait=queue,
            progress=lambda s: watch("certify", s.samples - s.open, s.samples),
        )
    if not remaining.unfinished(plan, folder):
        return
    with run.lock("reproduce", queue):
        todo = remaining.unfinished(plan, folder)  # who had the lock may have done it
        if "estimate" in todo:
            options = remaining.estimate_settings(plan)
            estimate_margins(run, options, lambda *counts: watch("estimate", *counts))
        if "exact" in todo:
            counts = plan.exact["samples"], plan.exact["milp"]
            options = remaining.exact_settings(plan)
            exact_margins(run, options, *counts, lambda *done: watch("exact", *done))
        if "splits" in todo:
            options = remaining.split_settings(plan)
            measure_splits(run, options, lambda *counts: watch("splits", *counts))


def _workers(run: Run, threads: int) -> int:
    """Return how many processes certify a run: a GPU is for one, unless others were asked for."""
    device = proving_device(pick_device(run.settings().device))
    return threads if device.type == "cpu" else 1


def _teacher(plan: Plan, run: Run) -> dict[str, str]:
    """Return the setting that names a run's teacher, which lies beside it."""
    if plan.teacher is None or run.config.exists():
        return {}
    folder = run.folder.parent / plan.teacher
    if not folder.exists():
        raise UserError(
            f"{plan.teacher}, which it learns from, is not on this machine: make it here"
        )
    return {"teacher": str(folder)}


class _Epochs:
    """Counts the epochs of a training."""

    def __init__(self, epochs: int, watch: Watch) -> None:
        self.epochs, self.watch = epochs, watch

    def step(self, epoch: int, iteration: int, result: Any, radius: float) -> None:
        """Do nothing: once per epoch is enough."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Report an epoch."""
        self.watch("train", record["epoch"] + 1, self.epochs)


class Worker:
    """Carries out plans in a process that has nothing else to do."""

    def __init__(self, folder: Path, wait: bool) -> None:
        self.folder, self.wait = folder, wait

    def __call__(self, plan: Plan, send: Send) -> None:
        """Carry out a plan; send how far each part has come."""
        log = log_file(self.folder, plan)
        log.parent.mkdir(parents=True, exist_ok=True)
        _print_to(log)
        try:
            carry_out(
                plan,
                self.folder / "runs" / plan.name,
                threads=torch.get_num_threads(),
                wait=self.wait,
                watch=lambda *counts: send(counts),
            )
        except UserError:
            raise
        except Exception:
            traceback.print_exc()
            raise


def carry_out_afar(plan: Plan, folder: Path, send: Send) -> None:
    """Carry out a plan on a machine of a cluster, which keeps logs itself."""
    carry_out(plan, folder, watch=lambda *counts: send(counts))


def log_file(folder: Path, plan: Plan) -> Path:
    """Return the file for whatever is printed while a run is made."""
    return folder / "logs" / f"{plan.name}.log"


def _print_to(log: Path) -> None:
    """Let whatever this process prints from now on, libraries included, go to a file."""
    with open_to_append(log, own_folder=True) as file:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by whoever started the command
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
