"""Recurrent layers of ONNX, of one length: written out step by step."""

from __future__ import annotations

import numpy as np
import torch

from tightrope.graph import composed, masks, ops, recurrent
from tightrope.graph.values import refuse
from tightrope.nets.onnx.builder import Argument, Builder, Call, Converter, Value

# How many gates a cell has, in which order ONNX keeps those that the cells here take in a row.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_ACTIVATIONS = {
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "RNN": ["Tanh"],
}
_CELLS = {"LSTM": recurrent.lstm, "GRU": recurrent.gru, "RNN": recurrent.plain(ops.Tanh())}


def _layer(build: Builder, call: Call) -> list[Value]:
    value, kind = call.value(), call.kind
    way = call.get("direction", "forward")
    count = 2 if way == "bidirectional" else 1
    _check(call, value, count)
    length, _, features = value.shape
    of_x, of_h = call.constant(1), call.constant(2)
    assert of_x is not None and of_h is not None
    size = of_h.shape[-1]
    cells = [_weights(build, call, k, size) for k in range(count)]
    start = build.at(value, (length, features))
    if way == "reverse":
        start = _turned(build, start)
    states = [_start(build, call, k, size, start) for k in range(count)]
    found, ends = recurrent.layers(build, start, states, _CELLS[kind], cells, count)
    if way == "reverse":
        found = _turned(build, found)
    found = build.append(ops.Reshape((length, count, size)), found)
    results = [build.place(found, (length, count, 1, size))]
    for i in range(len(states[0])):
        rows = [build.append(ops.Reshape((1, size)), end[i]) for end in ends]
        last = rows[0] if count == 1 else build.append(ops.Concat(1), *rows)
        results.append(build.place(last, (count, 1, size)))
    return results[: call.results]


def _check(call: Call, value: Value, count: int) -> None:
    kind = call.kind
    refuse(len(value.shape) != 3 or value.shape[1] != 1, f"sequences of shape {value.shape}")
    refuse(bool(call.get("layout", 0)), "layout=1")
    refuse("clip" in call.attributes or bool(call.get("input_forget", 0)), "clip or input_forget")
    refuse(kind == "GRU" and not call.get("linear_before_reset", 0), "linear_before_reset=0")
    usual = _ACTIVATIONS[kind] * count
    given = [a if isinstance(a, str) else a.decode() for a in call.get("activations", usual)]
    refuse(given != usual, f"activations={given}")
    refuse(len(call.inputs) > 4 and call.inputs[4] is not None, "sequence_lens")
    refuse(len(call.inputs) > 7 and call.inputs[7] is not None, "peepholes")


def _weights(build: Builder, call: Call, k: int, size: int) -> list[torch.Tensor]:
    """Return weights of one direction, and biases, with the gates in order."""
    order, found = _GATES[call.kind], []
    gates = len(order)
    for i in (1, 2):
        matrix = call.constant(i)
        assert matrix is not None
        found.append(build.tensor(_sorted(matrix[k], order, size)))
    bias = call.constant(3)
    if bias is not None:
        for half in (bias[k][: gates * size], bias[k][gates * size :]):
            found.append(build.tensor(_sorted(half, order, size)))
    return found


def _sorted(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], order: tuple[int, ...], size: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    parts = array.reshape(len(order), size, *array.shape[1:])
    return parts[list(order)].reshape(array.shape)


def _start(build: Builder, call: Call, k: int, size: int, beside: int) -> recurrent.State:
    """Return the states of one direction before the first step: zero unless they are given."""
    names = (5, 6) if call.kind == "LSTM" else (5,)
    given = [call.inputs[i] if i < len(call.inputs) else None for i in names]
    return tuple(_state(build, g, k, size, beside) for g in given)


def _state(build: Builder, given: Argument, k: int, size: int, beside: int) -> int:
    if isinstance(given, Value):
        part = ops.Slice((k,))
        return build.append(part, build.at(given, (given.shape[0], size)))
    constant = torch.zeros(size, dtype=build.dtype) if given is None else build.tensor(given[k, 0])
    return masks.constant_like(build, beside, constant)


def _turned(build: Builder, x: int) -> int:
    shape = build.shape_of(x)
    return composed.taken(build, x, composed.places(shape).flip(0))


CONVERTERS: dict[str, Converter] = dict.fromkeys(("LSTM", "GRU", "RNN"), _layer)
