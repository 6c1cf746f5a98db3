"""Is a graph the network it came from? For both front ends: torch modules and ONNX files.

A graph is handed out only after the network itself has computed the same at many points. Each node
gets the network's own values and is compared, element by element, with what the network computes
there, so that only the rounding of one operation has to be allowed for (bounds along whole paths
grow until they hide everything; and a tolerance in proportion to the largest output would hide
errors of the others). The outputs of the unmodified network are compared as well, with the
rounding of the whole path. `rounding.py` says what is assumed of the network's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import check_time
from tightrope.errors import UserError
from tightrope.graph import ops
from tightrope.graph.evaluate import ROUNDED_RULES
from tightrope.graph.graph import Graph
from tightrope.graph.rounding import Rounded
from tightrope.precision import full_precision

# Magnitudes of the random inputs.
SCALES = (1e-3, 0.1, 1.0, 10.0, 1e3)


@dataclass(frozen=True, eq=False)
class Shown:
    """What the network computes at a batch of points.

    `outputs` are those of the network as its user runs it, for all points or the first ones.
    `values` are by position in the graph: one or more tensors that the network computed where the
    graph has that node, with the samples first and as many elements, in whatever shape.
    """

    outputs: Tensor
    values: Mapping[int, Sequence[Tensor]]


@torch.no_grad()
def same_function(
    graph: Graph, run: Callable[[Tensor], Shown], points: Tensor, *, what: str = "the network"
) -> None:
    """Raise an error unless the graph computes at the points what the network does."""
    shown = run(points)
    same_nodes(graph, points, shown.values, what=what)
    same_outputs(graph, points[: len(shown.outputs)], shown.outputs, what=what)


@torch.no_grad()
def same_nodes(
    graph: Graph,
    points: Tensor,
    shown: Mapping[int, Sequence[Tensor]],
    *,
    what: str = "the network",
) -> None:
    """Compare node by node, each with the network's own inputs to it."""
    with full_precision():
        values: dict[int, Rounded] = {0: Rounded.known(points)}
        last_use = {j: i for i, node in enumerate(graph.nodes) for j in node.inputs}
        for i, node in enumerate(graph.nodes):
            check_time()
            if not isinstance(node.op, ops.Input):
                inputs = [values[j] for j in node.inputs]
                values[i] = ROUNDED_RULES[type(node.op)](node.op, *inputs)
                for j in set(node.inputs):
                    if last_use[j] == i:
                        del values[j]
            computed = values.get(i)
            for theirs in shown.get(i, ()):
                assert computed is not None
                where = f"at {node.name!r} ({type(node.op).__name__})"
                _compare(computed, theirs, f"{what} {where}")
                values[i] = Rounded.known(theirs.reshape(computed.value.shape))


@torch.no_grad()
def same_outputs(
    graph: Graph, points: Tensor, theirs: Tensor, *, what: str = "the network"
) -> Tensor:
    """Compare the outputs; return how far rounding on whole paths may lead from them."""
    with full_precision():
        ours: Rounded = graph.propagate(ROUNDED_RULES, Rounded.known(points))[len(graph.nodes) - 1]
        _compare(ours, theirs, f"{what} in its outputs", whole=True)
    return ours.error


def _compare(ours: Rounded, theirs: Tensor, where: str, *, whole: bool = False) -> None:
    """Raise an error unless two computations of a node, or of the `whole` network, agree."""
    if theirs.dtype != ours.value.dtype:
        raise UserError(f"the graph differs from {where}: {theirs.dtype} for {ours.value.dtype}")
    if theirs.numel() != ours.value.numel() or len(theirs) != len(ours.value):
        raise UserError(
            f"the graph differs from {where}: shape {tuple(theirs.shape[1:])} for "
            f"{tuple(ours.value.shape[1:])}"
        )
    value, error = ours.value, ours.error
    theirs = theirs.reshape(value.shape)
    difference = (theirs - value).abs()
    if bool((difference <= error).all()) and not bool(difference.isinf().any()):
        return  # as nearly always, without more passes over large tensors
    largest = torch.finfo(value.dtype).max
    # Where the network overflows (to the largest number, if it clips), a graph that nearly does is
    # excused.
    overflow = ~(theirs.abs() < largest) & ~(value.abs() + error < largest)
    # (A bound that overflows says nothing; a graph must not do so where the network does not.)
    # Along a whole path rounding may explain anything: what overflows then is no worse than what
    # does not, and each node was compared by itself.
    close = (difference <= error) & (torch.isfinite(value) | (error.isinf() & whole))
    same = close | (theirs == value) | overflow
    if bool(same.all()):
        return
    index = tuple(int(i) for i in (~same).nonzero()[0])
    raise UserError(
        f"the graph differs from {where}: {float(value[index]):.6g} instead of "
        f"{float(theirs[index]):.6g} at element {index[1:]}, and rounding explains only "
        f"{float(error[index]):.2g}; this network is not supported"
    )


def general_points(shape: Sequence[int], count: int, like: Tensor) -> Tensor:
    """Return `count` inputs: zeros, corners of the unit cube, signed extremes, random ones."""
    generator = torch.Generator().manual_seed(0)
    size = (count, *shape)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    signs = torch.where(uniform < 0.5, -1.0, 1.0)
    kinds: list[Callable[[int], Tensor]] = [
        lambda i: uniform[i],
        lambda i: normal[i] * SCALES[(i // 4) % len(SCALES)],
        lambda i: (uniform[i] < 0.5).double(),
        lambda i: signs[i] * SCALES[-1 - (i // 4) % len(SCALES)],
    ]
    rows = [torch.zeros_like(uniform[0]), torch.ones_like(uniform[0]), *(-signs[:1])]
    rows += [kinds[i % len(kinds)](i) for i in range(len(rows), count)]
    return torch.stack(rows[:count]).to(like)


def box_points(box: Box, count: int) -> Tensor:
    """Return `count` points of one box (a batch of one): its corners, its middle, random ones."""
    lower, upper = (t[0] for t in box.corners)
    generator = torch.Generator().manual_seed(1)
    shape = (count, *lower.shape)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(lower)
    corners = torch.where(uniform < 0.5, lower, upper)
    inside = (lower + uniform * (upper - lower)).clamp(lower, upper)
    middle = (lower / 2 + upper / 2).clamp(lower, upper)
    rows = [lower[None], upper[None], middle[None]]
    rows += [(corners if i % 2 else inside)[i : i + 1] for i in range(3, count)]
    return torch.cat(rows)[:count]
