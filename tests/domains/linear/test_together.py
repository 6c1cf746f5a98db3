"""Slopes of the neurons of several boxes at once: sound, as tight as one after the other."""

from __future__ import annotations

import pytest
import torch
from linear_helpers import EPS, many_points, small_box, small_network
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import ALPHA, CROWN, Effort, relax
from tightrope.graph import Graph, evaluate

BATCH = 4
KINDS = pytest.mark.parametrize("kind", ["dense", "conv", "residual"])
LAYERS = pytest.mark.parametrize("layer", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Tanh()], ids=str)


def everything(graph: Graph, points: Tensor) -> dict[int, Tensor]:
    """Return the values of all nodes."""
    values = {0: points}
    for i, node in enumerate(graph.nodes[1:], start=1):
        values[i] = evaluate.RULES[type(node.op)](node.op, *(values[j] for j in node.inputs))
    return values


def widths(found: Relaxation) -> Tensor:
    """Return the sum of the widths of what activations read, for each box."""
    boxes = [found.boxes[found.graph.nodes[i].inputs[0]] for i in found.lines]
    return torch.stack([(b.upper - b.lower).flatten(1).sum(1) for b in boxes]).sum(0)


@LAYERS
@KINDS
def test_all_values_lie_between_the_bounds(kind: str, layer: nn.Module) -> None:
    graph = small_network(kind, layer)
    box = small_box(graph, 0.4, batch=BATCH)
    found = relax(graph, box, effort=ALPHA, rounding=EPS)
    for k in range(BATCH):
        values = everything(graph, many_points(box[k : k + 1]))
        assert values.keys() >= found.boxes.keys()
        for i, bounds in found.boxes.items():
            assert (values[i] >= bounds.lower[k] - 1e-12).all()
            assert (values[i] <= bounds.upper[k] + 1e-12).all()


@KINDS
def test_they_are_as_tight_as_one_after_the_other(kind: str) -> None:
    graph = small_network(kind, nn.ReLU())
    box = small_box(graph, 0.4, batch=BATCH)
    together, loose = (relax(graph, box, effort=e, rounding=EPS) for e in (ALPHA, CROWN))
    alone = [relax(graph, box[k : k + 1], effort=ALPHA, rounding=EPS) for k in range(BATCH)]
    best, found, worst = torch.cat([widths(one) for one in alone]), widths(together), widths(loose)
    assert (found <= worst + 1e-9).all() and (worst - best).max() > 1e-3
    assert (found - best <= 0.05 * (worst - best) + 1e-5).all()


@KINDS
def test_nobody_depends_on_the_others_or_on_how_many_fit(kind: str) -> None:
    graph = small_network(kind, nn.ReLU())
    box = small_box(graph, 0.4, batch=BATCH)
    order = torch.tensor([2, 0, 3, 1])
    found = relax(graph, box, effort=ALPHA, rounding=EPS)
    moved = Box(*(t[order] for t in box.corners))
    for other in (
        relax(graph, moved, effort=ALPHA, rounding=EPS),
        relax(graph, moved, effort=Effort(memory=1), rounding=EPS),
    ):
        for i, bounds in found.boxes.items():
            near = {"atol": 1e-5, "rtol": 1e-5}  # slopes are searched for in float32
            assert torch.allclose(other.boxes[i].lower, bounds.lower[order], **near)
            assert torch.allclose(other.boxes[i].upper, bounds.upper[order], **near)


@KINDS
def test_what_takes_too_long_keeps_its_slopes(kind: str) -> None:
    graph = small_network(kind, nn.ReLU())
    box = small_box(graph, 0.4, batch=BATCH)
    crown = relax(graph, box, effort=CROWN)
    found = relax(graph, box, effort=Effort(5, work=0.0))
    for i, bounds in crown.boxes.items():
        assert torch.equal(found.boxes[i].lower, bounds.lower)
        assert torch.equal(found.boxes[i].upper, bounds.upper)
