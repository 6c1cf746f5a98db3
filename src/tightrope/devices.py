"""Choosing the device to compute on, and what is particular to devices other than the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tightrope.errors import UserError

# Devices that compute while they are asked to. On the others each operation is a launch, which
# takes as long as much computing, and reading a number means to wait for all launches before it.
IMMEDIATE = ("cpu",)


def launches(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are launched, so that the fewest are the fastest."""
    return launches_on(tensor.device)


def launches_on(device: torch.device) -> bool:
    """Return whether operations on a device are launched."""
    return device.type not in IMMEDIATE


def pick_device(name: str) -> torch.device:
    """Return the named device; `auto` takes a CUDA GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy to a GPU is not waited for."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Leave the random numbers of the CPU and of the device as if this block had drawn none."""
    kind = "cuda" if device.type == "cpu" else device.type
    own = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices=own, device_type=kind):
        yield


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let PyTorch use only algorithms that always give the same result, if that is wanted."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is refused
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
