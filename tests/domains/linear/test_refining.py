"""Signs that are tested: slopes of their own, better bounds before them, nothing done twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_helpers import EPS, small_box
from networks import points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.deadline import OutOfTimeError
from tightrope.domains import interval
from tightrope.domains.linear import crown, refining
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.crown import Effort, relax
from tightrope.domains.linear.local import best_sides
from tightrope.graph import Graph, ops, trace
from tightrope.graph.graph import Node
from tightrope.graph.maxpool import expand_max_pools

pytestmark = pytest.mark.usefixtures("one_thread")

CROWN, ALPHA = Effort(0), Effort(10)


def counting(seed: int = 0) -> Graph:
    """A network that tests the sign of every pixel and compares the answers with ones."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(2, 6, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(4, 1, 1),
    ).double()
    with torch.no_grad():
        for layer in module[::2]:
            layer.weight *= 2.5
        center = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(seed)).double()
        module[-1].bias -= module(center / 2).median()  # as many signs of one kind as of the other
    nodes = list(trace(module, (2, 7, 8)).detach().nodes)
    shape, last = nodes[-1].shape, len(nodes)
    one = torch.ones((), dtype=torch.float64)
    nodes.append(Node("tests", ops.Step("positive"), (last - 1,), shape))
    nodes.append(Node("less one", ops.Shift(one, True), (last,), shape))
    nodes.append(Node("equal", ops.Step("zero"), (last + 1,), shape))
    return Graph(tuple(nodes))


def open_signs(found: Relaxation) -> Tensor:
    """Where the sign of what is tested is not known."""
    lower, upper = found.boxes[len(found.graph.nodes) - 4].corners
    return (lower <= 0) & (upper >= 0)


def assert_sound(found: Relaxation) -> None:
    points = points_in(found.box, 300)
    for i in range(1, len(found.graph.nodes)):
        values = Graph(found.graph.nodes[: i + 1])(points)
        lower, upper = found.boxes[i].corners
        assert (values >= lower - 1e-12).all() and (values <= upper + 1e-12).all()


@pytest.mark.parametrize("seed", range(3))
def test_more_signs_are_found_out_and_none_is_wrong(seed: int) -> None:
    graph = counting(seed)
    box = small_box(graph, 0.1, seed=seed)
    plain = relax(graph, box, effort=CROWN, rounding=EPS)
    better = relax(graph, box, effort=ALPHA, rounding=EPS)
    assert_sound(better)
    assert not (open_signs(better) & ~open_signs(plain)).any()
    assert open_signs(better).sum() < open_signs(plain).sum()
    # What has been compared is a whole number: its sums are exact, and so is the answer.
    settled = ~open_signs(better)
    lower, upper = better.boxes[better.output].corners
    assert torch.equal(lower[settled], upper[settled])


def test_rounds_of_better_bounds_settle_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for rounds in (0, 4):
        monkeypatch.setattr(refining, "ROUNDS", rounds)
        found = [
            relax(graph, small_box(graph, 0.05, seed=k), effort=ALPHA, rounding=EPS)
            for k, graph in enumerate(map(counting, range(3)))
        ]
        counts.append(sum(int(open_signs(f).sum()) for f in found))
    assert counts[1] < counts[0]


@pytest.mark.parametrize("seed", range(3))
def test_optimised_slopes_are_sound_and_not_worse(seed: int) -> None:
    graph = Graph(counting(seed).nodes[:-3])
    found = relax(graph, small_box(graph, 0.3, seed=seed), effort=CROWN, rounding=EPS)
    places = torch.arange(56)
    values = graph(points_in(found.box, 300)).flatten(1)
    gained = 0.0
    for sign in (1.0, -1.0):
        each = torch.full((56,), sign, dtype=torch.float64)
        plain = best_sides(found, found.output, places, each, iterations=0)
        better = best_sides(found, found.output, places, each, iterations=10)
        assert (sign * values >= better - 1e-12).all()
        assert (better >= plain - 1e-4).all()  # the search is in float32
        gained += float((better - plain).sum())
    assert gained > 0.5


