"""The inner loop of `increments`, compiled: one estimator at a time, by what changes.

The state of an estimator is small enough for the processor's cache: its point, the hidden
pre-activations, and the gradient of its margin with respect to the values of every level. A step
moves some coordinates, and what follows from that is worked out from the changes alone:

- forwards, a changed activation adds its change times a block of weights to each window above it;
- backwards, a changed gradient does the same to each pixel below it. In a piecewise linear
  network gradients change only where ReLUs flip.

Layer k leads from level k to level k + 1; level 0 is the point. The values of a level are
[pixels, channels]. Changes are lists of places and amounts, in order; they are written without
branches, which the processor would guess wrong every other time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit
from numpy.typing import NDArray

from tightrope.attacks.rows_kernel import add_rows

Array = NDArray[Any]
BLOCK = 16  # coordinates that are looked at together
TOGETHER = 32  # rows that are added up together: those in use should stay in the cache


def _compiled(function: Any) -> Any:
    """Compile a function when it is first called, for this and later processes."""
    # Sums may be reordered and contracted, as in the library's own kernels.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for a cache that we may write to
        return njit(**options)(function)


class Joint(NamedTuple):
    """How the values of a level act on a neighbouring one.

    A change adds a patch, its weights times the change, to several runs of values. Values that
    act on the same ones are a block; changes next to each other in a block are added up first.
    """

    blocks: Array  # [values]: the block that a value is part of
    picks: Array  # [values]: the row of its weights
    weights: Array  # [rows, patch]
    runs: Array  # [blocks, n, 3]: first pixel, first one of the patch, how many; or zeros


class Layer(NamedTuple):
    """An affine layer, seen from both sides."""

    forwards: Joint
    backwards: Joint
    anew: bool  # whether gradients below it are computed from those behind it, not from changes


class State(NamedTuple):
    """What is known of one estimator at its present point, by layer; and lists of changes."""

    active: tuple[Array, ...]  # [values] activations behind the layer
    passed: tuple[Array, ...]  # [values] gradient that passes the ReLUs behind the layer
    alive: tuple[Array, ...]  # [windows] how much of it is not zero
    touched: tuple[Array, ...]  # [windows] whether inputs have changed
    stale: tuple[Array, ...]  # [pixels before the layer] whether a gradient or a ReLU has changed
    places: Array  # [2, values]
    amounts: Array
    moved: Array  # [inputs] where a step leads


@_compiled
def climb(
    points: Array,
    lower: Array,
    upper: Array,
    best: Array,
    scores: Array,
    hidden: tuple[Array, ...],
    slopes: tuple[Array, ...],
    layers: tuple[Layer, ...],
    rows: Array,
    offsets: Array,
    labels: Array,
    targets: Array,
    sizes: Array,
    follow: bool,
    state: State,
) -> None:
    """Take steps from `points` [samples, estimators, inputs], keeping the best points visited.

    `hidden` are the pre-activations behind each layer at the points, `slopes` the gradients of
    the margins before each layer; `rows` and `offsets` the last linear layer; `sizes` those of
    the steps, relative to the radius. Points, best points, their scores, and with `follow` hidden
    values and slopes are changed in place. Without it, only the first step is taken, and the
    caller finds out what it led to.
    """
    for b in range(points.shape[0]):
        for e in range(points.shape[1]):
            outer = rows[targets[b, e]] - rows[labels[b]]
            offset = offsets[targets[b, e]] - offsets[labels[b]]
            point, slope, last = points[b, e], slopes[0][b, e], hidden[-1][b, e]
            if follow:
                _begin(hidden, slopes, outer, b, e, state)
            for i in range(len(sizes)):
                score = _score(outer, last) + offset
                if score > scores[b, e]:
                    scores[b, e] = score
                    best[b, e] = point
                count = _move(point, lower[b], upper[b], slope, sizes[i], state)
                if count == 0 or not follow:
                    break
                count = _forwards(hidden, layers, outer, b, e, count, state)
                if i < len(sizes) - 1:
                    _backwards(slopes, layers, b, e, count, state)
            if follow:
                score = _score(outer, last) + offset
                if score > scores[b, e]:
                    scores[b, e] = score
                    best[b, e] = point


@_compiled
def _begin(
    hidden: tuple[Array, ...],
    slopes: tuple[Array, ...],
    outer: Array,
    b: int,
    e: int,
    state: State,
) -> None:
    """Derive the state of an estimator from its hidden values and slopes."""
    for k in range(len(hidden)):
        values, active, passed, alive = (
            hidden[k][b, e],
            state.active[k],
            state.passed[k],
            state.alive[k],
        )
        slope = slopes[k + 1][b, e] if k + 1 < len(hidden) else outer
        zero = values.dtype.type(0)
        channels = len(values) // len(alive)
        for j in range(len(values)):
            active[j] = max(values[j], zero)
            passed[j] = slope[j] if active[j] > 0 else zero
        for p in range(len(alive)):
            part = passed[p * channels : (p + 1) * channels]
            living = 0
            for j in range(len(part)):
                living += part[j] != 0
            alive[p] = living


@_compiled
def _score(outer: Array, values: Array) -> float:
    zero = values.dtype.type(0)
    total = zero
    for j in range(len(outer)):
        total += outer[j] * max(values[j], zero)
    return total


@_compiled
def _move(point: Array, lower: Array, upper: Array, slope: Array, size: float, state: State) -> int:
    """Take a sign step inside the box; list and count the coordinates that move."""
    moved, places, amounts = state.moved, state.places[0], state.amounts[0]
    zero, half = point.dtype.type(0), point.dtype.type(size / 2)
    for j in range(len(point)):
        step = half * (upper[j] - lower[j])
        step = step if slope[j] > 0 else (-step if slope[j] < 0 else zero)
        moved[j] = min(max(point[j] + step, lower[j]), upper[j])
    count = 0
    for start in range(0, len(point), BLOCK):
        before, now = point[start : start + BLOCK], moved[start : start + BLOCK]
        differs = False
        if len(before) == BLOCK:  # a constant, which the compiler makes use of
            for j in range(BLOCK):
                differs |= now[j] != before[j]
        else:
            for j in range(len(before)):
                differs |= now[j] != before[j]
        if differs:
            for j in range(len(before)):
                places[count], amounts[count] = start + j, now[j] - before[j]
                count += now[j] != before[j]
                before[j] = now[j]
    return count


@_compiled
def _forwards(
    hidden: tuple[Array, ...],
    layers: tuple[Layer, ...],
    outer: Array,
    b: int,
    e: int,
    count: int,
    state: State,
) -> int:
    """Carry changes of the point through all layers.

    Behind the last layer, list and count the changes of the gradient that passes the ReLUs.
    """
    for k in range(len(layers)):
        layer, values, touched = layers[k], hidden[k][b, e], state.touched[k]
        _spread(count, layer.forwards, values, touched, state, k % 2)
        if k < len(layers) - 1:
            count = _activations(values, k, state)
        else:
            count = _flips(values, outer, k, state)
    return count


@_compiled
def _activations(values: Array, k: int, state: State) -> int:
    """List changes of the activations behind layer k."""
    active, touched, stale = state.active[k], state.touched[k], state.stale[k + 1]
    places, amounts = state.places[(k + 1) % 2], state.amounts[(k + 1) % 2]
    zero = values.dtype.type(0)
    channels = len(values) // len(touched)
    count = 0
    for p in range(len(touched)):
        if not touched[p]:
            continue
        touched[p] = False
        first = p * channels
        part, known = values[first : first + channels], active[first : first + channels]
        flips = 0
        for j in range(len(part)):
            value, before = max(part[j], zero), known[j]
            places[count], amounts[count] = first + j, value - before
            count += value != before
            flips += (value > 0) != (before > 0)
            known[j] = value
        if flips:
            stale[p] = True
    return count


@_compiled
def _flips(values: Array, outer: Array, k: int, state: State) -> int:
    """List changes of the gradient that passes the ReLUs behind the last layer."""
    passed, touched, alive = state.passed[k], state.touched[k], state.alive[k]
    active = state.active[k]
    places, amounts = state.places[(k + 1) % 2], state.amounts[(k + 1) % 2]
    zero = values.dtype.type(0)
    channels = len(values) // len(touched)
    count = 0
    for p in range(len(touched)):
        if not touched[p]:
            continue
        touched[p] = False
        first = p * channels
        part, known = values[first : first + channels], active[first : first + channels]
        differs = 0
        for j in range(len(part)):
            differs += (part[j] > 0) != (known[j] > 0)
        if not differs:
            continue
        for j in range(len(part)):
            if (part[j] > 0) != (known[j] > 0):
                known[j] = max(part[j], zero)
                passes = outer[first + j] if known[j] > 0 else zero
                places[count], amounts[count] = first + j, passes - passed[first + j]
                count += 1
                alive[p] += (passes != 0) - (passed[first + j] != 0)
                passed[first + j] = passes
    return count


@_compiled
def _backwards(
    slopes: tuple[Array, ...],
    layers: tuple[Layer, ...],
    b: int,
    e: int,
    count: int,
    state: State,
) -> None:
    """Carry changes of the gradient behind the last layer down to the point."""
    for k in range(len(layers) - 1, -1, -1):
        layer, slope, stale = layers[k], slopes[k][b, e], state.stale[k]
        if not layer.anew:
            _spread(count, layer.backwards, slope, stale, state, (k + 1) % 2)
            _silence(count, layer, slope, state, k)
        elif count:
            _renew(layer.backwards, slope, state, k)
            stale[:] = True
        if k:
            count = _gradients(slope, k - 1, state)


@_compiled
def _renew(joint: Joint, slope: Array, state: State, k: int) -> None:
    """Compute the gradient below layer k, which is one window, from the one behind it."""
    passed, places, amounts = state.passed[k], state.places[0], state.amounts[0]
    count = 0
    for j in range(len(passed)):
        places[count], amounts[count] = j, passed[j]
        count += passed[j] != 0
    slope[:] = 0
    nothing = count - count
    add_rows(slope, joint.weights, nothing, joint.picks, places, amounts, nothing, count)


@_compiled
def _gradients(slope: Array, k: int, state: State) -> int:
    """List changes of the gradient that passes the ReLUs behind layer k."""
    active, passed = state.active[k], state.passed[k]
    alive, stale = state.alive[k], state.stale[k + 1]
    places, amounts = state.places[(k + 1) % 2], state.amounts[(k + 1) % 2]
    zero = slope.dtype.type(0)
    channels = len(slope) // len(stale)
    count = 0
    for p in range(len(stale)):
        if not stale[p]:
            continue
        stale[p] = False
        first = p * channels
        part, known, before = (
            slope[first : first + channels],
            active[first : first + channels],
            passed[first : first + channels],
        )
        living = 0
        for j in range(len(part)):
            passes = part[j] if known[j] > 0 else zero
            places[count], amounts[count] = first + j, passes - before[j]
            count += passes != before[j]
            living += passes != 0
            before[j] = passes
        alive[p] = living
    return count


@_compiled
def _spread(count: int, joint: Joint, values: Array, marks: Array, state: State, side: int) -> None:
    """Add the listed changes, times their weights, to the values that they reach."""
    places, amounts = state.places[side], state.amounts[side]
    blocks, runs, width = joint.blocks, joint.runs, len(values) // len(marks)
    start = 0
    while start < count:
        block, end = blocks[places[start]], start + 1
        while end < count and blocks[places[end]] == block and end < start + TOGETHER:
            end += 1
        for n in range(runs.shape[1]):
            to, source, length = runs[block, n, 0], runs[block, n, 1], runs[block, n, 2]
            if length == 0:
                break
            goal = values[to * width : (to + length) * width]
            column = source * width
            add_rows(goal, joint.weights, column, joint.picks, places, amounts, start, end)
            for mark in range(to, to + length):
                marks[mark] = True
        start = end


@_compiled
def _silence(count: int, layer: Layer, slope: Array, state: State, k: int) -> None:
    """Set gradients to zero where none arrives any more: their sum may have left a rest."""
    places, alive, runs = state.places[(k + 1) % 2], state.alive[k], layer.backwards.runs
    windows, blocks = layer.backwards.blocks, layer.forwards.blocks
    channels = len(slope) // len(state.stale[k])
    window = -1
    for i in range(count):
        if windows[places[i]] == window:
            continue
        window = windows[places[i]]
        if alive[window]:
            continue
        for n in range(runs.shape[1]):
            begin, length = runs[window, n, 0], runs[window, n, 2]
            for pixel in range(begin, begin + length):
                above = layer.forwards.runs[blocks[pixel * channels]]
                if not _arrives(pixel, above, runs, alive):
                    slope[pixel * channels : (pixel + 1) * channels] = 0


@_compiled
def _arrives(pixel: int, above: Array, below: Array, alive: Array) -> bool:
    """Return whether a gradient arrives at a pixel from any window above."""
    for n in range(len(above)):
        begin, length = above[n, 0], above[n, 2]
        for window in range(begin, begin + length):
            # Not every pixel of a block is in every window of the block.
            if alive[window] and _contains(below[window], pixel):
                return True
    return False


@_compiled
def _contains(runs: Array, pixel: int) -> bool:
    found = False
    for n in range(len(runs)):
        found |= runs[n, 0] <= pixel < runs[n, 0] + runs[n, 2]
    return found
