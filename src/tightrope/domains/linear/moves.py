"""Linear bounds of operations that move numbers of a map, or average them: one rule for each.

Windows stay windows where the numbers that they see stay together; otherwise rows become dense.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightrope.domains.linear.coefficients import Coefficients, Windows
from tightrope.graph import ops
from tightrope.graph.evaluate import RULES as POINT_RULES

if TYPE_CHECKING:
    from tightrope.domains.linear.rules import Pass


def cut(op: ops.Slice, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """A part of a map: windows begin elsewhere, and see nothing of the other channels."""
    shape = _shape_before(i, state)
    if not isinstance(a, Windows) or len(shape) != 3:
        return _affine(op, a, i, state)
    index = (*op.index, *(slice(None),) * (3 - len(op.index)))
    if any(isinstance(part, int) or part.step not in (None, 1) for part in index):
        return _affine(op, a, i, state)
    (channel, top, left) = (
        part.indices(size)[0]
        for part, size in zip(index, shape, strict=True)
        if isinstance(part, slice)
    )
    moved = a.moved((top, left), (shape[1], shape[2]))
    values = _blank(a, shape[0], (a.values.shape[2], a.values.shape[3]))
    values[:, channel : channel + a.values.shape[1]] = moved.values
    return (moved.like(values),)


def pad(op: ops.Pad, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """A frame of constants: windows that reach into it see nothing there."""
    shape = _shape_before(i, state)
    left, _, top, _, front, back = (*op.pads, *(0,) * (6 - len(op.pads)))
    if not isinstance(a, Windows) or min(front, back) < 0:
        return _affine(op, a, i, state)
    if op.value:
        nothing = a.values.new_zeros(1, *shape)
        state.add(a, POINT_RULES[ops.Pad](op, nothing))
    inner = a.like(a.values[:, front : front + shape[0]])
    assert isinstance(inner, Windows)
    return (inner.moved((-top, -left), (shape[1], shape[2])),)


def concatenate(op: ops.Concat, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """Several maps: of their channels, each row has its part for each."""
    if not isinstance(a, Windows) or op.dim % (a.values.dim()) != 1:
        return _affine(op, a, i, state)
    nodes = state.graph.nodes
    channels = [nodes[j].shape[0] for j in nodes[i].inputs]
    return tuple(a.like(part) for part in a.values.split(channels, 1))


def average(op: ops.AvgPool, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """Average pooling: each number of a window counts alike."""
    if (
        not isinstance(a, Windows)
        or op.ceil_mode
        or not (op.count_include_pad or op.padding == (0, 0))
    ):
        return _affine(op, a, i, state)
    taps = op.kernel[0] * op.kernel[1]
    state.charge(a, i, taps + 2)
    shape = _shape_before(i, state)
    (down, right), (height, width) = op.stride, op.kernel
    rows, columns = a.values.shape[2:]
    high, wide = (rows - 1) * down + 1, (columns - 1) * right + 1
    whole = _blank(a, a.values.shape[1], (high + height - 1, wide + width - 1))
    share = a.values / taps
    for y in range(height):
        for x in range(width):
            whole[:, :, y : y + high : down, x : x + wide : right] += share
    top, left = op.padding
    origin = a.origin * a.origin.new_tensor(op.stride)
    return (replace(a, values=whole, origin=origin).moved((-top, -left), (shape[1], shape[2])),)


def _blank(a: Windows, channels: int, size: tuple[int, int]) -> Tensor:
    """Return windows with nothing in them, in the order of memory that windows have."""
    return a.values.new_zeros(len(a.values), *size, channels).permute(0, 3, 1, 2)


def _affine(op: ops.Op, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """Any affine operation, on dense rows: its transpose is what autograd computes."""
    dense = a.dense()
    node = state.graph.nodes[i]
    with torch.enable_grad():
        inputs = [
            dense.values.new_zeros(len(dense.values), *state.graph.nodes[j].shape).requires_grad_()
            for j in node.inputs
        ]
        outputs = POINT_RULES[type(op)](op, *inputs)
        # Of a sum: with vectors given, torch would load its symbolic algebra first.
        gradients = torch.autograd.grad((outputs * dense.values).sum(), inputs)
    if isinstance(op, ops.Pad) and op.value:
        state.add(dense, outputs[:1].detach())
    if isinstance(op, ops.AvgPool):
        state.charge(dense, i, op.kernel[0] * op.kernel[1])
    return tuple(dense.like(g) for g in gradients)


def _shape_before(i: int, state: Pass) -> tuple[int, ...]:
    return state.graph.nodes[state.graph.nodes[i].inputs[0]].shape
