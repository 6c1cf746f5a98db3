"""Sums of rows, with the vector instructions written out.

A compiler cannot know that arrays do not overlap, so that it asks before every loop. The loops of
`changes_kernel` are so short that the question would take longer than the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

BYTES = 32  # of a vector; processors with shorter ones take several
TOGETHER = (8, 4, 2, 1)  # vectors that are summed up at the same time, as far as there are as many
FUSED = ("contract",)  # a product and a sum may be one instruction

Value = Any  # of the compiler's intermediate language
Add = Callable[[Value, Value, Value], None]  # adds an amount times a row, from a column on


def _add_rows(
    context: Any,
    goal: Any,
    rows: Any,
    column: Any,
    picks: Any,
    places: Any,
    amounts: Any,
    begin: Any,
    end: Any,
) -> Any:
    """Add `sum_i amounts[i] * rows[picks[places[i]], column:]`, i from begin to end, to `goal`."""
    signature = types.void(goal, rows, column, picks, places, amounts, begin, end)
    return signature, _emit_listed


add_rows: Callable[..., None] = intrinsic(_add_rows)


def _emit_listed(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
    _, _, column, _, _, _, begin, end = arguments
    picks, places, amounts = (_array(context, builder, signature, arguments, i) for i in (3, 4, 5))

    def every(add: Add) -> None:
        with cgutils.for_range(builder, end, start=begin) as loop:
            place = builder.load(builder.gep(places.data, [loop.index]))
            amount = builder.load(builder.gep(amounts.data, [loop.index]))
            add(amount, builder.load(builder.gep(picks.data, [place])), column)

    return _emit(context, builder, signature, arguments, every)


def _emit(
    context: Any, builder: Any, signature: Any, arguments: Any, every: Callable[[Add], None]
) -> Value:
    """Write the code: for each part of the goal, add up all rows in registers.

    `every` writes the loop over the rows, in which it calls its argument for each of them.
    """
    goal, rows = (_array(context, builder, signature, arguments, i) for i in (0, 1))
    (length,) = cgutils.unpack_tuple(builder, goal.shape, 1)
    _, stride = cgutils.unpack_tuple(builder, rows.shape, 2)
    number = context.get_data_type(signature.args[0].dtype)
    size = length.type

    def part(position: Value, kind: ir.VectorType, count: int) -> None:
        """Sum up `count` neighbouring vectors."""
        align = context.get_abi_alignment(number)
        offsets = [builder.add(position, size(kind.count * n)) for n in range(count)]
        targets = [_pointer(builder, goal.data, offset, kind) for offset in offsets]
        sums = [cgutils.alloca_once(builder, kind) for _ in targets]
        for total, target in zip(sums, targets, strict=True):
            builder.store(builder.load(target, align=align), total)

        def add(amount: Value, row: Value, column: Value) -> None:
            factor = _everywhere(builder, amount, kind)
            begin = builder.add(builder.mul(row, stride), column)
            for total, offset in zip(sums, offsets, strict=True):
                source = _pointer(builder, rows.data, builder.add(begin, offset), kind)
                product = builder.fmul(factor, builder.load(source, align=align), flags=FUSED)
                builder.store(builder.fadd(builder.load(total), product, flags=FUSED), total)

        every(add)
        for total, target in zip(sums, targets, strict=True):
            builder.store(builder.load(total), target, align=align)

    lanes = BYTES // context.get_abi_sizeof(number)
    shorter = [lanes >> n for n in range(1, lanes.bit_length())]
    done: Value = size(0)
    for width, count in (*((lanes, n) for n in TOGETHER), *((n, 1) for n in shorter)):
        step = size(width * count)
        until = builder.mul(builder.sdiv(length, step), step)
        with cgutils.for_range_slice(builder, done, until, step, inc=True) as (position, _):
            part(position, ir.VectorType(number, width), count)
        done = until
    return context.get_dummy_value()


def _array(context: Any, builder: Any, signature: Any, arguments: Any, i: int) -> Any:
    return context.make_array(signature.args[i])(context, builder, arguments[i])


def _pointer(builder: Any, data: Value, offset: Value, kind: ir.VectorType) -> Value:
    return builder.bitcast(builder.gep(data, [offset]), kind.as_pointer())


def _everywhere(builder: Any, value: Value, kind: ir.VectorType) -> Value:
    """Return a vector of equal values."""
    single = builder.insert_element(kind(ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.VectorType(ir.IntType(32), kind.count)(None)
    return builder.shuffle_vector(single, kind(ir.Undefined), zeros)
