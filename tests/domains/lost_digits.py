"""Networks that lose digits, and the check of strict intervals in exact arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from exact import exact_values, fractions, inside
from hypothesis import strategies as st
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, trace

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def digits(dtype: torch.dtype) -> int:
    """Return the number of bits after which the dtype rounds: 24 or 53."""
    return 1 - int(torch.tensor(eps(dtype)).log2().item())


def strict_bounds(graph: Graph, box: Box) -> dict[int, Box]:
    everything = range(len(graph.nodes))
    rounding = eps(box.lower.dtype)
    with torch.no_grad():
        return interval.bounds(graph, box, keep=everything, rounding=rounding)[1]


def assert_exactly_inside(graph: Graph, box: Box, points: Tensor) -> None:
    """Check every node's exact value at each point against its strict bounds (batch of one)."""
    bounds = strict_bounds(graph, box)
    for point in points:
        for i, exact in exact_values(graph, point).items():
            assert inside(bounds[i], exact), f"node {i}, {graph.nodes[i].op}"


def assert_exact_margins(graph: Graph, box: Box, points: Tensor) -> None:
    """Check the strict margins for every label against exact differences of outputs."""
    last, classes = len(graph.nodes) - 1, graph.output_shape[0]
    outputs = [exact_values(graph, point)[last] for point in points]
    repeated = box.map(lambda t: t.expand(classes, *t.shape[1:]))
    with torch.no_grad():
        lower, _ = interval.margins(
            graph, repeated, torch.arange(classes), rounding=eps(box.lower.dtype)
        )
    for label, row in enumerate(fractions(lower)):
        assert row[label] == 0
        for output in outputs:
            assert (output[label] - output >= row).all(), f"label {label}"


@st.composite
def cancelling(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Graph, Box]:
    """Draw a dense network and a box whose numbers are powers of two of very different size.

    Sums of those lose bits beyond 24 (53) all the time. Rows come in pairs that are opposite
    but for small entries, so that the next layer brings large parts to cancel.
    """
    reach = digits(dtype) + 4
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def powers(*shape: int) -> Tensor:
        exponents = torch.randint(-reach, reach + 1, shape, generator=generator)
        signs = torch.randint(-1, 2, shape, generator=generator)
        return (signs * 2.0 ** exponents.double()).to(dtype)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = nn.Linear(inputs, outputs).to(dtype)
        rows, small = powers(outputs, inputs), powers(outputs, inputs).clamp(-1, 1)
        rows[1::2] = small[1::2] - rows[: 2 * (outputs // 2) : 2]
        layer.weight, layer.bias = nn.Parameter(rows), nn.Parameter(powers(outputs))
        return layer

    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(linear(inputs, outputs))
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.3), nn.Identity()])))
    graph = trace(nn.Sequential(*layers, linear(widths[-1], 3)), (widths[0],)).detach()
    corners = powers(2, widths[0])
    return graph, Box(corners.amin(0, keepdim=True), corners.amax(0, keepdim=True))
