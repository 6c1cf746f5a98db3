"""Relations between inputs: equal ones become one, and inequalities tighten the box.

What is left of an inequality stays a constraint beside those on the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tightrope.certification.vnnlib.formulas import LOWER, UPPER, Bound
from tightrope.certification.vnnlib.specification import Row

Bounds = tuple[dict[int, Bound], dict[int, Bound]]

ROUNDS = 3  # in which inequalities tighten bounds that others have tightened


def tied(ties: Sequence[tuple[int, int]], count: int) -> tuple[int, ...] | None:
    """Return for each of `count` inputs which one of those that are left it is; None: itself."""
    if not ties:
        return None
    leader = list(range(count))

    def lead(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for one, other in ties:
        low, high = sorted((lead(one), lead(other)))
        leader[high] = low
    free = {i: place for place, i in enumerate(i for i in range(count) if lead(i) == i)}
    return tuple(free[lead(i)] for i in range(count))


def placed(row: Row, places: Sequence[int]) -> Row:
    """Return a row about the inputs that are left."""
    factors: dict[int, Fraction] = {}
    for index, factor in row.factors:
        new = index if index >= 0 else -1 - places[-1 - index]
        factors[new] = factors.get(new, Fraction(0)) + factor
    return row._replace(factors=tuple(sorted((i, f) for i, f in factors.items() if f)))


def contract(bounds: Bounds, rows: Sequence[Row]) -> None:
    """Tighten the bounds of inputs by rows that relate inputs to each other.

    Each row bounds each of its inputs once the others are at their best.
    """
    for _ in range(ROUNDS if rows else 0):
        changed = False
        for row in rows:
            parts = [(-1 - i, f, _least(bounds, -1 - i, f)) for i, f in row.factors]
            for number, factor, _ in parts:
                others = [least for i, _, least in parts if i != number]
                if any(least is None for least in others):
                    continue
                rest = sum((part for part in others if part is not None), row.constant)
                side = UPPER if factor > 0 else LOWER
                at = bounds[1 - side].get(number) or bounds[side].get(number)
                position = 0 if at is None else at.position
                new = Bound(side, number, -rest / factor, row.strict, position)
                changed |= keep_tighter(bounds[side], new)
        if not changed:
            return


def _least(bounds: Bounds, number: int, factor: Fraction) -> Fraction | None:
    """Return the least value of a multiple of an input, if it is bounded."""
    bound = bounds[LOWER if factor > 0 else UPPER].get(number)
    return None if bound is None else factor * bound.value


def keep_tighter(bounds: dict[int, Bound], bound: Bound) -> bool:
    """Replace the bound of an input by a tighter one; return whether it is tighter."""
    old = bounds.get(bound.input)
    if old is not None:
        tighter = bound.value < old.value if bound.side == UPPER else bound.value > old.value
        if not tighter and not (bound.value == old.value and bound.strict and not old.strict):
            return False
    bounds[bound.input] = bound
    return True
