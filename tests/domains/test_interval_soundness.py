"""Interval bounds hold: no point of a box leaves the bounds of any node of any network."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in, rounding_errors
from torch import Tensor, nn

from tightrope.attacks import Steps, Targeted, pgd
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, evaluate, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS = [op for op in ops.ALL_OPS if op is not ops.Input]
EPS = torch.finfo(torch.float64).eps
STEPS = Steps(5, size=0.7, milestones=(0.6,))


@dataclass(frozen=True)
class Extreme:
    """Maximise one output per sample (or minimise it, with a sign of -1)."""

    index: Tensor
    sign: Tensor

    def __call__(self, outputs: Tensor) -> Tensor:
        return self.sign * outputs.gather(1, self.index[:, None])[:, 0]

    def reached(self, outputs: Tensor) -> Tensor:
        return torch.zeros(len(outputs), dtype=torch.bool)

    def select(self, index: Tensor) -> Extreme:
        return Extreme(self.index[index], self.sign[index])


def copies(box: Box, count: int) -> Box:
    """Return `count` copies of a batch of boxes, one after the other."""
    return box.map(lambda t: t.repeat(count, *[1] * (t.dim() - 1)))


def attacked_points(graph: Graph, box: Box) -> Tensor:
    """Return points that push each output (at most six of them) up and down."""
    outputs = min(6, graph.output_shape[0])
    batch = len(box.lower)
    index = torch.arange(outputs).repeat_interleave(2 * batch)
    sign = torch.tensor([1.0, -1.0]).repeat_interleave(batch).repeat(outputs)
    goal = Extreme(index, sign.to(box.lower.dtype))
    return pgd(graph.detach(), copies(box, 2 * outputs), goal, steps=STEPS)


def hard_points(graph: Graph, box: Box) -> Tensor:
    """Return corners, points near faces, and attacked points; always whole rounds of boxes."""
    torch.manual_seed(0)
    return torch.cat((points_in(box, 8), attacked_points(graph, box)))


def assert_inside(
    graph: Graph,
    bounds: dict[int, Box],
    points: Tensor,
    slack: dict[int, Tensor] | None = None,
) -> None:
    """Check the value of each node at each point against the node's bounds."""
    values = graph.propagate(evaluate.RULES, points, keep=range(len(graph.nodes)))
    for i, node in enumerate(graph.nodes):
        lower, upper = bounds[i].corners
        rounds = len(points) // len(lower)
        assert lower.shape[1:] == node.shape and (lower <= upper).all()
        lower, upper = copies(Box(lower.double(), upper.double()), rounds).corners
        allowed = 0.0 if slack is None else slack[i].repeat(rounds, *[1] * len(node.shape))
        value = values[i].double()
        assert torch.isfinite(value).all()
        assert (value >= lower - allowed).all(), f"below node {i}, {node.op}"
        assert (value <= upper + allowed).all(), f"above node {i}, {node.op}"


def all_bounds(graph: Graph, box: Box, rounding: float) -> dict[int, Box]:
    return interval.bounds(graph, box, keep=range(len(graph.nodes)), rounding=rounding)[1]


# --- bounds -----------------------------------------------------------------------------------


def check_strict(op: type[ops.Op], data: st.DataObject) -> None:
    """Strict float64 bounds hold with no tolerance at all.

    They cover the exact values and what float64 makes of them: the slack of each rule is at
    least twice the rounding error of the operation.
    """
    module = data.draw(networks(containing=op))
    graph = trace(module, module.input_shape).detach()
    assert op in {type(node.op) for node in graph.nodes}
    box = data.draw(boxes(module.input_shape))
    assert_inside(graph, all_bounds(graph, box, EPS), hard_points(graph, box))


def check_plain(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    """Bounds in plain arithmetic hold up to rounding: that of the bounds and of the point."""
    module = data.draw(networks(containing=op)).to(dtype)
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, dtype=dtype))
    slack = {i: 2 * error for i, error in rounding_errors(graph, box, dtype).items()}
    assert_inside(graph, all_bounds(graph, box, 0.0), hard_points(graph, box), slack)


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=4)
@given(data=st.data())
def test_strict_bounds_hold(op: type[ops.Op], data: st.DataObject) -> None:
    check_strict(op, data)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_plain_bounds_hold(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_plain(op, dtype, data)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=120)
