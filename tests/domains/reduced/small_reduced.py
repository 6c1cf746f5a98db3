"""Reduced networks written down neuron by neuron, and their values as fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from linear_helpers import EPS
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.reduced.reduction import Layer, Reduced, Rows
from tightrope.domains.reduced.splits import Subproblems

Number = float | int


def floats(values: Sequence[Number]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Row:
    """`inner y + outer x + constant`; `inner` may end early."""

    outer: Sequence[Number]
    inner: Sequence[Number] = ()
    constant: Number = 0.0
    slack: Number = 0.0


@dataclass(frozen=True)
class Neuron(Row):
    """A neuron with its bounds, and what a subproblem says of it."""

    lower: Number = -1.0
    upper: Number = 1.0
    sign: int = 0
    alpha: Number = 0.0
    beta: Number = 0.0


def _rows(rows: Sequence[Row], neurons: int, inputs: int) -> Rows:
    inner = [[*row.inner, *[0.0] * (neurons - len(row.inner))] for row in rows]
    outer = [list(row.outer) for row in rows]
    return Rows(
        floats(inner).view(len(rows), neurons),
        floats(outer).view(len(rows), inputs),
        floats([row.constant for row in rows]),
        floats([row.slack for row in rows]),
    )


def reduced(
    layers: Sequence[Sequence[Neuron]],
    rows: Sequence[Row],
    lower: Sequence[Number],
    upper: Sequence[Number],
) -> Reduced:
    """Return the network of these neurons on a box."""
    neurons = [neuron for layer in layers for neuron in layer]
    parts, start = [], 0
    for position, layer in enumerate(layers):
        span = slice(start, start + len(layer))
        places = torch.arange(len(layer))
        bias = torch.zeros(len(layer), dtype=torch.float64)
        parts.append(Layer(position, places, span, 0.0, bias))
        start = span.stop
    return Reduced(
        layers=tuple(parts),
        neurons=_rows(neurons, len(neurons), len(lower)),
        lower=floats([neuron.lower for neuron in neurons]),
        upper=floats([neuron.upper for neuron in neurons]),
        rows=_rows(rows, len(neurons), len(lower)),
        box=Box(floats(lower)[None], floats(upper)[None]),
        rounding=EPS,
    )


def subproblem(
    layers: Sequence[Sequence[Neuron]], *, row: int = 0, gamma: Sequence[Number] = ()
) -> Subproblems:
    """Return the subproblem that the neurons describe."""
    neurons = [neuron for layer in layers for neuron in layer]
    return Subproblems(
        row=torch.tensor([row]),
        sign=torch.tensor([[neuron.sign for neuron in neurons]], dtype=torch.int8),
        alpha=floats([neuron.alpha for neuron in neurons])[None],
        beta=floats([neuron.beta for neuron in neurons])[None],
        gamma=floats(gamma)[None],
        region=torch.zeros(1, dtype=torch.long),
    )


def exact_value(row: Row, outputs: Sequence[Fraction], x: Sequence[Number]) -> Fraction:
    """Return a row's value without rounding."""
    terms = zip((*row.inner, *row.outer), (*outputs[: len(row.inner)], *x), strict=True)
    return sum((Fraction(a) * Fraction(v) for a, v in terms), Fraction(row.constant))


def exact_rows(
    layers: Sequence[Sequence[Neuron]], rows: Sequence[Row], x: Sequence[Number]
) -> list[Fraction]:
    """Return the rows' values at a point, after checking that the subproblem holds it."""
    outputs: list[Fraction] = []
    for layer in layers:
        values = [exact_value(neuron, outputs, x) for neuron in layer]
        for neuron, value in zip(layer, values, strict=True):
            assert neuron.sign * value >= 0, "the point lies outside of the splits"
            assert Fraction(neuron.lower) <= value <= Fraction(neuron.upper)
        outputs += [max(Fraction(0), value) for value in values]
    return [exact_value(row, outputs, x) for row in rows]
