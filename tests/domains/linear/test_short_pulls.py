"""Linear bounds over the last few layers, by which most signs are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from linear_helpers import EPS, many_points, output_rows, small_box, small_network
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear import crown
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import CROWN, CROWN_IBP, relax
from tightrope.graph import Graph, trace
from tightrope.graph.evaluate import RULES

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = replace(CROWN, forms=False)
KINDS = ("dense", "conv", "residual")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_over_the_last_layers_hold(kind: str, batch: int) -> None:
    """Wherever the pass back stops."""
    graph = small_network(kind, nn.ReLU())
    box = small_box(graph, 0.5, batch=batch)
    found = relax(graph, box, effort=CROWN, rounding=EPS)
    matrix = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = output_rows(found, matrix)
    whole = found.lower(found.output, rows).view(batch, -1)
    for stop in range(found.output):
        bounds = found.lower(found.output, rows, stop=stop).view(batch, -1)
        assert bool(torch.isfinite(bounds).all())
        for k in range(batch):
            values = graph(many_points(box[k : k + 1])) @ matrix.T
            assert bool((values >= bounds[k]).all())
        if stop == 0:
            assert torch.equal(bounds, whole)
    boxes = found.boxes[found.output]
    low, high = (t.flatten(1) for t in boxes.corners)
    last = (low @ matrix.clamp(min=0).T + high @ matrix.clamp(max=0).T).view(batch, -1)
    bounds = found.lower(found.output, rows, stop=found.output).view(batch, -1)
    torch.testing.assert_close(bounds, last)
    assert bool((bounds <= last).all())


def deep(layers: int, width: int = 12) -> Graph:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(4, width), nn.ReLU()]
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return trace(nn.Sequential(*parts, nn.Linear(width, 3)).double(), (4,)).detach()


def signs(found: Relaxation) -> list[Tensor]:
    boxes = [found.boxes[found.graph.nodes[i].inputs[0]] for i in sorted(found.lines)]
    return [(b.lower < 0) & (b.upper > 0) for b in boxes]


def test_few_signs_are_looked_for_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the last layers show are the same, and what is unstable is bounded as before."""
    graph = deep(10, 24)
    box = Box(*(torch.full((1, 4), 0.3 + d, dtype=torch.float64) for d in (-0.02, 0.02)))
    monkeypatch.setattr(crown, "TRIED", 1)
    rows = {True: 0, False: 0}
    lower = Relaxation.lower

    def counted(self: Relaxation, target: int, rows_: Any, **options: Any) -> Tensor:
        rows[bool(options.get("stop"))] += len(rows_.values)
        return lower(self, target, rows_, **options)

    monkeypatch.setattr(Relaxation, "lower", counted)
    short = relax(graph, box, effort=PLAIN, rounding=EPS)
    at_length, near = rows[False], rows[True]
    monkeypatch.setattr(crown, "SHORT", ())
    rows[False] = 0
    whole = relax(graph, box, effort=PLAIN, rounding=EPS)
    assert near > 0 and at_length < rows[False]
    for one, other in zip(signs(short), signs(whole), strict=True):
        assert not bool((other & ~one).any())  # nothing is decided by the way there
        assert int((one & ~other).sum()) <= 1
    values = graph.propagate(RULES, many_points(box), keep=range(len(graph.nodes)))
    for i, bounds in short.boxes.items():
        assert bool(((values[i] >= bounds.lower) & (values[i] <= bounds.upper)).all())


def test_where_they_decide_little_the_last_layers_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = deep(8)
    box = Box(*(torch.full((1, 4), d, dtype=torch.float64) for d in (-3.0, 3.0)))
    tried: list[int] = []
    within = crown._Tightening._within

    def counted(self: Any, stop: int, bounds: Box, needs: Tensor) -> Box:
        if stop:
            tried.append(int(needs.sum()))
        return within(self, stop, bounds, needs)

    monkeypatch.setattr(crown._Tightening, "_within", counted)
    monkeypatch.setattr(crown, "UNDECIDED", -1.0)
    relax(graph, box, effort=PLAIN, rounding=EPS)
    assert tried and max(tried) == 1
    tried.clear()
    relax(graph, box, effort=CROWN_IBP, rounding=EPS)
    assert not tried
