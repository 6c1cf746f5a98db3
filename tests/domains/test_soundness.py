"""Bounds hold, in every domain: no point of a box leaves those of any node of any network."""

from __future__ import annotations

import pytest
import torch
from enclosures import OPERATIONS, STEPS, assert_inside, copies, hard_points
from fuzzed import DOMAINS, Domain, Errors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.attacks import Targeted, pgd
from tightrope.domains import interval, zonotope
from tightrope.domains.linear import magnitudes, rules
from tightrope.graph import Graph, evaluate, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = torch.finfo(torch.float64).eps
RULES = {
    "points": evaluate.RULES,
    "interval": interval.RULES,
    "linear": rules.RULES,
    "magnitudes": magnitudes.RULES,
    "zonotope": zonotope.RULES,
}
GROWING = (ops.Mul, ops.MatMul, ops.Function, ops.Softmax, ops.Standardize)
LARGE = 100.0
STRICT = [name for name, domain in DOMAINS.items() if domain.strict is not None]
WITH_MARGINS = [name for name, domain in DOMAINS.items() if domain.margins is not None]

every_domain = pytest.mark.parametrize("name", DOMAINS)
every_operation = pytest.mark.parametrize("op", OPERATIONS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def times(factor: float, errors: Errors) -> Errors | None:
    return {i: factor * error for i, error in errors.items()} if factor else None


def check(
    domain: Domain,
    op: type[ops.Op],
    data: st.DataObject,
    *,
    dtype: torch.dtype = torch.float64,
    rounding: float = 0.0,
) -> None:
    """Compare the bounds of all nodes with their values at sampled and attacked points."""
    module = data.draw(networks(containing=op)).to(dtype)
    graph = trace(module, module.input_shape).detach()
    assert op in {type(node.op) for node in graph.nodes}
    batch = data.draw(st.sampled_from([2, 1]))
    box = data.draw(boxes(module.input_shape, batch=batch, dtype=dtype))
    if not rounding and any(isinstance(node.op, GROWING) for node in graph.nodes):
        # Plain arithmetic has no digits left where planes around products of huge numbers cancel.
        assume(float(torch.maximum(box.lower.abs(), box.upper.abs()).max()) < LARGE)
    found = domain.draw(data)(graph, box, rounding)
    errors = domain.errors(graph, box, dtype)
    factor = domain.strict if rounding else domain.plain
    assert factor is not None
    points = hard_points(graph, box)
    assert_inside(graph, dict(found.boxes), points, times(factor, errors))
    found.check(points, factor * errors[len(graph.nodes) - 1])


@pytest.mark.parametrize("name", STRICT)
@every_operation
@settings(max_examples=4)
@given(data=st.data())
def test_strict_bounds_hold(name: str, op: type[ops.Op], data: st.DataObject) -> None:
    check(DOMAINS[name], op, data, rounding=EPS)


@every_domain
@every_dtype
@every_operation
@settings(max_examples=3)
@given(data=st.data())
def test_plain_bounds_hold(
    name: str, op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check(DOMAINS[name], op, data, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT)
@every_operation
@settings(max_examples=120)
@given(data=st.data())
def test_strict_bounds_hold_at_length(name: str, op: type[ops.Op], data: st.DataObject) -> None:
    check(DOMAINS[name], op, data, rounding=EPS)


@pytest.mark.slow
@every_domain
@every_dtype
@every_operation
@settings(max_examples=100)
@given(data=st.data())
def test_plain_bounds_hold_at_length(
    name: str, op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check(DOMAINS[name], op, data, dtype=dtype)


@every_domain
@settings(max_examples=30)
@given(data=st.data())
def test_batches_do_not_mix(name: str, data: st.DataObject) -> None:
    """Each box has its own bounds, whatever its neighbours in the batch are.

    Matrix products of other sizes may add in another order, so equality is up to rounding.
    """
    domain = DOMAINS[name]
    module = data.draw(networks(classes=3))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=3))
    order = torch.tensor(data.draw(st.permutations(range(3))))
    bounding = domain.draw(data)
    together, shuffled = (bounding(graph, b, 0.0).boxes for b in (box, box[order]))
    alone = [bounding(graph, box[k : k + 1], 0.0).boxes for k in range(3)]
    for i, error in domain.errors(graph, box, torch.float64).items():
        singles = zip(*(boxes[i].corners for boxes in alone), strict=True)
        corners = zip(together[i].corners, shuffled[i].corners, singles, strict=True)
        for all_three, other_order, one_by_one in corners:
            allowed = domain.apart * error
            assert ((all_three[order] - other_order).abs() <= allowed[order]).all()
            assert ((all_three - torch.cat(one_by_one)).abs() <= allowed).all()


# --- margins ----------------------------------------------------------------------------------


def labelled(data: st.DataObject, batch: int = 2) -> Tensor:
    """Draw the classes of a batch, out of four."""
    return torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch)))


