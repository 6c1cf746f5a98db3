"""Converters of functions with jumps: comparisons, logic, choices, rounding, places of maxima."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import composed, ops
from tightrope.graph.trace import constants
from tightrope.graph.trace.elementwise import combined, constant
from tightrope.graph.values import Composed, Value, apply, refuse

# Types of numbers that floating-point numbers stand for in the graph.
WHOLE = (torch.bool, torch.int32, torch.int64)


def _step(kind: str) -> Callable[..., Any]:
    return lambda x: apply(x, ops.Step(kind))


def _round(x: Value, *, decimals: int = 0) -> Any:
    refuse(decimals != 0, "decimals")
    return apply(x, ops.Step("round"))


def _sign(x: Value) -> Any:
    def build(make: Any) -> int:
        above = make.append(ops.Step("positive"), x.position)
        below = make.append(ops.Step("positive"), composed.negated(make, x.position))
        return int(make.append(ops.Sub(), above, below))

    return Composed(build)


def _compared(kind: str, *, turned: bool = False, negated: bool = False) -> Callable[..., Any]:
    """Return a comparison: what it asks of `a - b`, or of `b - a`, or that this is not so."""

    def convert(a: Any, b: Any) -> Any:
        flipped = turned
        if not isinstance(a, Value):
            a, b, flipped = b, a, not turned

        def of_nodes(make: Any, i: int, j: int) -> int:
            return int(make.append(ops.Sub(), *((j, i) if flipped else (i, j))))

        def of_constant(make: Any, i: int, c: Tensor) -> int:
            gap = make.append(ops.Shift(c, subtract=True), i)
            return composed.negated(make, gap) if flipped else int(gap)

        def build(make: Any) -> int:
            gap = combined(make, a.position, b, of_nodes, of_constant)
            found = make.append(ops.Step(kind), gap)
            return composed.opposite(make, found) if negated else int(found)

        return Composed(build)

    return convert


def _not(x: Value) -> Any:
    return Composed(lambda make: composed.opposite(make, x.position))


def _logic(of_nodes: Any) -> Callable[..., Any]:
    def convert(a: Any, b: Any) -> Any:
        both = isinstance(a, Value) and isinstance(b, Value) and a.shape == b.shape
        refuse(not both, "logic with a constant")
        return Composed(lambda make: of_nodes(make, a.position, b.position))

    return convert


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Value):
        return constants.chosen(condition, a, b)
    given = (condition, a, b)
    values = [g for g in given if isinstance(g, Value)]
    ranks = {len(value.shape) for value in values}
    refuse(len(ranks) != 1, "a choice between samples of different ranks")
    shapes = [g.shape if isinstance(g, Value) else _sample(g, ranks) for g in given]
    shape = tuple(torch.broadcast_shapes(*shapes))
    refuse(len(shape) not in ranks, f"a choice of shape {shape}")
    anchor = values[0]

    def build(make: Any) -> int:
        return int(make.append(ops.Where(), *(_filled(make, g, anchor, shape) for g in given)))

    return Composed(build)


def _sample(given: Any, ranks: set[int]) -> tuple[int, ...]:
    """Return the shape of a constant without a batch of one."""
    shape = tuple(constant(given).shape)
    return shape[1:] if len(shape) - 1 in ranks and shape[0] == 1 else shape


def _filled(make: Any, given: Any, anchor: Value, shape: tuple[int, ...]) -> int:
    """Return a node that holds a value or, as zero times another one and it, a constant."""
    if isinstance(given, Value):
        return composed.expanded(make, given.position, shape)
    start = composed.expanded(make, anchor.position, shape)
    zeros = make.append(ops.Scale(make.number(0.0)), start)
    return int(make.append(ops.Shift(constant(given)), zeros))


def _place(x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
    refuse(dim is None, "the place in all samples")
    assert dim is not None
    axis = dim % (len(x.shape) + 1) - 1
    refuse(axis < 0, "a place in the batch")
    order = [*(i for i in range(len(x.shape)) if i != axis), axis]
    rest = tuple(x.shape[i] for i in order[:-1])
    kept = tuple(1 if i == axis else size for i, size in enumerate(x.shape))

    def build(make: Any) -> int:
        position = make.append(ops.Permute((0, *(i + 1 for i in order))), x.position)
        position = make.append(ops.ArgMax(), position)
        return int(make.append(ops.Reshape(kept if keepdim else rest), position))

    return Composed(build)


def to(x: Value, *target: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Convert to whole numbers; that other types stay the same is checked for every operator."""
    kind = dtype or next((t for t in target if isinstance(t, torch.dtype)), None)
    if kind == torch.bool:
        return Composed(
            lambda make: composed.opposite(make, make.append(ops.Step("zero"), x.position))
        )
    return apply(x, ops.Step("trunc")) if kind in WHOLE else x


def _hardshrink(x: Value, width: float = 0.5) -> Any:
    """The number itself where its size exceeds the width, else zero."""

    def build(make: Any) -> int:
        size = composed.absolute(make, x.position)
        beyond = make.append(ops.Shift(constant(width), subtract=True), size)
        condition = make.append(ops.Step("positive"), beyond)
        return int(make.append(ops.Where(), condition, x.position, _filled(make, 0.0, x, x.shape)))

    return Composed(build)


def _threshold(x: Value, threshold: float, value: float) -> Any:
    """The number itself above a threshold, else a value; without a jump if both are the same."""
    refuse(not (math.isfinite(threshold) and math.isfinite(value)), "an infinite threshold")
    if threshold == value:
        return Composed(lambda make: composed.at_least(make, x.position, constant(value)))

    def build(make: Any) -> int:
        gap = make.append(ops.Shift(constant(threshold), subtract=True), x.position)
        condition = make.append(ops.Step("positive"), gap)
        other = _filled(make, value, x, x.shape)
        return int(make.append(ops.Where(), condition, x.position, other))

    return Composed(build)


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.floor: _step("floor"),
    aten.ceil: _step("ceil"),
    aten.trunc: _step("trunc"),
    aten.fix: _step("trunc"),
    aten.round: _round,
    aten.sign: _sign,
    aten.gt: _compared("positive"),
    aten.ge: _compared("nonnegative"),
    aten.lt: _compared("positive", turned=True),
    aten.le: _compared("nonnegative", turned=True),
    aten.eq: _compared("zero"),
    aten.ne: _compared("zero", negated=True),
    aten.logical_not: _not,
    aten.bitwise_not: _not,
    **dict.fromkeys((aten.logical_and, aten.bitwise_and, aten.__and__), _logic(composed.minimum)),
    **dict.fromkeys((aten.logical_or, aten.bitwise_or, aten.__or__), _logic(composed.maximum)),
    aten.where: _where,
    aten.masked_fill: lambda x, mask, value: _where(mask, value, x),
    aten.argmax: _place,
    aten.hardshrink: _hardshrink,
    aten.threshold: _threshold,
    aten.to: to,
    aten._to_copy: to,
}
