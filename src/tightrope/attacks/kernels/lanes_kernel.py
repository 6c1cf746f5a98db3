"""Rows of 16 numbers, one per estimator, with the vector instructions written out.

Arrays of rows are flat. A compiler cannot know that arrays do not overlap, so that it would ask
before every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16  # numbers in a row
FUSED = ("contract",)  # a product and a sum may be one instruction

Emit = Callable[["Rows"], Any]


class Rows:
    """Writes instructions on rows of the arrays that a function was called with."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.builder = context, builder
        self.signature, self.arguments = signature, arguments
        number = context.get_data_type(signature.args[0].dtype)
        self.kind, self.align = ir.VectorType(number, LANES), context.get_abi_alignment(number)

    def _element(self, array: int, place: Any) -> Any:
        kind = self.signature.args[array]
        data = self.context.make_array(kind)(self.context, self.builder, self.arguments[array]).data
        return self.builder.gep(data, [place])

    def pointer(self, array: int, row: Any) -> Any:
        """Return where a row of an argument is."""
        first = self._element(array, self.builder.mul(row, row.type(LANES)))
        return self.builder.bitcast(first, self.kind.as_pointer())

    def load(self, array: int, row: Any) -> Any:
        """Load a row of an argument."""
        return self.builder.load(self.pointer(array, row), align=self.align)

    def store(self, value: Any, array: int, row: Any) -> None:
        """Store a row of an argument."""
        self.builder.store(value, self.pointer(array, row), align=self.align)

    def number(self, array: int, place: Any) -> Any:
        """Load a single number."""
        return self.builder.load(self._element(array, place))

    def add_product(self, total: Any, factor: Any, row: Any) -> Any:
        """Return `total + factor * row`."""
        product = self.builder.fmul(factor, row, flags=FUSED)
        return self.builder.fadd(total, product, flags=FUSED)

    def everywhere(self, value: Any) -> Any:
        """Return a row of equal numbers."""
        first = self.builder.insert_element(self.kind(ir.Undefined), value, ir.IntType(32)(0))
        zeros = ir.VectorType(ir.IntType(32), LANES)(None)
        return self.builder.shuffle_vector(first, self.kind(ir.Undefined), zeros)

    def listed(self, begin: Any, end: Any, places: int, factors: int) -> Any:
        """Go through a list of places and factors."""
        with cgutils.for_range(self.builder, end, start=begin) as loop:
            place = self.builder.sext(self.number(places, loop.index), loop.index.type)
            yield place, self.everywhere(self.number(factors, loop.index))


def _code(emit: Emit) -> Any:
    """Return what the compiler calls to have the instructions written."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(Rows(context, builder, signature, arguments))
        return context.get_dummy_value() if value is None else value

    return code


def _gather(
    context: Any,
    goal: Any,
    row: Any,
    base: Any,
    rows: Any,
    places: Any,
    factors: Any,
    begin: Any,
    end: Any,
) -> Any:
    """Set `goal[row] = base[row] + sum_i factors[i] * rows[places[i]]`, i from begin to end."""

    def emit(on: Rows) -> None:
        at, first, last = on.arguments[1], on.arguments[6], on.arguments[7]
        total = cgutils.alloca_once_value(on.builder, on.load(2, at))
        for place, factor in on.listed(first, last, 4, 5):
            before = on.builder.load(total)
            on.builder.store(on.add_product(before, factor, on.load(3, place)), total)
        on.store(on.builder.load(total), 0, at)

    return types.void(goal, row, base, rows, places, factors, begin, end), _code(emit)


def _scatter(
    context: Any,
    goal: Any,
    offset: Any,
    rows: Any,
    row: Any,
    places: Any,
    factors: Any,
    begin: Any,
    end: Any,
) -> Any:
    """Add `factors[i] * rows[row]` to `goal[offset + places[i]]`, i from begin to end."""

    def emit(on: Rows) -> None:
        shift, source = on.arguments[1], on.load(2, on.arguments[3])
        for place, factor in on.listed(on.arguments[6], on.arguments[7], 4, 5):
            at = on.builder.add(place, shift)
            on.store(on.add_product(on.load(0, at), factor, source), 0, at)

    return types.void(goal, offset, rows, row, places, factors, begin, end), _code(emit)


def _add_products(context: Any, goal: Any, row: Any, left: Any, right: Any) -> Any:
    """Add `left[row] * right[row]` to the only row of `goal`."""

    def emit(on: Rows) -> None:
        at = on.arguments[1]
        only = at.type(0)
        on.store(on.add_product(on.load(0, only), on.load(2, at), on.load(3, at)), 0, only)

    return types.void(goal, row, left, right), _code(emit)


def _is_zero(context: Any, rows: Any, row: Any) -> Any:
    """Return whether all numbers of a row are zero."""

    def emit(on: Rows) -> Any:
        values = on.load(0, on.arguments[1])
        differs = on.builder.fcmp_unordered("!=", values, on.kind(None))
        bits = ir.IntType(LANES)
        return on.builder.icmp_unsigned("==", on.builder.bitcast(differs, bits), bits(0))

    return types.boolean(rows, row), _code(emit)


def _choose(context: Any, goal: Any, row: Any, rows: Any, chosen: Any) -> Any:
    """Set `goal[row]` to `rows[row]` where the only row of `chosen` is not zero."""

    def emit(on: Rows) -> None:
        at = on.arguments[1]
        differs = on.builder.fcmp_unordered("!=", on.load(3, at.type(0)), on.kind(None))
        on.store(on.builder.select(differs, on.load(2, at), on.load(0, at)), 0, at)

    return types.void(goal, row, rows, chosen), _code(emit)


gather: Callable[..., None] = intrinsic(_gather)
scatter: Callable[..., None] = intrinsic(_scatter)
add_products: Callable[..., None] = intrinsic(_add_products)
is_zero: Callable[..., bool] = intrinsic(_is_zero)
choose: Callable[..., None] = intrinsic(_choose)
