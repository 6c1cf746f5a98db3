"""Recurrent cells, and layers of them over sequences of a fixed length, written out step by step.

A state is one node for each of what a cell keeps: h, and for an LSTM c as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.values import Maker

State = tuple[int, ...]
Weights = Sequence[Tensor | None]  # from the input, from h, and a bias for each, if there is one
Cell = Callable[[Maker, int, State, Weights], State]


def lstm(make: Maker, x: int, state: State, weights: Weights) -> State:
    """Append `c' = sigmoid(f) c + sigmoid(i) tanh(g)` and `h' = sigmoid(o) tanh(c')`."""
    h, c = state
    gates = make.append(ops.Add(), *_both(make, x, h, weights))
    i, f, g, o = _parts(make, gates, 4)
    new = make.append(ops.Mul(), make.append(ops.Sigmoid(), i), make.append(ops.Tanh(), g))
    old = make.append(ops.Mul(), make.append(ops.Sigmoid(), f), c)
    c = make.append(ops.Add(), old, new)
    h = make.append(ops.Mul(), make.append(ops.Sigmoid(), o), make.append(ops.Tanh(), c))
    return h, c


def gru(make: Maker, x: int, state: State, weights: Weights) -> State:
    """Append `h' = n + sigmoid(z) (h - n)` with `n = tanh(n_x + sigmoid(r) n_h)`."""
    (h,) = state
    first, second = (_parts(make, gates, 3) for gates in _both(make, x, h, weights))
    r, z = (
        make.append(ops.Sigmoid(), make.append(ops.Add(), a, b))
        for a, b in zip(first[:2], second[:2], strict=True)
    )
    inner = make.append(ops.Add(), first[2], make.append(ops.Mul(), r, second[2]))
    n = make.append(ops.Tanh(), inner)
    change = make.append(ops.Mul(), z, make.append(ops.Sub(), h, n))
    return (make.append(ops.Add(), n, change),)


def plain(activation: ops.Op) -> Cell:
    """Return the cell `h' = activation(W x + U h + b)`."""

    def cell(make: Maker, x: int, state: State, weights: Weights) -> State:
        total = make.append(ops.Add(), *_both(make, x, state[0], weights))
        return (make.append(activation, total),)

    return cell


def _both(make: Maker, x: int, h: int, weights: Weights) -> tuple[int, int]:
    """Append what the input and the state before add to the gates."""
    of_x, of_h, *biases = weights
    first, second = biases or (None, None)
    assert of_x is not None and of_h is not None
    return make.append(ops.Linear(of_x, first), x), make.append(ops.Linear(of_h, second), h)


def _parts(make: Maker, gates: int, count: int) -> list[int]:
    size = make.shape_of(gates)[-1] // count
    return [make.append(ops.Slice((slice(k * size, (k + 1) * size),)), gates) for k in range(count)]


def unrolled(
    make: Maker, steps: Sequence[int], state: State, cell: Cell, weights: Weights
) -> tuple[list[int], State]:
    """Append a layer: what it keeps as h after each step, and its last state."""
    outputs = []
    for x in steps:
        state = cell(make, x, state, weights)
        outputs.append(state[0])
    return outputs, state


def layers(
    make: Maker,
    x: int,
    states: Sequence[State],
    cell: Cell,
    weights: Sequence[Weights],
    directions: int,
) -> tuple[int, list[State]]:
    """Append layers over a sequence (the first dimension of samples), one after the other.

    `states` and `weights` are by layer and direction. Also returns the last states.
    """
    length = make.shape_of(x)[0]
    steps = [make.append(ops.Slice((t,)), x) for t in range(length)]
    ends = []
    for first in range(0, len(weights), directions):
        found = []
        for k in range(first, first + directions):
            backwards = (k - first) == 1
            inputs = steps[::-1] if backwards else steps
            outputs, end = unrolled(make, inputs, states[k], cell, weights[k])
            found.append(outputs[::-1] if backwards else outputs)
            ends.append(end)
        steps = [
            both[0] if directions == 1 else make.append(ops.Concat(1), *both)
            for both in zip(*found, strict=True)
        ]
    (size,) = make.shape_of(steps[0])
    rows = [make.append(ops.Reshape((1, size)), step) for step in steps]
    return (rows[0] if length == 1 else make.append(ops.Concat(1), *rows)), ends
