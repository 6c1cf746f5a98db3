"""Samples and nodes without any dimension, as `h[:, 0]` makes them, are bounded like others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.box import Box
from tightrope.certification.bounding import METHODS
from tightrope.certification.cascade import solve
from tightrope.certification.complete import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.subjects import Subject
from tightrope.domains import interval
from tightrope.domains.milp import program as milp
from tightrope.domains.milp.encoding import Encoding
from tightrope.graph import Graph, Node, evaluate, ops
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = ops.Slice((0,))
LAST = ops.Slice((2,))


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def linear(outputs: int, inputs: int) -> ops.Linear:
    layer = nn.Linear(inputs, outputs).double().requires_grad_(False)
    return ops.Linear(2 * layer.weight, layer.bias)


def chain(*steps: tuple[ops.Op, tuple[int, ...]], shape: tuple[int, ...] = (4,)) -> Graph:
    """Return the graph of operations with the positions they read."""
    nodes = [Node("input", ops.Input(), (), shape)]
    for op, inputs in steps:
        samples = [torch.zeros(2, *nodes[i].shape, dtype=torch.float64) for i in inputs]
        result = evaluate.RULES[type(op)](op, *samples)
        nodes.append(Node(f"n{len(nodes)}", op, inputs, tuple(result.shape[1:])))
    return Graph(tuple(nodes))


def behind_a_slice(*operations: ops.Op) -> Graph:
    steps = [(linear(3, 4), (0,)), (FIRST, (1,))]
    steps += [(op, (i,)) for i, op in enumerate(operations, start=2)]
    return chain(*steps)


def graph(kind: str) -> Graph:
    torch.manual_seed(3)
    relu = ops.Relu()
    made = {
        "slice": lambda: behind_a_slice(),
        "relu": lambda: behind_a_slice(relu),
        "leaky": lambda: behind_a_slice(ops.LeakyRelu(0.1)),
        "sigmoid": lambda: behind_a_slice(ops.Sigmoid()),
        "tanh": lambda: behind_a_slice(ops.Tanh()),
        "shift": lambda: behind_a_slice(ops.Shift(number(0.5), subtract=True), relu),
        "scale": lambda: behind_a_slice(ops.Scale(number(-0.5)), relu),
        "divide": lambda: behind_a_slice(ops.Scale(number(0.5), divide=True), relu),
        "permute": lambda: behind_a_slice(ops.Permute((0,)), relu),
        "reshape": lambda: behind_a_slice(relu, ops.Reshape((1,)), linear(2, 1), relu),
        "to a number": lambda: chain(
            (linear(1, 4), (0,)),
            (ops.Reshape(()), (1,)),
            (relu, (2,)),
            (FIRST, (1,)),
            (ops.Add(), (3, 4)),
        ),
        "joins": lambda: chain(
            *((linear(3, 4), (0,)), (FIRST, (1,)), (LAST, (1,)), (relu, (3,)), (ops.Add(), (2, 4))),
            *((relu, (5,)), (ops.Sub(), (6, 2)), (relu, (7,)), (ops.Reshape((1,)), (8,))),
            *((ops.Concat(1), (9, 1)), (linear(2, 4), (10,))),
        ),
        "input": lambda: chain(
            *((relu, (0,)), (ops.Shift(number(0.25)), (1,)), (ops.Reshape((1,)), (2,))),
            *((linear(3, 1), (3,)), (relu, (4,)), (linear(2, 3), (5,))),
            shape=(),
        ),
    }
    return made[kind]()


KINDS = [
    *("slice", "relu", "leaky", "sigmoid", "tanh", "shift", "scale", "divide", "permute"),
    *("reshape", "to a number", "joins", "input"),
]
NOT_PIECEWISE_LINEAR = ("sigmoid", "tanh")


def boxes(network: Graph, count: int) -> Box:
    generator = torch.Generator().manual_seed(4)
    shape = (count, *network.input_shape)
    lower = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return Box(lower, lower + 0.7)


def samples(network: Graph, box: Box, count: int = 300) -> Tensor:
    """Return outputs at random points of one box, one row each."""
    points = box.sample(count)[0]
    return network(points).reshape(count, -1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold(kind, method):
    network = graph(kind)
    box = boxes(network, 3)
    found = tr.bounds(network, box, method=method)
    assert found.lower.shape == found.upper.shape == (3, *network.output_shape)
    for i in range(3):
        outputs = samples(network, box[i : i + 1])
        assert (outputs >= found.lower[i].reshape(-1) - 1e-9).all()
        assert (outputs <= found.upper[i].reshape(-1) + 1e-9).all()
        # Not so wide that anything would hold.
        width = (found.upper[i] - found.lower[i]).reshape(-1)
        assert (width <= 5 * (outputs.amax(0) - outputs.amin(0)) + 1e-6).any()


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(NOT_PIECEWISE_LINEAR)))
def test_exact_minima_are_those_of_samples(kind):
    network = graph(kind)
    box = boxes(network, 1)
    size = torch.Size(network.output_shape).numel()
    row = torch.ones(size, dtype=torch.float64)
    everywhere = range(len(network.nodes))
    bounds = interval.bounds(network, box, keep=everywhere, rounding=ROUNDING)[1]
    best = milp.minimize(Encoding(network, box, bounds), row)
    sampled = float((samples(network, box, 20000) @ row).min())
    assert sampled - 0.2 <= best.lower <= sampled


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_follow_the_least_output(kind):
    """A threshold below every output is verified, one above the least sampled is falsified."""
    network = graph(kind)
    box = boxes(network, 1)
    least = float(samples(network, box, 2000)[:, 0].min())
    size = torch.Size(network.output_shape).numel()
    row = torch.zeros(1, size, dtype=torch.float64)
    row[0, 0] = 1.0
    for shift, expected in ((1.0, Verdict.VERIFIED), (-0.05, Verdict.FALSIFIED)):
        threshold = least - shift
        unsafe = Unsafe(row, torch.tensor([-threshold], dtype=torch.float64), torch.zeros(1).long())
        subject = Subject(network, lambda x: network(x).reshape(len(x), -1))
        problem = Problem(
            box, box, unsafe, lambda x, t=threshold: float(network(x[None]).reshape(-1)[0]) <= t
        )
        assert solve(subject, problem, timeout=60).verdict is expected
