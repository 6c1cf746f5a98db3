"""What a piece of code asks of a device: kernels, multiply-adds and bytes, by place and kind.

Everything is computed on the CPU, along the ways of a GPU (`as_on_a_gpu`). Bytes are those of all
arguments and results of a kernel: what would go to and from the card's memory if nothing stayed in
a cache. Views and allocations are no kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tightrope import devices
from tightrope.attacks import few_launches, latent

NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"),
    *("_reshape_alias", "lift_fresh", "detach", "alias", "set_", "resize_", "_local_scalar_dense"),
}
CARD = 12 << 30  # bytes that a latent attack may use at a time
Key = tuple[str, str]  # a place in the code, and the kind of kernel


@dataclass
class Bill:
    """Kernels, floating-point operations and bytes for each place and kind."""

    lines: dict[Key, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, key: Key, ops: float, flops: float, size: float) -> None:
        """Put one more on it."""
        a, b, c = self.lines.get(key, (0.0, 0.0, 0.0))
        self.lines[key] = (a + ops, b + flops, c + size)

    @property
    def total(self) -> tuple[float, float, float]:
        """Kernels, operations and bytes in all."""
        ops, flops, size = (sum(line[i] for line in self.lines.values()) for i in range(3))
        return ops, flops, size


def combined(*weighted: tuple[float, Bill]) -> Bill:
    """Return a sum of bills with weights: what is linear is known from two cases."""
    found = Bill()
    for weight, bill in weighted:
        for key, (ops, flops, size) in bill.lines.items():
            found.add(key, weight * ops, weight * flops, weight * size)
    return found


class Counter(TorchDispatchMode):
    """Writes the bill of whatever runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bill = Bill()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if name in NO_KERNEL or views:
            return out
        tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count is not None else 0
        self.bill.add((place(), name), 1, flops, sum(t.nbytes for t in tensors.values()))
        return out


def place() -> str:
    """Return the function of the package that is being run."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if "/tightrope/" in code.co_filename:
            return f"{code.co_filename.rpartition('/tightrope/')[2]} {code.co_name}"
        frame = frame.f_back
    return "PyTorch"


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let the CPU take the ways of a GPU, and no estimator of a latent attack be left out."""
    before = devices.IMMEDIATE, few_launches.WORTHWHILE, latent.MEMORY
    devices.IMMEDIATE, few_launches.WORTHWHILE = (), -1.0  # type: ignore[assignment]
    latent.MEMORY = CARD
    try:
        yield
    finally:
        devices.IMMEDIATE, few_launches.WORTHWHILE, latent.MEMORY = before


def counted(call: Any) -> Bill:
    """Return the bill of a call."""
    with Counter() as counter:
        call()
    return counter.bill
