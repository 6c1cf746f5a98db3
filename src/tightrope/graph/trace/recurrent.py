"""Converters of recurrent layers and cells, of which sequences have one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import masks, ops, recurrent
from tightrope.graph.trace.constants import row_of
from tightrope.graph.values import Composed, Layered, Value, refuse


def _start(make: Any, given: Any, beside: int) -> int:
    """Return the node of a state before the first step: a value, or a constant."""
    if isinstance(given, Value):
        return given.position
    return masks.constant_like(make, beside, row_of(given, len(make.probe)))


def _sequence(cell: recurrent.Cell, kept: int) -> Callable[..., Any]:
    """Return the converter of layers over sequences, of cells that keep so many states."""

    def convert(x: Value, hx: Any, params: Sequence[Tensor], *options: Any) -> Any:
        refuse(not isinstance(params, list | tuple), "packed sequences")
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        refuse(not batch_first or len(x.shape) != 2, "sequences without batch_first=True")
        refuse(train and dropout > 0, "its result is random")
        directions = 2 if bidirectional else 1
        each = 4 if has_biases else 2
        count = num_layers * directions
        refuse(len(params) != each * count, "projections of its states")
        given = list(hx) if kept > 1 else [hx]
        weights = [list(params[k * each : (k + 1) * each]) for k in range(count)]

        def build(make: Any) -> Any:
            starts = []
            for k in range(count):
                parts = [_of_layer(g, k) for g in given]
                starts.append(tuple(_start(make, part, x.position) for part in parts))
            found, ends = recurrent.layers(make, x.position, starts, cell, weights, directions)
            last = [
                Layered(tuple(Value(e[i], make.shape_of(e[i])) for e in ends)) for i in range(kept)
            ]
            return (found, *last)

        return Composed(build)

    return convert


def _of_layer(given: Any, k: int) -> Any:
    """Return a layer's part of states that are given for all of them."""
    refuse(isinstance(given, Value), "first states that depend on the input")
    return given.values[k] if isinstance(given, Layered) else given[k]


def _cell(cell: recurrent.Cell, kept: int) -> Callable[..., Any]:
    def convert(
        x: Any,
        hx: Any,
        of_x: Tensor,
        of_h: Tensor,
        bias_x: Tensor | None = None,
        bias_h: Tensor | None = None,
    ) -> Any:
        refuse(not isinstance(x, Value), "an input that is a constant")
        given = list(hx) if kept > 1 else [hx]
        biases = () if bias_x is None else (bias_x, bias_h)

        def build(make: Any) -> Any:
            state = tuple(_start(make, g, x.position) for g in given)
            after = cell(make, x.position, state, (of_x, of_h, *biases))
            return after if kept > 1 else after[0]

        return Composed(build)

    return convert


# --- values along a dimension before the batch ----------------------------------------------


def picked_layer(x: Layered, dim: int, index: int) -> Value:
    """Return one of them; which ones there are is a dimension before the batch."""
    refuse(dim not in (0, -len(x.values[0].shape) - 2), "the batch behind another dimension")
    return x.values[index]


def only_layer(x: Layered, dim: int | None = None) -> Value:
    """Return the only one of them."""
    refuse(len(x.values) != 1 or dim not in (0, None), "the batch behind another dimension")
    return x.values[0]


def all_layers(x: Layered, dim: int = 0) -> tuple[Value, ...]:
    """Return all of them."""
    refuse(dim != 0, "the batch behind another dimension")
    return x.values


aten = torch.ops.aten

_tanh, _relu = recurrent.plain(ops.Tanh()), recurrent.plain(ops.Relu())

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.lstm: _sequence(recurrent.lstm, 2),
    aten.gru: _sequence(recurrent.gru, 1),
    aten.rnn_tanh: _sequence(_tanh, 1),
    aten.rnn_relu: _sequence(_relu, 1),
    aten.lstm_cell: _cell(recurrent.lstm, 2),
    aten.gru_cell: _cell(recurrent.gru, 1),
    aten.rnn_tanh_cell: _cell(_tanh, 1),
    aten.rnn_relu_cell: _cell(_relu, 1),
}

# What takes values along a dimension before the batch.
OF_LAYERS: dict[Any, Callable[..., Any]] = {
    aten.select: picked_layer,
    aten.squeeze: only_layer,
    aten.unbind: all_layers,
}
