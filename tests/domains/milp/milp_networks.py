"""Small networks as mixed-integer programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.milp.encoding import Encoding
from tightrope.graph import Graph, ops, trace

EPS = torch.finfo(torch.float64).eps
ACTIVATIONS = (ops.Relu, ops.LeakyRelu, ops.MaxPool)


class Residual(nn.Module):
    """A residual block with a ReLU in the branch and one behind the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x - self.second(torch.relu(self.first(x))))


def dense() -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.Sequential(*layers), (3,)


def conv() -> tuple[nn.Module, tuple[int, ...]]:
    norm = nn.BatchNorm2d(2)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    image = (nn.Conv2d(1, 2, 2, stride=2, padding=1), norm, nn.AvgPool2d(2), nn.ReLU())
    head = (nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.Sequential(*image, *head), (1, 3, 3)


def residual() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(2, 4), Residual(4), nn.Linear(4, 3)), (2,)


def leaky() -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3), nn.LeakyReLU(2.0))
    return nn.Sequential(*layers, nn.Linear(3, 3)), (3,)


def pooled() -> tuple[nn.Module, tuple[int, ...]]:
    image = (nn.Conv2d(1, 1, 2), nn.MaxPool2d(2, stride=1, padding=1, ceil_mode=True))
    head = (nn.Flatten(), nn.Linear(9, 2), nn.ReLU(), nn.Linear(2, 3))
    return nn.Sequential(*image, *head), (1, 3, 3)


KINDS = {"dense": dense, "conv": conv, "residual": residual, "leaky": leaky, "pooled": pooled}


def setting(kind: str, seed: int, radius: float = 0.4) -> tuple[Graph, Box, Tensor]:
    """Return a random network, one box and one row."""
    torch.manual_seed(seed)
    module, shape = KINDS[kind]()
    graph = trace(module.double().eval(), shape).detach()
    for op in (node.op for node in graph.nodes if isinstance(node.op, ops.Linear)):
        op.weight.mul_(2.0)
    box = Box.ball(torch.rand(1, *shape, dtype=torch.float64), radius)
    return graph, box, torch.randn(3, dtype=torch.float64)


def feeding(graph: Graph) -> list[int]:
    return [node.inputs[0] for node in graph.nodes if isinstance(node.op, ACTIVATIONS)]


def strict_bounds(graph: Graph, box: Box) -> dict[int, Box]:
    return interval.bounds(graph, box, keep=feeding(graph), rounding=EPS)[1]


def encoded(graph: Graph, box: Box, *, relaxed: bool = False) -> Encoding:
    return Encoding(graph, box, strict_bounds(graph, box), relaxed=relaxed)


def value(graph: Graph, point: Tensor, row: Tensor) -> float:
    return (graph(point[None]).flatten() @ row).item()
