"""Functions that are constant but for jumps: comparisons with zero, rounding, choices, places.

What rounding does to them is all or nothing: near a jump, either side is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.rounding import Rounded

Values = Callable[[Tensor], Tensor]

# Those that never decrease.
RISING: dict[str, Values] = {
    "positive": lambda x: (x > 0).to(x.dtype),
    "nonnegative": lambda x: (x >= 0).to(x.dtype),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,  # halves to even numbers
    "trunc": torch.trunc,
}
STEPS: dict[str, Values] = {**RISING, "zero": lambda x: (x == 0).to(x.dtype)}


SIGNS = ("positive", "nonnegative")  # tests of a sign


def tests_a_sign(op: ops.Op) -> bool:
    """Return whether an operation tests the sign of what it reads."""
    return isinstance(op, ops.Step) and op.kind in SIGNS


class _Stepping(torch.autograd.Function):
    """A step function whose gradient is one that attacks can follow: that of a smoother step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        return STEPS[kind](x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        near = grads[0] / (1 + x.abs()) ** 2
        if ctx.kind == "zero":
            return -near * x.sign(), None
        return (near if ctx.kind in SIGNS else grads[0]), None


def step(op: ops.Step, x: Tensor) -> Tensor:
    """Return the value of a step function at each number."""
    if x.requires_grad:
        found: Tensor = _Stepping.apply(x, op.kind)
        return found
    return STEPS[op.kind](x)


def image(op: ops.Step, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of a step function between two numbers."""
    if op.kind in RISING:
        return step(op, lower), step(op, upper)
    only = (lower == 0) & (upper == 0)
    inside = (lower <= 0) & (upper >= 0)
    return only.to(lower.dtype), inside.to(lower.dtype)


def chosen(op: ops.Where, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return numbers of the first value where the condition is not zero, else of the second."""
    return torch.where(condition != 0, a, b)


def place_of_largest(op: ops.ArgMax, x: Tensor) -> Tensor:
    """Return the place of the largest number along the last dimension: the first or the last.

    The gradient is that of the mean place, weighted by softmax.
    """
    if not op.last:
        found = x.argmax(-1).to(x.dtype)
    else:
        found = (x.shape[-1] - 1 - x.flip(-1).argmax(-1)).to(x.dtype)
    if not x.requires_grad:
        return found
    mean = x.softmax(-1) @ torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    return found + (mean - mean.detach())


def possible_places(op: ops.ArgMax, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last place that can hold the largest number.

    A number is not the largest if a lower bound of another one exceeds its upper bound.
    """
    possible = upper >= lower.amax(-1, keepdim=True)
    # Where one that is not smaller comes first (or last), the tie is decided.
    best = place_of_largest(op, lower.detach()).long().unsqueeze(-1)
    places = torch.arange(lower.shape[-1], device=lower.device)
    tied = upper <= lower.gather(-1, best)
    loses = tied & ((places < best) if op.last else (places > best))
    possible = possible & ~loses
    first = possible.to(lower.dtype).argmax(-1)
    last = lower.shape[-1] - 1 - possible.flip(-1).to(lower.dtype).argmax(-1)
    return first.to(lower.dtype), last.to(lower.dtype)


# --- what rounding does to them ---------------------------------------------------------------


def _ends(x: Rounded) -> tuple[Tensor, Tensor]:
    info = torch.finfo(x.value.dtype)
    error = torch.where(x.error > 0, x.error * (1 + 8 * info.eps) + info.tiny, 0.0)
    size = x.value.abs() * info.eps * (x.error > 0)  # of the sums
    return x.value - error - size, x.value + error + size


def _around(value: Tensor, low: Tensor, high: Tensor) -> Rounded:
    return Rounded(value, torch.maximum(high - value, value - low).nan_to_num(nan=torch.inf))


def rounded_step(rule: Any, op: ops.Step, x: Rounded) -> Rounded:
    """Either side of a jump that rounding may cross."""
    return _around(rule(op, x.value), *image(op, *_ends(x)))


def rounded_choice(rule: Any, op: ops.Where, c: Rounded, a: Rounded, b: Rounded) -> Rounded:
    """Either value where the condition is not known."""
    value = rule(op, c.value, a.value, b.value)
    error = torch.where(c.value != 0, a.error, b.error)
    open_ones = (c.error > 0) & (c.value.abs() <= c.error)
    apart = (a.value - b.value).abs() * (1 + 8 * torch.finfo(value.dtype).eps)
    either = apart + a.error + b.error
    return Rounded(value, torch.where(open_ones, either * (1 + 1e-6), error))


def rounded_place(rule: Any, op: ops.ArgMax, x: Rounded) -> Rounded:
    """Any place that may be the one."""
    return _around(rule(op, x.value), *possible_places(op, *_ends(x)))
