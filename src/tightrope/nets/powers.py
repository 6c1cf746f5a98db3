"""Distances by large finite powers: `(sum_j |x_j - w_j|^p)^(1/p)`, by which distance nets learn.

The largest term M is taken out, `M (sum_j (a_j / M)^p)^(1/p)`, and the gradient is
`sign(x_j - w_j) (a_j / y)^(p - 1)`: nothing is raised to a power that is above 1, and the gradient
has length 1 in the dual norm. Parts of the batch may keep only some of the inputs and rows: what is
left out of a row does not count, and rows that are left out are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.compiling import in_time

LEAST_POWER = 8.0
NUMBERS = 1 << 24  # differences that are held at a time where nothing is compiled
COMPILED = {torch.float32: torch.int32, torch.float64: torch.int64}


class Kept(NamedTuple):
    """Some samples, and the inputs and rows of weights that count for them."""

    samples: Tensor
    inputs: Tensor
    rows: Tensor


def everything(x: Tensor, weight: Tensor) -> list[Kept]:
    """Keep all of it."""
    sizes = len(x), weight.shape[1], len(weight)
    return [Kept(*(torch.arange(size, device=x.device) for size in sizes))]


def powers(x: Tensor, weight: Tensor, power: float, kept: Sequence[Kept] | None = None) -> Tensor:
    """Return the distances of points to rows of weights: [batch, rows], zero where left out."""
    found: Tensor = _Powers.apply(x, weight, power, everything(x, weight) if kept is None else kept)
    return found


def nearest_power(power: float) -> float:
    """Return the nearest of the powers 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...

    They are `2 m 2^k` with m from 4 to 7: a few products make them.
    """
    if math.isinf(power):
        return power
    doublings = max(0, math.floor(math.log2(power / LEAST_POWER)))
    choices = [2.0 * m * 2**doublings for m in (4, 5, 6, 7, 8)]
    return min(choices, key=lambda choice: abs(math.log(choice / power)))


def products(power: float) -> tuple[int, int] | None:
    """Return m and k of a power `2 m 2^k` with m from 4 to 7, if it is one."""
    doublings = max(0, math.floor(math.log2(power / LEAST_POWER)))
    m = power / 2 ** (doublings + 1)
    return (int(m), doublings) if m in (4, 5, 6, 7) else None


class _Powers(torch.autograd.Function):
    """Compiled loops on a CPU, where the power has them; the same formulas elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: float, kept: Sequence[Kept]) -> Tensor:
        way = _Loops if _can_compile(x, weight, power) else _Formulas
        ctx.parts = [way(x.detach(), weight.detach(), power, part) for part in kept]
        ctx.save_for_backward(weight)
        ctx.kept, ctx.size = kept, x.shape
        found = x.new_zeros(len(x), len(weight))
        for part, done in zip(kept, ctx.parts, strict=True):
            found[part.samples[:, None], part.rows] = done.values
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        to_x, to_weight = grads[0].new_zeros(ctx.size), torch.zeros_like(weight)
        for part, done in zip(ctx.kept, ctx.parts, strict=True):
            grad = grads[0][part.samples[:, None], part.rows]
            own = done.gradients(weight.detach(), grad.contiguous(), to_weight)
            to_x[part.samples[:, None], part.inputs] = own
        return to_x, to_weight, None, None


def _can_compile(x: Tensor, weight: Tensor, power: float) -> bool:
    kinds = {(t.device.type, t.dtype) for t in (x, weight)}
    if len(kinds) > 1 or not kinds <= {("cpu", dtype) for dtype in COMPILED}:
        return False
    if not all(bool(t.isfinite().all()) for t in (x, weight)):
        return False
    from tightrope.nets.powers_kernel import farthest, loops

    if math.isinf(power):
        return in_time(farthest)
    found = products(power)
    return found is not None and all(map(in_time, loops(found[1])))


