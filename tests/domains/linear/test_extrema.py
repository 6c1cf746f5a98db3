"""Boxes of maxima, minima, halves and absolute values are exact, on ends and zero alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.graph import ops, trace
from tightrope.graph.halves import share_halves
from tightrope.precision import ROUNDING


class Both(nn.Module):
    """A function of two numbers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to the first and the second number."""
        return self.function(x[:, :1], x[:, 1:])


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "absolute value": lambda a, b: a.abs(),
    "slopes": lambda a, b: torch.nn.functional.leaky_relu(a, -0.5),
}
# Lower and upper ends of the two numbers.
BOXES = [
    ((-1.0, -2.0), (3.0, 5.0)),
    ((-4.0, 1.0), (2.0, 5.0)),
    ((1.0, -5.0), (2.0, -3.0)),
    ((-3.0, -1.0), (-1.0, 4.0)),
    ((0.0, 0.0), (0.0, 1.0)),
]


@pytest.mark.parametrize("ends", BOXES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_boxes_reach_what_the_function_does_and_hardly_more(name: str, ends: tuple) -> None:
    function = FUNCTIONS[name]
    graph = share_halves(trace(Both(function).double(), (2,)).detach())
    lower, upper = (torch.tensor([end], dtype=torch.float64) for end in ends)
    found = relax(graph, Box(lower, upper), effort=CROWN_IBP, rounding=ROUNDING)
    box = found.boxes[len(graph.nodes) - 1]
    share = torch.linspace(0, 1, 25, dtype=torch.float64)
    a, b = torch.meshgrid(*((lower + share[:, None] * (upper - lower)).T), indexing="ij")
    values = function(a, b)
    assert float(box.lower) <= float(values.min()) and float(values.max()) <= float(box.upper)
    if name != "slopes":  # of which the two sides are added up
        assert float(box.upper - box.lower) <= float(values.max() - values.min()) + 0.35


def test_both_halves_share_a_relu() -> None:
    graph = trace(Both(lambda a, b: a.abs()).double(), (2,)).detach()
    kinds = [type(node.op) for node in graph.nodes]
    assert kinds.count(ops.Relu) == 2
    shared = share_halves(graph)
    assert [type(node.op) for node in shared.nodes].count(ops.Relu) == 1
    x = torch.randn(50, 2, dtype=torch.float64)
    torch.testing.assert_close(shared(x), graph(x))
