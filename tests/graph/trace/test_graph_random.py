"""Random modules: each is refused in one line, or its graph computes what it computes.

`trace` compares node by node; here the outputs are compared at other points, in float64, with
bounds of rounding errors that have nothing to do with those of `trace`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from networks import rounding_errors
from random_modules import Written, write
from torch import Tensor
from used_numbers import in_float64

from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import Graph, ops, trace
from tightrope.graph.trace import elementwise, moves, reductions, smooth, steps, windows
from tightrope.graph.trace.tracing import converters

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Operators that are known only to be refused, and those that PyTorch's rewriting may introduce.
REFUSED = {
    *("reciprocal", "max_pool2d_with_indices", "fill", "copy"),
    *("slice_scatter", "select_scatter"),
}
RARE = {
    *("_to_copy", "_unsafe_view", "feature_alpha_dropout", "alpha_dropout", "constant_pad_nd"),
    *("contiguous", "detach_"),
    # Each of these has cases of its own in the tests of layers, of steps or of smooth functions.
    *(
        str(op).removeprefix("aten.")
        for room in (moves, windows, reductions, elementwise, smooth, steps)
        for op in room.CONVERTERS
    ),
}

# Bounds make the differences of a softmax; distances are layers of ours, with tests of their own.
TRACED = set(ops.ALL_OPS) - {ops.Differences, ops.Distance}


def fresh_points(module: Written, seed: str) -> Tensor:
    """Return points that `trace` has not seen, of all magnitudes, one of them zero."""
    generator = torch.Generator().manual_seed(sum(seed.encode()) + 12345)
    size = (9, *module.input_shape)
    points = torch.randn(size, generator=generator, dtype=torch.float64)
    scales = torch.tensor([0.0, 1e-3, 0.1, 1.0, 1.0, 1.0, 3.0, 30.0, 1e3], dtype=torch.float64)
    return points * scales.view(-1, *[1] * len(module.input_shape))


@torch.no_grad()
def assert_same_outputs(module: Written, graph: Graph, x: Tensor) -> None:
    ours, theirs = graph.detach().to(torch.float64)(x), in_float64(module, x)
    assert ours.shape == theirs.shape == (len(x), *graph.output_shape)
    allowed = rounding_errors(graph, Box(x, x), torch.float64)[len(graph.nodes) - 1]
    wrong = ~((ours - theirs).abs() <= allowed)
    assert not wrong.any(), (ours[wrong], theirs[wrong], allowed[wrong])
    alone = torch.cat([in_float64(module, row[None]) for row in x])
    assert ((ours - alone).abs() <= allowed).all()


def examine(seed: str) -> Graph | str:
    """Trace a module and return its graph, or the reason why there is none."""
    module = write(seed)
    try:
        graph = trace(module, module.input_shape)
    except UserError as error:
        message = str(error)
        assert "\n" not in message, message
        return message
    except Exception as error:
        raise AssertionError(f"{seed}\n{module}\n{module.source}") from error
    try:
        assert_same_outputs(module, graph, fresh_points(module, seed))
    except AssertionError as error:
        raise AssertionError(f"{seed}\n{module}\n{module.source}\n{error}") from error
    return graph


def operations(graphs: Iterable[Graph]) -> set[type[ops.Op]]:
    """Return the kinds of operations that occur in any of the graphs."""
    return {type(node.op) for graph in graphs for node in graph.nodes}


def examine_all(seeds: Iterable[str]) -> tuple[list[Graph], Counter[str]]:
    graphs, refused = [], Counter[str]()
    for seed in seeds:
        found = examine(seed)
        if isinstance(found, Graph):
            graphs.append(found)
        else:
            refused[found.partition(". Supported")[0]] += 1
    return graphs, refused


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each converter gave a result."""
    counts: Counter[str] = Counter()

    def counting(name: str, convert: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = convert(*args, **kwargs)
            counts[name] += 1
            return result

        return wrapped

    for operator, convert in list(converters.CONVERTERS.items()):
        name = str(operator).removeprefix("aten.")
        monkeypatch.setitem(converters.CONVERTERS, operator, counting(name, convert))
    return counts


def test_random_modules(converted: Counter[str]) -> None:
    graphs, refused = examine_all(f"quick {i}" for i in range(150))
    assert refused.total() < 0.2 * (len(graphs) + refused.total()), refused
    assert operations(graphs) == TRACED
    assert len(converted) > 35


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_modules(part: int, converted: Counter[str]) -> None:
    graphs, refused = examine_all(f"slow {part} {i}" for i in range(500))
    print(f"part {part}: {len(graphs)} traced, {refused.total()} refused", refused.most_common())
    assert refused.total() < 0.2 * 500, refused
    assert operations(graphs) == TRACED
    known = {str(operator).removeprefix("aten.") for operator in converters.CONVERTERS}
    assert known - set(converted) <= REFUSED | RARE
