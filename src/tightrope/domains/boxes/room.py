"""What the compiled loop reads, keeps while it works on a box, and finds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Rows(NamedTuple):
    """What `Condensed` holds, as the kernel takes it."""

    neurons: int
    pointer: Array
    source: Array
    weight: Array
    bias: Array
    slack: Array
    left: Array
    square: Array


class Room(NamedTuple):
    """Where the state of one box is kept; its neurons first, then its bent ones."""

    kind: Array  # [neurons]
    number: Array  # [neurons]: of a bent neuron
    factor: Array  # [neurons]: by which a passed form counts
    begin: Array  # [neurons]: of the form in `forms`
    length: Array  # [neurons]
    loss: Array  # [neurons]
    size: Array  # [neurons]
    forms: Array
    owner: Array  # [bent]: the neuron
    low: Array  # [bent]: smallest output
    high: Array  # [bent]: largest output
    below: Array  # [bent]: slope of the line below
    above: Array  # [bent]: slope of the line above
    base: Array  # [bent]: what the line below is at zero
    peak: Array  # [bent]: what the line above is at zero
    gap: Array  # [bent, 2]: the most that the lines are off, below and above
    wide: Array  # [bent]: how far the inputs of ReLUs reach
    kept: Array  # [bent, 2]: `below` and `base` before they are improved
    share: Array  # [bent, inputs]: how much of the neuron's width is due to each input
    form: Array
    work: Array
    seen: Array  # what variables are where a bound is attained
    picked: Array  # [most entries of a row]
    factors: Array


class Found(NamedTuple):
    """Where the bounds of all boxes go: each row is at least `slope . x + constant`."""

    slope: Array  # [boxes, rows, inputs]
    constant: Array  # [boxes, rows]
    lower: Array  # [boxes, rows]
    blame: Array  # [boxes, rows, inputs]: what of the looseness is due to each input
    bent: Array  # [boxes]


def make_room(rows: Rows, inputs: int, capacity: int) -> Room:
    """Return room for boxes of so many inputs, with so many numbers for forms."""
    count, width = rows.neurons, inputs + 1 + rows.neurons
    most = int(np.diff(rows.pointer).max(initial=1))

    def whole() -> Array:
        return np.empty(count, np.int64)

    def real(*more: int) -> Array:
        return np.empty((count, *more))

    return Room(
        kind=whole(),
        number=whole(),
        factor=real(),
        begin=whole(),
        length=whole(),
        loss=real(),
        size=real(),
        forms=np.empty(capacity),
        owner=whole(),
        low=real(),
        high=real(),
        below=real(),
        above=real(),
        base=real(),
        peak=real(),
        gap=real(2),
        wide=real(),
        kept=real(2),
        share=real(inputs),
        form=np.empty(width),
        work=np.empty(width),
        seen=np.empty(width),
        picked=np.empty(most, np.int64),
        factors=np.empty(most),
    )
