"""How wide interval bounds are, on random networks; that they hold is in `test_soundness`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, rounding_errors

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = torch.finfo(torch.float64).eps


def all_bounds(graph: Graph, box: Box, rounding: float) -> dict[int, Box]:
    return interval.bounds(graph, box, keep=range(len(graph.nodes)), rounding=rounding)[1]


@settings(max_examples=60)
@given(data=st.data())
def test_strict_bounds_are_not_much_wider(data: st.DataObject) -> None:
    """What strict mode adds is of the size of the rounding errors, and never negative."""
    module = data.draw(networks())
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    plain, strict = all_bounds(graph, box, 0.0), all_bounds(graph, box, EPS)
    for i, error in rounding_errors(graph, box, torch.float64).items():
        down = plain[i].lower - strict[i].lower
        up = strict[i].upper - plain[i].upper
        for added in (down, up):
            assert (added >= -error).all()
            # 1e-250: each rule adds the smallest normal number against underflow, which
            # later layers multiply.
            assert (added <= 4 * error + 1e-250).all()


@settings(max_examples=30)
@given(data=st.data())
def test_smaller_boxes_have_smaller_bounds(data: st.DataObject) -> None:
    module = data.draw(networks())
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    center, radius = box.middle
    inner = Box(box.project(center - radius / 2), box.project(center + radius / 2))
    outer_bounds, inner_bounds = all_bounds(graph, box, 0.0), all_bounds(graph, inner, 0.0)
    for i, error in rounding_errors(graph, box, torch.float64).items():
        assert (inner_bounds[i].lower >= outer_bounds[i].lower - 2 * error).all()
        assert (inner_bounds[i].upper <= outer_bounds[i].upper + 2 * error).all()