def of_margins(domain: Domain, graph: Graph, errors: Errors, labels: Tensor) -> Tensor:
    """Return the slack of margins: outputs are rounded one by one, so a difference has both."""
    error = domain.plain * errors[len(graph.nodes) - 1]
    return error + error.gather(1, labels[:, None])


def check_margins(
    domain: Domain, op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    """Margins bound `o_y - o_i` from below at points attacked for just that."""
    assert domain.margins is not None
    ending = data.draw(st.sampled_from(["linear", "relu"]))
    module = data.draw(networks(containing=op, classes=4)).to(dtype)
    if ending == "relu":  # no linear layer to merge the differences with
        module.append(nn.ReLU(), (len(module.steps),))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, dtype=dtype))
    labels = labelled(data)
    slack = of_margins(domain, graph, domain.errors(graph, box, dtype), labels)
    torch.manual_seed(0)
    goal = Targeted(labels.repeat(4), torch.arange(4).repeat_interleave(2))
    attacked = pgd(graph, copies(box, 4), goal, steps=STEPS)
    points = torch.cat((points_in(box, 8), attacked))
    rounds = len(points) // 2
    outputs = graph(points).double()
    values = outputs.gather(1, labels.repeat(rounds)[:, None]) - outputs
    for rounding in (0.0,) if domain.strict is None else (0.0, torch.finfo(dtype).eps):
        lower = domain.margins(graph, box, labels, rounding)
        assert lower.shape == (2, 4)
        assert (lower.gather(1, labels[:, None]) == 0).all()
        assert (values >= (lower.double() - slack).repeat(rounds, 1)).all()


@pytest.mark.parametrize("name", WITH_MARGINS)
@every_dtype
@every_operation
@settings(max_examples=5)
@given(data=st.data())
def test_margins_hold(name: str, op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_margins(DOMAINS[name], op, dtype, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MARGINS)
@every_dtype
@every_operation
@settings(max_examples=50)
@given(data=st.data())
def test_margins_hold_at_length(
    name: str, op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check_margins(DOMAINS[name], op, dtype, data)


@pytest.mark.parametrize("name", WITH_MARGINS)
@settings(max_examples=40)
@given(data=st.data())
def test_merged_margins_are_at_least_as_tight(name: str, data: st.DataObject) -> None:
    domain = DOMAINS[name]
    assert domain.margins is not None
    module = data.draw(networks(classes=4))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape))
    labels = labelled(data)
    merged = domain.margins(graph, box, labels, 0.0)
    output = domain.draw(data)(graph, box, 0.0).boxes[len(graph.nodes) - 1]
    apart = output.lower.gather(1, labels[:, None]) - output.upper
    slack = of_margins(domain, graph, domain.errors(graph, box, torch.float64), labels)
    wrong = torch.ones_like(merged).scatter(1, labels[:, None], 0).bool()
    assert (merged >= apart - slack)[wrong].all()


@pytest.mark.parametrize("name", WITH_MARGINS)
@settings(max_examples=30)
@given(data=st.data())
def test_margins_of_batches_do_not_mix(name: str, data: st.DataObject) -> None:
    domain = DOMAINS[name]
    assert domain.margins is not None
    module = data.draw(networks(classes=4))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=3))
    labels = labelled(data, batch=3)
    order = torch.tensor(data.draw(st.permutations(range(3))))
    last = domain.errors(graph, box, torch.float64)[len(graph.nodes) - 1].amax(1, keepdim=True)
    allowed = 2 * domain.apart * last
    both = domain.margins(graph, box, labels, 0.0)
    other = domain.margins(graph, box[order], labels[order], 0.0)
    assert ((both[order] - other).abs() <= allowed[order]).all()
    for k in range(3):
        alone = domain.margins(graph, box[k : k + 1], labels[k : k + 1], 0.0)
        assert ((alone[0] - both[k]).abs() <= allowed[k]).all()


# --- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
def test_there_is_a_rule_for_every_operation(rules: str) -> None:
    assert set(RULES[rules]) == set(OPERATIONS)
