"""How a change of a point acts on everything behind it, compiled (see `increments_kernel`).

- Forwards, a changed activation adds its change times a block of weights to each window above it.
- Backwards, a changed gradient does the same to each pixel below it. In a piecewise linear network
  gradients change only where ReLUs flip.

Layer k leads from level k to level k + 1; level 0 is the point. The values of a level are
[pixels, channels]. Changes are lists of places and amounts, in order; they are written without
branches, which the processor would guess wrong every other time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tightrope.attacks.kernels.chains import Array
from tightrope.attacks.kernels.compiling import compiled
from tightrope.attacks.kernels.rows_kernel import add_rows

TOGETHER = 32  # rows that are added up together: those in use should stay in the cache


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


class State(NamedTuple):
    """What is known of one estimator, by layer."""

    point: Array  # [inputs]
    hidden: tuple[Array, ...]  # [values] pre-activations behind the layer
    slopes: tuple[Array, ...]  # [values] gradient before the layer
    active: tuple[Array, ...]  # [values] activations behind the layer
    passed: tuple[Array, ...]  # [values] gradient that passes the ReLUs behind the layer
    alive: tuple[Array, ...]  # [windows] how much of it is not zero


class Changes(NamedTuple):
    """What changes in a step, by layer; and lists of it."""

    moved: Array  # [inputs] where the step leads
    touched: tuple[Array, ...]  # [windows] whether inputs have changed
    stale: tuple[Array, ...]  # [pixels before the layer] whether a gradient or a ReLU has changed
    places: Array  # [2, values]
    amounts: Array


@compiled
def copy(source: Array, target: Array) -> None:
    """Copy an array; much faster than an assignment to a slice."""
    for j in range(len(target)):
        target[j] = source[j]


@compiled
def _fill(target: Array, value: Any) -> None:
    for j in range(len(target)):
        target[j] = value


@compiled
def narrow(
    forwards: Array, backwards: Array, kept: Array, direct: Array, upwards: Array, downwards: Array
) -> None:
    """Collect the weights of some neurons of a linear layer, and those of some linear functions."""
    for i in range(len(forwards)):
        source, goal = forwards[i], upwards[i]
        for j in range(len(kept)):
            goal[j] = source[kept[j]]
        for e in range(len(direct)):
            goal[len(kept) + e] = direct[e, i]
    for j in range(len(kept)):
        copy(backwards[kept[j]], downwards[j])
    for e in range(len(direct)):
        copy(direct[e], downwards[len(kept) + e])


@compiled
def forwards(
    state: State, layers: tuple[Layer, ...], outer: Array, count: int, changes: Changes
) -> int:
    """Carry changes of the point through all layers.

    Behind the last layer, list and count the changes of the gradient that passes the ReLUs.
    """
    for k in range(len(layers)):
        _spread(count, layers[k].forwards, state.hidden[k], changes.touched[k], changes, k % 2)
        if k < len(layers) - 1:
            count = _activations(state, k, changes)
        else:
            count = _flips(state, outer, k, changes)
    return count


@compiled
def _activations(state: State, k: int, changes: Changes) -> int:
    """List changes of the activations behind layer k."""
    values, active = state.hidden[k], state.active[k]
    touched, stale = changes.touched[k], changes.stale[k + 1]
    places, amounts = changes.places[(k + 1) % 2], changes.amounts[(k + 1) % 2]
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


@compiled
def _flips(state: State, outer: Array, k: int, changes: Changes) -> int:
    """List changes of the gradient that passes the ReLUs behind the last layer."""
    values, active = state.hidden[k], state.active[k]
    passed, alive, touched = state.passed[k], state.alive[k], changes.touched[k]
    places, amounts = changes.places[(k + 1) % 2], changes.amounts[(k + 1) % 2]
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


@compiled
def backwards(state: State, layers: tuple[Layer, ...], count: int, changes: Changes) -> None:
    """Carry changes of the gradient behind the last layer down to the point."""
    for k in range(len(layers) - 1, -1, -1):
        layer, slope, stale = layers[k], state.slopes[k], changes.stale[k]
        _spread(count, layer.backwards, slope, stale, changes, (k + 1) % 2)
        _silence(count, layer, state, k, changes)
        if k:
            count = _gradients(state, k - 1, changes)


@compiled
def _gradients(state: State, k: int, changes: Changes) -> int:
    """List changes of the gradient that passes the ReLUs behind layer k."""
    slope, active, passed = state.slopes[k + 1], state.active[k], state.passed[k]
    alive, stale = state.alive[k], changes.stale[k + 1]
    places, amounts = changes.places[(k + 1) % 2], changes.amounts[(k + 1) % 2]
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


@compiled
def _spread(
    count: int, joint: Joint, values: Array, marks: Array, changes: Changes, side: int
) -> None:
    """Add the listed changes, times their weights, to the values that they reach."""
    places, amounts = changes.places[side], changes.amounts[side]
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
            goal, column = values[to * width : (to + length) * width], source * width
            add_rows(goal, joint.weights, column, joint.picks, places, amounts, start, end)
            for mark in range(to, to + length):
                marks[mark] = True
        start = end


@compiled
def _silence(count: int, layer: Layer, state: State, k: int, changes: Changes) -> None:
    """Set gradients to zero where none arrives any more: their sum may have left a rest."""
    slope, alive, places = state.slopes[k], state.alive[k], changes.places[(k + 1) % 2]
    runs = layer.backwards.runs
    windows, blocks = layer.backwards.blocks, layer.forwards.blocks
    channels = len(slope) // len(changes.stale[k])
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
                    _fill(slope[pixel * channels : (pixel + 1) * channels], 0)


@compiled
def _arrives(pixel: int, above: Array, below: Array, alive: Array) -> bool:
    """Return whether a gradient arrives at a pixel from any window above."""
    for n in range(len(above)):
        begin, length = above[n, 0], above[n, 2]
        for window in range(begin, begin + length):
            # Not every pixel of a block is in every window of the block.
            if alive[window] and _contains(below[window], pixel):
                return True
    return False


@compiled
def _contains(runs: Array, pixel: int) -> bool:
    found = False
    for n in range(len(runs)):
        found |= runs[n, 0] <= pixel < runs[n, 0] + runs[n, 2]
    return found
