"""What rounding errors are measured by: for every operation, the sum of what it adds up."""

from __future__ import annotations

import pytest
import torch
from linear_helpers import wired
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.magnitudes import Magnitudes, largest, magnitudes
from tightrope.graph import ops


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


NORM = ops.BatchNorm(
    floats(-2.0, 3.0), floats(-5.0, 7.0), floats(-4.0, 1.0), floats(0.25, 1.0), 0.0, None, None
)
KERNEL = floats(1.0, -2.0).view(1, 2, 1, 1)
POOL = ((1, 2), (1, 2), (0, 0))

# Operation, shapes, and the terms at the input (-4, 5).
CASES = {
    "linear": (ops.Linear(floats(1.0, -2.0)[None], floats(-3.0)), (2,), (17.0,)),
    "unbiased": (ops.Linear(floats(-1.0, 2.0)[None], None), (2,), (14.0,)),
    "conv": (
        ops.Conv2d(KERNEL, floats(-3.0), (1, 1), (0, 0), (1, 1), 1),
        (2, 1, 1),
        (17.0,),
    ),
    "batchnorm": (NORM, (2,), (4 * (4 + 4) + 5.0, 3 * (5 + 1) + 7.0)),
    "shift": (ops.Shift(floats(-1.0, 2.0)), (2,), (5.0, 7.0)),
    "scale": (ops.Scale(floats(-3.0, 2.0)), (2,), (12.0, 10.0)),
    "divide": (ops.Scale(floats(-0.5, 2.0), divide=True), (2,), (8.0, 2.5)),
    "average": (ops.AvgPool(*POOL, False, True), (1, 1, 2), (4.5,)),
    "maximum": (ops.MaxPool(*POOL, (1, 1), False), (1, 1, 2), (5.0,)),
    "pad": (ops.Pad((0, 1), -7.0), (2,), (4.0, 5.0, 7.0)),
    "relu": (ops.Relu(), (2,), (4.0, 5.0)),
    "leaky": (ops.LeakyRelu(0.5), (2,), (4.0, 5.0)),
    "steep": (ops.LeakyRelu(3.0), (2,), (12.0, 15.0)),
    "sigmoid": (ops.Sigmoid(), (2,), (1.0, 1.0)),
    "tanh": (ops.Tanh(), (2,), (1.0, 1.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_terms_of_operations(name: str) -> None:
    op, shape, expected = CASES[name]
    x = floats(-4.0, 5.0).view(1, *shape)
    terms = magnitudes(wired(shape, (op, (0,), ())), {0: Box(x, x)})
    assert terms[1].flatten().tolist() == list(expected)


@pytest.mark.parametrize("op", [ops.Add(), ops.Sub()])
def test_terms_of_joins(op: ops.Op) -> None:
    x = floats(-4.0, 5.0)[None]
    graph = wired((2,), (ops.Shift(floats(-1.0)), (0,), (2,)), (op, (0, 1), (2,)))
    assert magnitudes(graph, {0: Box(x, x)})[2].tolist() == [[9.0, 11.0]]


def test_the_largest_values_of_a_box() -> None:
    box = Box(floats(-4.0, -1.0, 2.0)[None], floats(1.0, 3.0, 2.5)[None])
    assert largest(box).tolist() == [[4.0, 3.0, 2.5]]


def test_bounds_limit_what_is_handed_on_but_not_what_was_added_up() -> None:
    x = floats(-4.0, 5.0)[None]
    graph = wired(
        (2,), (ops.Shift(floats(4.0, -5.0)), (0,), (2,)), (ops.Scale(floats(2.0)), (1,), (2,))
    )
    found = Magnitudes(graph, Box(x, x))
    found.visit(1)
    found.hold(1, Box(floats(-0.5, -20.0)[None], floats(0.25, 20.0)[None]))
    found.visit(2)
    assert found.terms[1].tolist() == [[8.0, 10.0]]
    assert found.terms[2].tolist() == [[1.0, 20.0]]
