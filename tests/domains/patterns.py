"""The exact minimum over a small network, by trying every pattern of its activations.

On the inputs where every ReLU keeps its sign and every max pooling its winner the network is
affine, so that the minimum over them is a linear program. Nothing here is shared with the
encoding under test: the affine pieces are found by pushing points through the network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, evaluate, ops

MOST_PATTERNS = 1 << 12


class _Pattern:
    """One choice for every neuron: the network as an affine function where the choice holds."""

    def __init__(self, graph: Graph, choices: dict[int, Tensor]) -> None:
        self.graph, self.choices = graph, choices
        self.conditions: list[Tensor] = []

    def values(self, points: Tensor) -> Tensor:
        """Return the outputs; `conditions` are the values that have to be at least zero."""
        self.conditions = []
        values: dict[int, Tensor] = {0: points}
        for i, node in enumerate(self.graph.nodes[1:], start=1):
            inputs = [values[j] for j in node.inputs]
            if i in self.choices:
                values[i] = self._choose(node.op, inputs[0], self.choices[i], node.shape)
            else:
                values[i] = evaluate.RULES[type(node.op)](node.op, *inputs)
        return values[len(self.graph.nodes) - 1].flatten(1)

    def _choose(self, op: ops.Op, x: Tensor, choice: Tensor, shape: tuple[int, ...]) -> Tensor:
        flat = x.flatten(1)
        if isinstance(op, ops.MaxPool):
            winner = flat[:, choice]
            for tap in _taps(op, tuple(x.shape[1:])):
                inside = tap >= 0
                self.conditions.append((winner - flat[:, tap.clamp(min=0)])[:, inside])
            return winner.unflatten(1, shape)
        slope = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        self.conditions.append(flat * torch.where(choice, 1.0, -1.0))
        return (flat * torch.where(choice, 1.0, slope)).unflatten(1, shape)


def _taps(op: ops.MaxPool, shape: tuple[int, ...]) -> list[Tensor]:
    """Return, for each place in the window, the input there (or -1) of every output."""
    index = torch.arange(math.prod(shape), dtype=torch.float64).view(1, *shape)
    taps = []
    for row, column in itertools.product(range(op.kernel[0]), range(op.kernel[1])):
        # One-hot kernels: shift the image so that this place of the window comes first.
        down, right = row * op.dilation[0], column * op.dilation[1]
        reach = [2 * (k * d + s) for k, d, s in zip(op.kernel, op.dilation, op.stride, strict=True)]
        edges = (op.padding[1], reach[1], op.padding[0], reach[0])
        padded = torch.nn.functional.pad(index, edges, value=-1.0)[0, :, down:, right:]
        outputs = evaluate.RULES[ops.MaxPool](op, index).shape[2:]
        picked = padded[:, :: op.stride[0], :: op.stride[1]]
        taps.append(picked[:, : outputs[0], : outputs[1]].flatten().long())
    return taps


def _options(graph: Graph, box: Box) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Return the positions and sizes of the activations, and the choices of each neuron."""
    _, boxes = interval.bounds(graph, box, keep=range(len(graph.nodes)))
    positions, options = [], []
    for i, node in enumerate(graph.nodes):
        if not isinstance(node.op, ops.Relu | ops.LeakyRelu | ops.MaxPool):
            continue
        lower, upper = (t[0].flatten() for t in boxes[node.inputs[0]].corners)
        positions.append((i, math.prod(node.shape)))
        if isinstance(node.op, ops.MaxPool):
            taps = torch.stack(_taps(node.op, graph.nodes[node.inputs[0]].shape))
            for window in taps.T.tolist():
                inside = sorted({j for j in window if j >= 0})
                best = max(lower[j].item() for j in inside)
                options.append([j for j in inside if upper[j] >= best])
        else:
            options += [
                [True] if low >= 0 else [False] if high <= 0 else [True, False]
                for low, high in zip(lower.tolist(), upper.tolist(), strict=True)
            ]
    return positions, options


def _choices(graph: Graph, box: Box) -> Iterator[dict[int, Tensor]]:
    """Yield every pattern that interval bounds leave open."""
    positions, options = _options(graph, box)
    count = math.prod(len(choices) for choices in options)
    assert count <= MOST_PATTERNS, f"{count} patterns are too many"
    for pattern in itertools.product(*options):
        left = iter(pattern)
        yield {i: torch.tensor(list(itertools.islice(left, size))) for i, size in positions}


def patterns(graph: Graph, box: Box) -> int:
    """Return how many patterns `exact_minimum` has to try."""
    return math.prod(len(choices) for choices in _options(graph.to(torch.float64), box)[1])


def exact_minimum(graph: Graph, box: Box, row: Tensor, offset: float = 0.0) -> tuple[float, Tensor]:
    """Return the minimum of `row . output + offset` over one box and a point that attains it.

    The value is that of the network at the point; the linear programs are exact up to 1e-9.
    """
    graph = graph.detach().to(torch.float64)
    shape = graph.input_shape
    lower, upper = (t[0].double().flatten() for t in box.corners)
    middle, radius = (lower + upper) / 2, (upper - lower) / 2
    limits = torch.stack((lower - middle, upper - middle), 1).numpy()
    # An affine function is known from its values at one point and one step along each axis.
    probes = torch.cat((middle[None], middle + torch.eye(len(middle), dtype=torch.float64)))
    best, where = math.inf, middle
    for choice in _choices(graph, box):
        pattern = _Pattern(graph, choice)
        objective = pattern.values(probes.view(-1, *shape)) @ row.double().flatten()
        conditions = torch.cat(pattern.conditions or [objective.new_zeros(len(probes), 0)], 1)
        cost, gradients = objective[1:] - objective[0], conditions[1:] - conditions[0]
        # Most patterns need no linear program: somewhere they cannot hold, or cannot be better.
        highest = conditions[0] + gradients.T.abs() @ radius
        least = objective[0] + offset - cost.abs() @ radius
        if (highest < -1e-9).any() or least > best:
            continue
        found = linprog(
            cost.numpy(),
            A_ub=-gradients.T.numpy(),
            b_ub=conditions[0].numpy() + 1e-9,
            bounds=limits,
        )
        if found.status == 2:
            continue
        assert found.status == 0, found.message
        point = torch.clamp(middle + torch.from_numpy(np.asarray(found.x)), lower, upper)
        value = (graph(point.view(1, *shape)).flatten() @ row.double().flatten()).item() + offset
        if value < best:
            best, where = value, point
    return best, where.view(shape)