def test_bounds_that_are_settled_are_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = counting()
    box = small_box(graph, 0.1)
    settled: dict[int, Box] = {}
    first = relax(graph, box, effort=CROWN, rounding=EPS, settled=settled)
    assert settled

    def never(*_: Any) -> None:
        raise AssertionError("they were")

    monkeypatch.setattr(crown._Tightening, "of", never)
    again = relax(graph, box, effort=CROWN, rounding=EPS, settled=settled)
    for i, found in first.boxes.items():
        for a, b in zip(found.corners, again.boxes[i].corners, strict=True):
            assert torch.equal(a, b)


def test_bounds_stay_when_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = counting()
    box = small_box(graph, 0.1)
    settled: dict[int, Box] = {}
    calls = iter(range(6))

    def check() -> None:
        if next(calls, None) is None:
            raise OutOfTimeError

    with monkeypatch.context() as patch:
        patch.setattr(crown, "check_time", check)
        with pytest.raises(OutOfTimeError):
            relax(graph, box, effort=CROWN, rounding=EPS, settled=settled)
    assert settled.keys() == {3, 5}
    whole = relax(graph, box, effort=CROWN, rounding=EPS)
    rest = relax(graph, box, effort=CROWN, rounding=EPS, settled=settled)
    for i, found in whole.boxes.items():
        for a, b in zip(found.corners, rest.boxes[i].corners, strict=True):
            assert torch.equal(a, b)


def test_better_slopes_come_after_default_ones() -> None:
    """A network of ReLUs alone: what default slopes settled is bounded again with better ones."""
    graph = Graph(counting().nodes[:-3])
    box = small_box(graph, 0.3)
    settled: dict[int, Box] = {}
    plain = relax(graph, box, effort=CROWN, rounding=EPS, settled=settled)
    better = relax(graph, box, effort=ALPHA, rounding=EPS, settled=settled)
    widths = [(f.boxes[5].upper - f.boxes[5].lower).sum() for f in (plain, better)]
    assert widths[1] < 0.99 * widths[0]


# --- sums of whole numbers --------------------------------------------------------------------


@pytest.mark.parametrize("op", [ops.Add(), ops.Sub()])
def test_sums_of_whole_numbers_are_exact(op: ops.Op) -> None:
    def box(*numbers: float) -> Box:
        values = torch.tensor([numbers], dtype=torch.float64)
        return Box(values, values)

    huge = 2.0**52
    found = interval.RULES[type(op)](
        op, box(3.0, 0.0, 0.5, 3.0, huge, 1.0), box(1.0, 0.0, 1.0, 0.1, 1.0, huge), rounding=EPS
    )
    thick = (found.lower < found.upper).tolist()[0]
    assert thick == [False, False, True, True, True, True]


def test_a_shift_by_whole_numbers_is_exact() -> None:
    values = torch.tensor([[2.0, 0.3]], dtype=torch.float64)
    offset = torch.tensor([5.0, 5.0], dtype=torch.float64)
    for subtract in (False, True):
        found = interval.RULES[ops.Shift](
            ops.Shift(offset, subtract), Box(values, values), rounding=EPS
        )
        assert (found.lower == found.upper).tolist() == [[True, False]]
        assert float(found.lower[0, 0]) == (-3.0 if subtract else 7.0)


def binarised(seed: int) -> Graph:
    """Signs of pixels, convolved, pooled and compared again: nothing is pulled behind the signs."""
    torch.manual_seed(seed)
    first, second = nn.Conv2d(1, 4, 3).double(), nn.Conv2d(4, 3, 3, bias=False).double()
    layers = (first, nn.ReLU(), second, nn.MaxPool2d(2))
    module = nn.Sequential(*layers, nn.Conv2d(3, 3, 1).double())
    nodes: list[Node] = []
    for node in trace(module, (1, 10, 10)).detach().nodes:
        signs = ops.Step("positive") if isinstance(node.op, ops.Relu) else node.op
        nodes.append(Node(node.name, signs, node.inputs, node.shape))
    nodes.append(Node("tests", ops.Step("positive"), (len(nodes) - 1,), nodes[-1].shape))
    return expand_max_pools(Graph(tuple(nodes)))


@pytest.mark.parametrize("seed", range(3))
def test_slopes_that_make_no_difference_are_left_alone(seed: int) -> None:
    graph = binarised(seed)
    assert_sound(relax(graph, small_box(graph, 0.05, seed=seed), effort=ALPHA, rounding=EPS))
