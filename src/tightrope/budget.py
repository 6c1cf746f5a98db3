"""How much may be held at once, and how much may be computed between two looks at the clock.

Whatever is computed for many rows, samples or subproblems is computed for as many at a time as fit
into the memory budget: half of what is free, of the machine or of the container that this runs in,
or what `TIGHTROPE_LIMIT_MEMORY_BYTES` says; on CUDA half of what is free on the card. Parts are no
larger than is of use, so that results depend on the budget only where memory is scarce.

An operation of torch cannot be interrupted: parts are small enough to see a deadline in time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from tightrope.allocation import kept_memory
from tightrope.errors import UserError
from tightrope.limits import MEMORY_BYTES

# Parts of the budget that several computations, and what they hold for later, can take at a time.
PARTS = 4
LARGEST_PART = 1 << 40  # bytes of a part on a GPU: what is free there is less
# Multiply-adds between two looks at the clock: a fraction of a second on one core.
STEP = 1 << 30
# What a command can do about a device that is too small for it.
TRAINING_ADVICE = (
    "train over with a larger accumulate (the same gradients in less memory) or a smaller "
    "batch_size, or continue with --resume on another --device"
)
PROVING_ADVICE = (
    f"set {MEMORY_BYTES.variable} to less, run fewer jobs at a time, or give another --device"
)
TOO_LITTLE = "the device has too little memory"
# Seconds until what is free is looked up again.
AGAIN = 0.5
# Where nothing is known of the machine.
ASSUMED = 1 << 32

_SYSTEM = Path("/")


def memory_budget(device: torch.device) -> int:
    """Return how many bytes may be used on a device: the user's word, or half of what is free."""
    if MEMORY_BYTES.variable in os.environ:
        return MEMORY_BYTES.value
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch keeps for later is free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + kept) // 2
    return _free_in(int(time.monotonic() / AGAIN), free_for_us) // 2


@lru_cache(maxsize=1)
def _free_in(moment: int, look: Callable[[], int]) -> int:
    """Return what is free in a moment; looking takes as long as the bounds of a small layer."""
    return look()


def fitting(most: int, device: torch.device) -> int:
    """Return how many bytes one part may take: `most`, or less where the budget is small."""
    return max(1, min(most, memory_budget(device) // PARTS))


@contextmanager
def explaining_memory(advice: str) -> Iterator[None]:
    """Say what to change where a device has too little memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{TOO_LITTLE}{_said(error)}; {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out, of a GPU or of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _said(error: BaseException) -> str:
    """Return the first sentence of an error, in brackets; the others are about PyTorch."""
    lines = str(error).splitlines()
    return f" ({lines[0].split('. ')[0]})" if lines else ""


def rows_at_once(memory: int, row_bytes: int, row_work: float = 0.0) -> int:
    """Return how many rows to compute at a time, given what each takes in bytes and products."""
    return max(1, min(memory // max(1, row_bytes), int(STEP / max(row_work, 1.0))))


def free_for_us() -> int:
    """Return what is free, and what this process keeps for later."""
    return free_memory() + kept_memory()


def free_memory(system: Path = _SYSTEM) -> int:
    """Return the bytes that are free for this process, of the machine and of its containers."""
    return min((*_machine(system), *_containers(system)), default=ASSUMED)


def _machine(system: Path) -> Iterator[int]:
    for line in _lines(system / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10
            return
    try:
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return


def _containers(system: Path) -> Iterator[int]:
    """Yield what is left of the limits of this process's control groups, of both versions."""
    root = system / "sys/fs/cgroup"
    for line in _lines(system / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if not kinds:
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.strip("/")
        # A limit of a group holds for all groups in it; in a container the root is its own group.
        for folder in (group, *group.parents):
            if folder == base or base in folder.parents:
                yield from _left(folder, *names)


def _left(folder: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    numbers = [_number(folder / name) for name in (limit, used)]
    if numbers[0] is None or numbers[1] is None:
        return
    # Files that nobody needs are given up when memory is short.
    kept = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
    yield max(0, numbers[0] - numbers[1] + int(kept.get(cache, 0)))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