class _Loops:
    """One part of a batch, by compiled loops."""

    def __init__(self, x: Tensor, weight: Tensor, power: float, kept: Kept) -> None:
        from tightrope.nets import powers_kernel as kernel

        points = x[kept.samples[:, None], kept.inputs]
        self.x = F.pad(points, (0, -points.shape[1] % kernel.BLOCK)).contiguous()
        self.kept = kept.inputs.numpy(), kept.rows.numpy()
        self.values = weight.new_empty(len(points), len(kept.rows))
        width, kind = self.x.shape[1], x.dtype
        row, slopes, gaps = torch.zeros(3, width, dtype=kind).unbind()
        tops = torch.zeros(width // kernel.BLOCK + 1, dtype=COMPILED[kind])
        arrays = (row, slopes, gaps, gaps.view(COMPILED[kind]), tops)
        self.room = kernel.Room(*(t.numpy() for t in arrays))
        given = self.x.numpy(), weight.contiguous().numpy(), self.kept
        self.loops: Any = None
        if math.isinf(power):
            self.places = torch.empty(self.values.shape, dtype=torch.int64).numpy()
            kernel.farthest(*given, self.values.numpy(), self.places, self.room)
            return
        found = products(power)
        assert found is not None
        self.m, self.loops = found[0], kernel.loops(found[1])
        self.loops[0](*given, self.m, self.values.numpy(), self.room)

    def gradients(self, weight: Tensor, grad: Tensor, to_weight: Tensor) -> Tensor:
        """Return the gradient of the part's points, and add that of the weights."""
        from tightrope.nets.powers_kernel import point_out

        own = torch.zeros_like(self.x)
        given = self.x.numpy(), weight.contiguous().numpy(), self.kept
        to = own.numpy(), to_weight.numpy()
        if self.loops is None:
            point_out(*given, (self.places, grad.numpy()), to)
        else:
            known = self.values.numpy(), grad.numpy()
            self.loops[1](*given, self.m, known, to, self.room)
        return own[:, : len(self.kept[0])]


class _Formulas:
    """The same in PyTorch, some rows at a time."""

    def __init__(self, x: Tensor, weight: Tensor, power: float, kept: Kept) -> None:
        self.x, self.power, self.kept = x[kept.samples[:, None], kept.inputs], power, kept
        self.size = max(1, NUMBERS // max(1, self.x.numel()))
        parts = [self._distances(rows)[1] for rows in self._rows(weight)]
        self.values = torch.cat(parts, 1)

    def _rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        return weight[self.kept.rows[:, None], self.kept.inputs].split(self.size)

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return differences and distances."""
        gaps = self.x.unsqueeze(1) - rows
        peak = gaps.abs().amax(2)
        if math.isinf(self.power):
            return gaps, peak
        scaled = gaps.abs() / torch.where(peak > 0, peak, 1.0).unsqueeze(2)
        total = scaled.pow(self.power).sum(2)
        return gaps, peak * torch.where(peak > 0, total, 1.0).pow(1 / self.power)

    def _slopes(self, gaps: Tensor, values: Tensor) -> Tensor:
        if math.isinf(self.power):
            place = gaps.abs().argmax(2, keepdim=True)
            return torch.zeros_like(gaps).scatter(2, place, gaps.gather(2, place).sign())
        share = gaps.abs() / torch.where(values > 0, values, 1.0).unsqueeze(2)
        return gaps.sign() * share.pow(self.power - 1)

    def gradients(self, weight: Tensor, grad: Tensor, to_weight: Tensor) -> Tensor:
        """Return the gradient of the part's points, and add that of the weights."""
        own = torch.zeros_like(self.x)
        pieces = (grad.split(self.size, 1), self.values.split(self.size, 1))
        numbers = self.kept.rows.split(self.size)
        for rows, outer, values, at in zip(self._rows(weight), *pieces, numbers, strict=True):
            gaps, _ = self._distances(rows)
            slopes = self._slopes(gaps, values) * outer.unsqueeze(2)
            own += slopes.sum(1)
            index = at[:, None], self.kept.inputs
            to_weight.index_put_(index, -slopes.sum(0), accumulate=True)
        return own
