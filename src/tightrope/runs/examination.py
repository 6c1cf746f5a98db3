"""Which samples to look at, for attacking and certifying a run."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.data import Dataset as Dataset
from tightrope.data import load_dataset, read_test_samples
from tightrope.devices import pick_device, upload
from tightrope.errors import UserError, shorten
from tightrope.radius import Radius, parse_radius
from tightrope.runs import Run

MOST_STEPS = 1_000_000  # of an attack, and as many restarts
MOST_SEEDS = 2**63


@dataclass(frozen=True)
class Examination:
    """A trained network and the test samples to examine it on."""

    module: nn.Module
    input_shape: tuple[int, ...]
    eps: Fraction
    indices: Tensor
    data: Dataset
    device: torch.device

    def batch(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices, inputs and labels of the samples at those positions."""
        indices = self.indices[start:stop]
        inputs, labels = self.data.test_inputs(indices), self.data.y_test[indices]
        return indices, upload(inputs, self.device), upload(labels, self.device)


def load_data(name: str, folder: str | None) -> Dataset:
    """Load the data set that settings name."""
    return load_dataset(name, None if folder is None else Path(folder))


def load_samples(name: str, shape: Any) -> Dataset:
    """Load the test samples of a network that was trained elsewhere, for inputs of a shape."""
    listed = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    return read_test_samples(Path(name), tuple(shape) if listed else None, in_pixels=True)


def check_seed(seed: int) -> None:
    """Refuse a seed that is none of torch's."""
    if not 0 <= seed < MOST_SEEDS:
        raise UserError(f"seed must lie in [0, 2^63), got {shorten(seed)}")


def batch_seed(seed: int, first_index: int) -> int:
    """Return the seed of the batch that begins with a sample."""
    return (seed * 1_000_003 + first_index) % 2**63


def check_attack(steps: int, restarts: int, seed: int) -> None:
    """Refuse attack settings that make no sense."""
    for name, count in (("steps", steps), ("restarts", restarts)):
        if not 1 <= count <= MOST_STEPS:
            raise UserError(f"{name} must lie in [1, {MOST_STEPS}], got {shorten(count)}")
    check_seed(seed)


def choose_samples(dataset: Dataset, samples: int | None, start: int = 0) -> Tensor:
    """Return the indices of `samples` test samples from `start` on, of all of them if None."""
    for name, given in (("samples", samples), ("start", start)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
            raise UserError(f"{name} must be a whole number, got {shorten(given)}")
    available = len(dataset.x_test)
    if not 0 <= start < available:
        raise UserError(f"start must lie in [0, {available}), got {shorten(start)}")
    count = available - start if samples is None else samples
    if not 1 <= count <= available - start:
        raise UserError(
            f"samples must lie in [1, {available - start}] when starting at {start}, got "
            f"{shorten(samples)}"
        )
    return torch.arange(start, start + count)


def proving_device(device: torch.device) -> torch.device:
    """Return where proofs are computed: they need float64, which MPS does not have."""
    return torch.device("cpu") if device.type == "mps" else device


def examine(
    run: Run,
    eps: Radius | None,
    samples: int | None,
    start: int,
    device: str | None,
    largest: int | None = 1,
) -> Examination:
    """Load a run's network and choose test samples `start` to `start + samples`.

    The radius may be as large as the `largest` that makes sense, if there is one.
    """
    settings = run.settings()
    radius = settings.eps if eps is None else parse_radius(eps, largest=largest)
    module, architecture = run.network()
    dataset = load_data(settings.data, settings.data_dir)
    if dataset.input_shape != architecture.input_shape or (
        dataset.num_classes != architecture.num_classes
    ):
        raise UserError(
            f"the network in {run.folder} takes {architecture.input_shape} and "
            f"{architecture.num_classes} classes, {dataset.name} has {dataset.input_shape} and "
            f"{dataset.num_classes}: the run folder belongs to another network or data set"
        )
    indices = choose_samples(dataset, samples, start)
    target = proving_device(pick_device(device or settings.device))
    return Examination(
        module.to(target), architecture.input_shape, radius, indices, dataset, target
    )