@given(data=st.data())
def test_strict_bounds_hold_at_length(op: type[ops.Op], data: st.DataObject) -> None:
    check_strict(op, data)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=60)
@given(data=st.data())
def test_plain_bounds_hold_at_length(
    op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check_plain(op, dtype, data)


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


@settings(max_examples=30)
@given(data=st.data())
def test_batches_do_not_mix(data: st.DataObject) -> None:
    """Each box has its own bounds, whatever its neighbours in the batch are."""
    module = data.draw(networks(classes=3))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=3))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)))
    order = torch.tensor(data.draw(st.permutations(range(3))))
    errors = rounding_errors(graph, box, torch.float64)
    # Matrix products of other sizes may add in another order, so equality is up to rounding.
    together, shuffled = all_bounds(graph, box, 0.0), all_bounds(graph, box[order], 0.0)
    for i, error in errors.items():
        for a, b in zip(together[i].corners, shuffled[i].corners, strict=True):
            assert ((a[order] - b).abs() <= error[order]).all()
    last = errors[len(graph.nodes) - 1].amax(1, keepdim=True)
    both, _ = interval.margins(graph, box, labels)
    other, _ = interval.margins(graph, box[order], labels[order])
    assert ((both[order] - other).abs() <= 2 * last[order]).all()
    for k in range(3):
        alone, _ = interval.margins(graph, box[k : k + 1], labels[k : k + 1])
        assert ((alone[0] - both[k]).abs() <= 2 * last[k]).all()


# --- margins ----------------------------------------------------------------------------------


def check_margins(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    """Margins bound `o_y - o_i` from below at points attacked for just that."""
    ending = data.draw(st.sampled_from(["linear", "relu"]))
    module = data.draw(networks(containing=op, classes=4)).to(dtype)
    if ending == "relu":  # no linear layer to merge the differences with
        module.append(nn.ReLU(), (len(module.steps),))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, dtype=dtype))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
    # The outputs are rounded one by one, so that their difference is off by both errors.
    errors = rounding_errors(graph, box, dtype)[len(graph.nodes) - 1]
    slack = 2 * (errors + errors.gather(1, labels[:, None]))
    torch.manual_seed(0)
    goal = Targeted(labels.repeat(4), torch.arange(4).repeat_interleave(2))
    attacked = pgd(graph, copies(box, 4), goal, steps=STEPS)
    points = torch.cat((points_in(box, 8), attacked))
    rounds = len(points) // 2
    outputs = graph(points).double()
    values = outputs.gather(1, labels.repeat(rounds)[:, None]) - outputs
    for rounding in (0.0, torch.finfo(dtype).eps):
        lower, _ = interval.margins(graph, box, labels, rounding=rounding)
        assert lower.shape == (2, 4)
        assert (lower.gather(1, labels[:, None]) == 0).all()
        assert (values >= (lower.double() - slack).repeat(rounds, 1)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=5)
@given(data=st.data())
def test_margins_hold(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_margins(op, dtype, data)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=50)
@given(data=st.data())
def test_margins_hold_at_length(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_margins(op, dtype, data)


@settings(max_examples=40)
@given(data=st.data())
def test_merged_margins_are_at_least_as_tight(data: st.DataObject) -> None:
    module = data.draw(networks(classes=4))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
    merged, _ = interval.margins(graph, box, labels)
    output, _ = interval.bounds(graph, box)
    apart = output.lower.gather(1, labels[:, None]) - output.upper
    error = 2 * rounding_errors(graph, box, torch.float64)[len(graph.nodes) - 1]
    error = error + error.gather(1, labels[:, None])
    wrong = torch.ones_like(merged).scatter(1, labels[:, None], 0).bool()
    assert (merged >= apart - error)[wrong].all()


# --- the rules --------------------------------------------------------------------------------


def test_there_is_a_rule_for_every_operation() -> None:
    assert set(interval.RULES) == set(OPERATIONS)
    assert set(evaluate.RULES) == set(OPERATIONS)
