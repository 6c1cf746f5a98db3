"""The domains as one fuzz sees them: bounds of every node, and how far rounding may carry them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from linear_helpers import EFFORTS, assert_rows_below, signed_rows
from networks import magnitudes, rounding_errors, roundings
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval, zonotope
from tightrope.domains.linear.crown import relax
from tightrope.graph import Graph

Errors = dict[int, Tensor]


@dataclass(frozen=True)
class Bounds:
    """Boxes of all nodes; `check(points, slack)` says what else has to hold of the output."""

    boxes: Mapping[int, Box]
    check: Callable[[Tensor, Tensor], None] = lambda points, slack: None


Bounding = Callable[[Graph, Box, float], Bounds]  # the last is the rounding that is allowed for
Margins = Callable[[Graph, Box, Tensor, float], Tensor]


@dataclass(frozen=True)
class Domain:
    """A domain under test.

    `draw` chooses one of its ways to bound a network. `errors` are the rounding errors of plain
    arithmetic, of which `plain` times as much may be missing from its bounds, `strict` times as
    much in strict mode (None: it has none) and `apart` times as much between two batches.
    """

    draw: Callable[[st.DataObject], Bounding]
    errors: Callable[[Graph, Box, torch.dtype], Errors]
    plain: float
    strict: float | None
    apart: float
    margins: Margins | None = None


def _interval(graph: Graph, box: Box, rounding: float) -> Bounds:
    everything = range(len(graph.nodes))
    return Bounds(interval.bounds(graph, box, keep=everything, rounding=rounding)[1])


def _interval_margins(graph: Graph, box: Box, labels: Tensor, rounding: float) -> Tensor:
    return interval.margins(graph, box, labels, rounding=rounding)[0]


def _linear(data: st.DataObject) -> Bounding:
    effort = EFFORTS[data.draw(st.sampled_from(sorted(EFFORTS)))]

    def bounding(graph: Graph, box: Box, rounding: float) -> Bounds:
        found = relax(graph, box, effort=effort, rounding=rounding)
        generator = torch.Generator().manual_seed(0)
        matrix = signed_rows(graph.output_shape[0], generator, box.lower.dtype)

        def check(points: Tensor, slack: Tensor) -> None:
            off = 2 * slack.flatten(1).double() @ matrix.abs().t().double()
            # Behind jumps anything goes: infinity times zero says nothing either.
            assert_rows_below(found, points, matrix, off.nan_to_num(nan=math.inf, posinf=math.inf))

        return Bounds(found.boxes, check)

    return bounding


def _zonotope(graph: Graph, box: Box, rounding: float) -> Bounds:
    assert not rounding
    return Bounds(zonotope.bounds(graph, box, keep=range(len(graph.nodes)))[1])


def _zonotope_margins(graph: Graph, box: Box, labels: Tensor, rounding: float) -> Tensor:
    assert not rounding
    return zonotope.margins(graph, box, labels)[0]


def zonotope_errors(graph: Graph, box: Box, dtype: torch.dtype) -> Errors:
    """Return how far rounding can carry the zonotope of each node.

    Each error term is one more thing to be added up, and there are at most as many as values.
    """
    terms = sum(torch.Size(node.shape).numel() for node in graph.nodes)
    unit = (roundings(graph) + terms) * torch.finfo(dtype).eps
    return {i: unit * scale for i, scale in magnitudes(graph, box).items()}


DOMAINS = {
    # Strict boxes cover the exact values and what float64 makes of them: the slack of each rule
    # is at least twice the rounding error of the operation.
    "interval": Domain(
        lambda data: _interval, rounding_errors, 2, 0, apart=1, margins=_interval_margins
    ),
    # Strict lines allow for the rounding of plain evaluation more often than not, but they promise
    # exact values only (see test_linear_strict). A neuron next to zero may be stable in one batch
    # and unstable in another.
    "linear": Domain(_linear, rounding_errors, 8, 2, apart=64),
    "zonotope": Domain(
        lambda data: _zonotope, zonotope_errors, 4, None, apart=8, margins=_zonotope_margins
    ),
}
