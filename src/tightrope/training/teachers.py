"""The teacher of a training that distils: the network of another run, frozen."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn

from tightrope.errors import UserError
from tightrope.graph import Graph, trace
from tightrope.nets import Architecture
from tightrope.runs import Run
from tightrope.training.settings import Settings


def load_teacher(
    settings: Settings, architecture: Architecture
) -> tuple[Settings, nn.Module | None]:
    """Return the network of the run that `teacher` names, and the settings with its fingerprint.

    Refuses a teacher where none is asked for or none is given, one of another architecture, and
    other weights than those of the fingerprint: a training must not continue with another teacher.
    """
    learns = settings.method_class.needs_teacher or settings.initialization == "teacher"
    if settings.teacher is None:
        if learns:
            raise UserError(
                f"{_reason(settings)} needs a teacher: train one, for instance by tightrope train "
                "--preset laptop/mnist-0.1-cnn3-pgd --out runs/teacher; then set teacher to it"
            )
        return settings, None
    if not learns:
        raise UserError(f"method {settings.method!r} learns from no teacher: leave out teacher")
    run = Run(Path(settings.teacher))
    module, found = run.network()
    names = (field.name for field in fields(Architecture))
    others = [name for name in names if getattr(found, name) != getattr(architecture, name)]
    if others:
        raise UserError(
            f"the teacher in {run.folder} must have the architecture of its student, but differs "
            f"in {', '.join(others).replace('_', ' ')}"
        )
    weights = run.fingerprints()["weights"]
    if settings.teacher_weights not in (None, weights):
        raise UserError(
            f"the teacher in {run.folder} is not the one that this run began with: its weights are "
            f"{weights}, not {settings.teacher_weights}; bring that one back, or start over"
        )
    return replace(settings, teacher_weights=weights), module


def frozen_teacher(module: nn.Module, input_shape: tuple[int, ...], device: torch.device) -> Graph:
    """Return a network as a constant: running statistics folded in, no gradients."""
    placed: nn.Module = module.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return trace(placed, input_shape).fold_batchnorm().detach()


def _reason(settings: Settings) -> str:
    by_method = settings.method_class.needs_teacher
    return f"method {settings.method!r}" if by_method else "initialization = teacher"
