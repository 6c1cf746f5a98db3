"""Whether this process is one of several that train one network, as `torchrun` starts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tightrope.errors import UserError

_TOLD_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process among the others: its number among all, how many there are, its machine's."""

    rank: int
    size: int
    local: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return where this process stands among several; None if it is alone."""
    if not all(environment.get(name) for name in _TOLD_BY):
        return None
    numbers = {name: environment.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    for name, text in numbers.items():
        if not (text.isascii() and text.isdigit()):
            raise UserError(f"{name} must be a number, found {text[:60]!r}; torchrun sets it")
    rank, size, local = (int(text) for text in numbers.values())
    if rank >= size:
        raise UserError(f"RANK {rank} must be below WORLD_SIZE {size}; torchrun sets both")
    return Place(rank, size, local) if size > 1 else None


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the one that writes and tells."""
    found = place(environment)
    return found is None or found.rank == 0


def speaks(error: BaseException, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the one to tell an error.

    Processes that have met agree on one (`told_here`); before, one of each machine does. Click
    makes another error of Ctrl-C.
    """
    for one in (error, error.__cause__):
        told_here: bool | None = getattr(one, "told_here", None)
        if told_here is not None:
            return told_here
    return "WORLD_SIZE" not in environment or environment.get("LOCAL_RANK", "0") == "0"
