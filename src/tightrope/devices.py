"""Choosing the device to compute on."""

from __future__ import annotations

import torch

from tightrope.errors import UserError

# Devices that compute while they are asked to. On the others each operation is a launch, which
# takes as long as much computing, and reading a number means to wait for all launches before it.
IMMEDIATE = ("cpu",)


def launches(tensor: torch.Tensor) -> bool:
    """Return whether operations on a tensor are launched, so that the fewest are the fastest."""
    return tensor.device.type not in IMMEDIATE


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
