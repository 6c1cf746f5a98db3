"""What tests of linear bounds share: efforts, rows of outputs, small networks."""

from __future__ import annotations

import torch
from networks import points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.alpha import optimize_slopes
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import Effort
from tightrope.graph import Graph, ops, trace
from tightrope.graph.graph import Node

OPERATIONS = [op for op in ops.ALL_OPS if op is not ops.Input]
EPS = torch.finfo(torch.float64).eps
EFFORTS = {"crown-ibp": Effort(iterations=None), "crown": Effort(0), "alpha": Effort(5)}


def output_rows(relaxation: Relaxation, matrix: Tensor) -> Coefficients:
    """Return all rows of a matrix for every batch element, element after element."""
    batch, count = len(relaxation.boxes[0].lower), len(matrix)
    values = matrix.reshape(count, *relaxation.graph.output_shape)
    values = values.repeat(batch, *[1] * (values.dim() - 1))
    owner = None if batch == 1 else torch.arange(batch).repeat_interleave(count)
    return Coefficients(values, owner)


def signed_rows(outputs: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return rows that pick outputs, up and down, and some combinations."""
    unit = torch.eye(outputs, dtype=torch.float64)[:4]
    mixed = torch.randn(3, outputs, generator=generator, dtype=torch.float64)
    return torch.cat((unit, -unit, mixed)).to(dtype)


def assert_rows_below(found: Relaxation, points: Tensor, matrix: Tensor, slack: Tensor) -> None:
    """Check bounds of rows of the output, with default slopes and with random ones."""
    rows = output_rows(found, matrix)
    batch = len(found.boxes[0].lower)
    values = found.graph(points).flatten(1) @ matrix.t()
    values = values.view(-1, batch, len(matrix))
    start = optimize_slopes(found, found.output, rows, iterations=0)
    torch.manual_seed(1)
    for slopes in (None, {i: torch.rand_like(t) * 1.5 - 0.25 for i, t in start.items()}):
        lower = found.lower(found.output, rows, slopes=slopes).view(batch, -1)
        assert lower.dtype == matrix.dtype
        usable = torch.isfinite(lower)
        assert (~usable | (values >= lower - slack)).all()


class Residual(nn.Module):
    """Convolutions with joins of different receptive fields."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, 2, 1)
        self.deep = nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1), activation, nn.Conv2d(4, 3, 3, 1, 2, dilation=2)
        )
        self.short = nn.Conv2d(3, 3, 1, groups=3)
        self.act = activation
        self.end = nn.Sequential(nn.Flatten(), nn.Linear(27, 6), activation, nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.end(self.act(self.deep(x) + self.short(x) - x))


def small_network(kind: str, activation: nn.Module, *, seed: int = 0) -> Graph:
    """Return a dense, a convolutional or a residual network with three outputs."""
    torch.manual_seed(seed)
    if kind == "dense":
        module: nn.Module = nn.Sequential(
            nn.Linear(3, 6), activation, nn.Linear(6, 5), activation, nn.Linear(5, 3)
        )
    elif kind == "conv":
        module = nn.Sequential(
            nn.Conv2d(2, 3, 3, 1, 1),
            nn.BatchNorm2d(3),
            activation,
            nn.Conv2d(3, 4, 2, 2),
            activation,
            nn.Flatten(),
            nn.Linear(36, 3),
        )
    else:
        module = Residual(activation)
    shape = (3,) if kind == "dense" else (2, 6, 6)
    return trace(module.double().eval(), shape).detach()


def small_box(graph: Graph, radius: float, *, seed: int = 0, batch: int = 1) -> Box:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, *graph.input_shape)
    center = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
    width = torch.rand(shape, generator=generator, dtype=torch.float64) * radius
    return Box(center - width, center + width)


def many_points(box: Box, count: int = 200) -> Tensor:
    """Return points of one box, corners and faces first, then inside."""
    torch.manual_seed(0)
    return torch.cat((points_in(box, count), box.sample(count)[0]))


def wired(shape: tuple[int, ...], *steps: tuple[ops.Op, tuple[int, ...], tuple[int, ...]]) -> Graph:
    """Return a graph written down node by node: operation, inputs, shape; the input is node 0."""
    nodes = [Node("x", ops.Input(), (), shape)]
    nodes += [Node(f"n{i}", *step) for i, step in enumerate(steps, start=1)]
    return Graph(tuple(nodes))
