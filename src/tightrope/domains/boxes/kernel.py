"""Linear bounds of condensed networks on many boxes, compiled: one box after the other, in cache.

Neuron by neuron, its value is written as a form: a linear function of the inputs and of the outputs
of *bent* neurons, those whose sign the box leaves open. Neurons that are not bent pass their form
on or are zero, so that forms are exact, and short where few neurons bend. A bound is taken by
substituting bent neurons backwards, last one first, by the line below or above them.

Everything is float64 and strict. A form has a `loss`, by which it may be off for any point of the
box, and a `size`, the sum of its terms' absolute values: a sum of n products is off by at most
`n u / (1 - n u)` times the size, in any order. Numbers that are not finite stay so, or go unused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tightrope.domains.boxes.room import Array, Found, Room, Rows

EPS = 2.0**-52  # twice the unit roundoff: a bound whichever way operations are rounded
MORE = 1 + 1e-9  # covers what is rounded in sizes and losses themselves
TINY = 1e-300  # covers underflow
ZERO, PASSED, BENT = 0, 1, 2
STEPS = 6  # in which the lines of a row are improved
FIRST, SHORTER = 0.6, 0.7  # how far they may move at first, and later on
WORK = 1e9  # multiply-adds for one box; what needs more had better be cut first


def compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    # A product and a sum may be rounded once instead of twice; all else happens as it is written.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)


@compiled
def growth(terms: int) -> float:
    """Return the relative error of a sum of so many products, and some more around it."""
    steps = (terms + 8) * EPS
    return steps / (1 - steps)


@compiled
def bound_boxes(
    lower: Array, upper: Array, wanted: Array, rows: Rows, room: Room, found: Found
) -> None:
    """Bound the rows of the property that are wanted, [boxes, rows], on boxes [boxes, inputs]."""
    count = len(rows.bias) - rows.neurons
    for b in range(len(lower)):
        bent = bend(lower[b], upper[b], rows, room)
        found.bent[b] = bent
        for r in range(count):
            slope, blame = found.slope[b, r], found.blame[b, r]
            if bent < 0 or not wanted[b, r]:  # nothing is known
                slope[:], blame[:] = 0.0, upper[b] - lower[b]
                found.constant[b, r] = -np.inf
                found.lower[b, r] = -np.inf
                continue
            form = compose(rows.neurons + r, lower[b], upper[b], rows, room)
            constant, least = raise_bound(form, lower[b], upper[b], bent, rows, room, slope, blame)
            found.constant[b, r] = constant
            found.lower[b, r] = least


@compiled
def raise_bound(
    form: tuple[int, float, float],
    lower: Array,
    upper: Array,
    bent: int,
    rows: Rows,
    room: Room,
    slope: Array,
    blame: Array,
) -> tuple[float, float]:
    """Bound `room.form` from below, its lines improved; return constant and smallest value.

    Any line below will do: slopes of ReLUs, points at which tangents touch. They follow what their
    neurons see where the bound is attained. Those of the neurons are put back in the end.
    """
    length, loss, size = form
    inputs, nobody = len(lower), room.work[:0]
    for v in range(bent):
        room.kept[v, 0], room.kept[v, 1] = room.below[v], room.base[v]
    constant, least = substitute(1.0, length, loss, size, lower, upper, room, blame)
    for j in range(inputs):
        slope[j] = room.work[j]
    step = FIRST
    for _ in range(STEPS):
        if not least <= 0 or length == inputs + 1:
            break
        follow(length, step, lower, upper, rows, room)
        step *= SHORTER
        other, new = substitute(1.0, length, loss, size, lower, upper, room, nobody)
        if new > least:
            constant, least = other, new
            for j in range(inputs):
                slope[j] = room.work[j]
    for v in range(bent):
        room.below[v], room.base[v] = room.kept[v, 0], room.kept[v, 1]
    return constant, least


@compiled
def follow(length: int, step: float, lower: Array, upper: Array, rows: Rows, room: Room) -> None:
    """Move the lines below towards what neurons see where the last bound is attained."""
    inputs, work, forms, seen = len(lower), room.work, room.forms, room.seen
    for j in range(inputs):
        seen[j] = lower[j] if work[j] >= 0 else upper[j]
    seen[inputs] = 1.0
    for c in range(inputs + 1, length):
        v, a = c - inputs - 1, work[c]
        i = room.owner[v]
        begin, value = room.begin[i], 0.0
        for e in range(room.length[i]):
            value += forms[begin + e] * seen[e]
        if a < 0:
            seen[c] = room.above[v] * value + room.peak[v]
            continue
        seen[c] = room.below[v] * value + room.base[v]
        if rows.square[i]:
            middle = room.below[v] / 2
            middle += step * (value - middle)
            room.below[v], room.base[v] = 2 * middle, base_of(middle)
        elif room.wide[v] > 0:
            moved = room.below[v] + step * min(max(4 * value / room.wide[v], -1.0), 1.0)
            room.below[v] = min(max(moved, rows.left[i]), 1.0)


@compiled
def bend(lower: Array, upper: Array, rows: Rows, room: Room) -> int:
    """Classify all neurons; return how many are bent, or -1 if that takes more than there is."""
    inputs, bent, used, spent = len(lower), 0, 0, 0.0
    nobody = room.work[:0]
    for i in range(rows.neurons):
        length, loss, size = compose(i, lower, upper, rows, room)
        least, most = enclose(length, loss, size, lower, upper, room)
        spent += float(length) * (rows.pointer[i + 1] - rows.pointer[i])
        kept = True
        share = room.share[bent]
        square = rows.square[i]
        if square or (least < 0 and most > 0):
            for j in range(inputs):
                share[j] = abs(room.form[j]) * (upper[j] - lower[j])
        if length > inputs + 1 and (square or (least < 0 and most > 0)):
            spent += float(length) * length
            for j in range(inputs):
                share[j] = 0.0
            other = substitute(1.0, length, loss, size, lower, upper, room, nobody)[1]
            if other > least:
                least = other
            if square or least < 0:
                for j in range(inputs):
                    share[j] += abs(room.work[j]) * (upper[j] - lower[j])
                other = -substitute(-1.0, length, loss, size, lower, upper, room, nobody)[1]
                if other < most:
                    most = other
                for j in range(inputs):
                    share[j] += abs(room.work[j]) * (upper[j] - lower[j])
        if square:
            draw_square(i, bent, least, most, room)
            bent += 1
        elif most <= 0:
            kept = rows.left[i] != 0
            room.kind[i], room.factor[i] = (PASSED if kept else ZERO), rows.left[i]
        elif least >= 0:
            room.kind[i], room.factor[i] = PASSED, 1.0
        else:
            draw_lines(i, bent, least, most, rows.left[i], room)
            bent += 1
        if kept:
            if used + length > len(room.forms) or spent > WORK:
                return -1
            for c in range(length):
                room.forms[used + c] = room.form[c]
            room.begin[i], room.length[i] = used, length
            room.loss[i], room.size[i] = loss, size
            used += length
    return bent


@compiled
def draw_lines(i: int, v: int, least: float, most: float, left: float, room: Room) -> None:
    """Enclose a bent neuron, whose input lies in [least, most], by two lines."""
    room.kind[i], room.number[i], room.owner[v] = BENT, v, i
    share = most / (most - least)
    slope = left + (1 - left) * share
    slope = min(max(slope, left), 1.0) if share == share else share
    # The line above must clear both ends.
    peak = max((left - slope) * least, (1 - slope) * most)
    room.above[v] = slope
    room.peak[v] = peak + 8 * EPS * (most - least) + TINY
    room.base[v] = 0.0
    room.below[v] = 1.0 if most > -least else left
    room.low[v] = left * least * MORE - TINY
    room.high[v] = most
    room.gap[v, 0] = (1 - left) * min(most, -least)
    room.gap[v, 1] = peak
    room.wide[v] = most - least
    divide_shares(v, room)


@compiled
def base_of(middle: float) -> float:
    """Return where the tangent of a square is at zero, or below."""
    return -middle * middle * (1 + 4 * EPS) - TINY


@compiled
def draw_square(i: int, v: int, least: float, most: float, room: Room) -> None:
    """Enclose the square of a row that lies in [least, most] by a tangent and a chord."""
    room.kind[i], room.number[i], room.owner[v] = BENT, v, i
    middle, slope = least / 2 + most / 2, least + most
    size = max(least * least, most * most)
    # Any tangent lies below; the chord must clear both ends.
    room.below[v] = 2 * middle
    room.base[v] = base_of(middle)
    room.above[v] = slope
    room.peak[v] = max(least * (least - slope), most * (most - slope)) + 8 * EPS * size + TINY
    apart = least > 0 or most < 0
    room.low[v] = min(least * least, most * most) / MORE - TINY if apart else 0.0
    room.high[v] = size * MORE + TINY
    room.gap[v, 0] = (most - least) * (most - least) / 4
    room.gap[v, 1] = room.gap[v, 0]
    divide_shares(v, room)


@compiled
def divide_shares(v: int, room: Room) -> None:
    """Make what inputs contribute to the width of a bent neuron shares of one."""
    total = 0.0
    for j in range(room.share.shape[1]):
        total += room.share[v, j]
    for j in range(room.share.shape[1]):
        room.share[v, j] = room.share[v, j] / total if total > 0 else 0.0


@compiled
def compose(i: int, lower: Array, upper: Array, rows: Rows, room: Room) -> tuple[int, float, float]:
    """Write a row as a form into `room.form`; return its length, loss and size."""
    inputs = len(lower)
    form = room.form
    length, picked, terms = inputs + 1, 0, 0
    loss, scale = rows.slack[i], abs(rows.bias[i])
    begin, end = rows.pointer[i], rows.pointer[i + 1]
    for p in range(begin, end):  # how long will it be?
        j = rows.source[p] - inputs
        if j >= 0 and room.kind[j] != ZERO:
            needs = inputs + 2 + room.number[j] if room.kind[j] == BENT else room.length[j]
            length = max(length, needs)
    for c in range(length):
        form[c] = 0.0
    form[inputs] = rows.bias[i]
    for p in range(begin, end):
        j, weight = rows.source[p], rows.weight[p]
        if j < inputs:
            form[j] += weight
            scale += abs(weight) * max(abs(lower[j]), abs(upper[j]))
            terms += 1
            continue
        j -= inputs
        if room.kind[j] == ZERO:
            continue
        terms += 1
        if room.kind[j] == BENT:
            v = room.number[j]
            form[inputs + 1 + v] += weight
            scale += abs(weight) * max(room.high[v], -room.low[v])
        else:
            weight *= room.factor[j]
            loss += abs(weight) * room.loss[j]
            scale += abs(weight) * room.size[j]
            room.picked[picked], room.factors[picked] = j, weight
            picked += 1
    if terms == 0:  # a constant, whatever its weights are
        return inputs + 1, loss, scale
    add_forms(picked, form, room)
    size = abs(form[inputs])
    reach = 1.0
    for j in range(inputs):
        most = max(abs(lower[j]), abs(upper[j]))
        size += abs(form[j]) * most
        reach += most
    for c in range(inputs + 1, length):
        v = c - inputs - 1
        most = max(room.high[v], -room.low[v])
        size += abs(form[c]) * most
        reach += most
    loss = (loss + growth(terms + 2) * scale) * MORE + TINY * (reach + scale)
    return length, loss, size * MORE


@compiled
def add_forms(picked: int, form: Array, room: Room) -> None:
    """Add multiples of the forms of some neurons, four at a time."""
    forms, factors = room.forms, room.factors
    k = 0
    while k + 4 <= picked:
        a, b, c, d = room.picked[k], room.picked[k + 1], room.picked[k + 2], room.picked[k + 3]
        fa, fb, fc, fd = factors[k], factors[k + 1], factors[k + 2], factors[k + 3]
        common = min(min(room.length[a], room.length[b]), min(room.length[c], room.length[d]))
        at, bt, ct, dt = room.begin[a], room.begin[b], room.begin[c], room.begin[d]
        for e in range(common):
            form[e] += (fa * forms[at + e] + fb * forms[bt + e]) + (
                fc * forms[ct + e] + fd * forms[dt + e]
            )
        for h in range(k, k + 4):  # what some have more than others
            j = room.picked[h]
            for e in range(common, room.length[j]):
                form[e] += room.factors[h] * forms[room.begin[j] + e]
        k += 4
    while k < picked:
        j, factor = room.picked[k], room.factors[k]
        begin = room.begin[j]
        for e in range(room.length[j]):
            form[e] += factor * forms[begin + e]
        k += 1


@compiled
def enclose(
    length: int, loss: float, size: float, lower: Array, upper: Array, room: Room
) -> tuple[float, float]:
    """Return the smallest and the largest value of `room.form`, each variable by itself."""
    inputs, form = len(lower), room.form
    least = form[inputs]
    most = form[inputs]
    for j in range(inputs):
        a = form[j]
        least += a * lower[j] if a >= 0 else a * upper[j]
        most += a * upper[j] if a >= 0 else a * lower[j]
    for c in range(inputs + 1, length):
        a, v = form[c], c - inputs - 1
        least += a * room.low[v] if a >= 0 else a * room.high[v]
        most += a * room.high[v] if a >= 0 else a * room.low[v]
    loose = (loss + growth(length + 2) * size) * MORE
    return least - loose, most + loose


@compiled
def substitute(
    sign: float,
    length: int,
    loss: float,
    size: float,
    lower: Array,
    upper: Array,
    room: Room,
    blame: Array,
) -> tuple[float, float]:
    """Bound `sign * room.form` from below by a linear function of the inputs.

    Its slopes are left in `room.work`; returns its constant and its smallest value on the box.
    """
    inputs, work, forms = len(lower), room.work, room.forms
    for c in range(length):
        work[c] = sign * room.form[c]
    for j in range(len(blame)):
        blame[j] = 0.0
    lost, scale, steps = loss, size, 0
    for c in range(length - 1, inputs, -1):
        a, v = work[c], c - inputs - 1
        if a == 0:
            continue
        i = room.owner[v]
        if a > 0:
            factor = a * room.below[v]
            work[inputs] += a * room.base[v]
            scale += abs(a * room.base[v])
        else:
            factor = a * room.above[v]
            work[inputs] += a * room.peak[v]
            scale += abs(a * room.peak[v])
        steps += 1
        for j in range(len(blame)):
            blame[j] += abs(a) * room.gap[v, 0 if a > 0 else 1] * room.share[v, j]
        if factor == 0:
            continue
        begin = room.begin[i]
        for e in range(room.length[i]):
            work[e] += factor * forms[begin + e]
        lost += abs(factor) * room.loss[i]
        scale += abs(factor) * room.size[i]
    lost = (lost + growth(2 * steps + 4) * scale) * MORE + TINY * (1 + scale)
    constant = work[inputs] - lost
    least, reach = constant, abs(constant)
    for j in range(inputs):
        a = work[j]
        least += a * lower[j] if a >= 0 else a * upper[j]
        reach += abs(a) * max(abs(lower[j]), abs(upper[j]))
    # The rounding of `constant` is among those that `growth` counts beyond two for each step.
    return constant, least - growth(inputs + 4) * reach * MORE
